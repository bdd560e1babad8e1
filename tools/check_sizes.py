"""Fails when a source file has grown past 400 lines: one concept a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMIT = 400
SUFFIXES = {".py", ".cpp", ".cu", ".cuh", ".h"}


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    long = []
    for name in listed:
        path = Path(name)
        if path.suffix in SUFFIXES and path.exists():
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > LIMIT:
                long.append(f"{name}: {lines} lines, at most {LIMIT}")
    print("\n".join(long) or "no source file is over the limit")
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main())
