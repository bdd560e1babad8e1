"""Files that are either whole or absent: everything Fourfold writes goes through here."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: Path | str, write: Callable[[Path], None]) -> Path:
    """Call ``write(temporary path)`` beside ``path`` and rename over it; on any error leave nothing behind."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        # mkstemp makes 0600 files; a result is meant to be read like any other file of the user
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def write_text(path: Path | str, text: str) -> Path:
    """Write UTF-8 text atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    return write_atomically(path, write)


def write_json(path: Path | str, value: Any) -> Path:
    """Write ``value`` as indented JSON atomically; NaN and infinities are refused (they are not JSON)."""
    return write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
