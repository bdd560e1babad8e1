"""Why a program that we started stopped, told from its log; and modules run in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fourfold.errors import FourfoldError

_PREFIX = re.compile(r"^(?:\([\w ]+pid=\d+\)\s*)?(?:\[rank\d+\]:\s?)?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]+\]\s*)?")
"""vLLM's process and log prefixes."""
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(?:\w*(?:Error|Exception|Interrupt)): \S")
_EMPTY = ("Engine core initialization failed", "Engine process failed", "cancelled")
"""Messages that only say that another process failed, and not why."""


def explain(log: Sequence[str], lines: int = 12) -> str:
    """The message of the first exception that says something, and otherwise the last lines of the log."""
    clean = [_PREFIX.sub("", line.rstrip()) for line in log]
    said = [line for line in clean if _EXCEPTION.match(line) and not any(text in line for text in _EMPTY)]
    if said:
        return said[0].split(": ", 1)[1] if said[0].startswith("fourfold.") else said[0]
    return "the end of its log says:\n" + "\n".join(log[-lines:])


def run_module(module: str, argument: Path, what: str, *, fix: str = "", env: Mapping[str, str] | None = None) -> None:
    """Run ``python -m module argument`` to its end, with ``env`` added to the environment.

    For work that is slow to import, prints to stdout or should give its memory back.

    Raises:
        FourfoldError: it failed; ``what`` says what did, its output why.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, str(argument)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise FourfoldError(what, why=explain((done.stdout + done.stderr).splitlines()), fix=fix)
