"""Why a program that we started stopped, told from its log."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
