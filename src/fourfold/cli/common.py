"""What every command shares: consoles, the error contract, JSON output, sizes and settings."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.status import Status

from fourfold.config import Settings
from fourfold.errors import FourfoldError

EXIT_FAILURE = 1
"""The command ran and what it measured failed."""
EXIT_INPUT = 2
"""The input cannot be used, or a promise cannot be kept."""

err = Console(stderr=True, highlight=False)
"""Progress and messages; stdout is kept for results."""

P = ParamSpec("P")
R = TypeVar("R")

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?\s*$")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """``5GiB``, ``48M``, ``2GB`` or plain bytes.

    As vLLM reads ``--kv-cache-memory-bytes``: a bare capital letter (``48M``) is binary and a small one
    (``48m``) decimal; ``MiB`` is always binary and ``MB`` always decimal.
    """
    match = _SIZE.match(text)
    if not match:
        raise FourfoldError(f"{text!r} is not an amount of memory", fix="write it like 5GiB, 48M or 1073741824")
    number, letter, unit = match.group(1), match.group(2), (match.group(3) or "").lower()
    binary = unit == "ib" or (unit == "" and letter.isupper())
    value = int(float(number) * (1024 if binary else 1000) ** _POWER[letter.lower()])
    if value <= 0:
        raise FourfoldError("the amount of memory must be more than nothing", fix="write it like 5GiB")
    return value


def emit_json(value: Any) -> None:
    """Print one JSON document to stdout and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


class Working:
    """What long work says about itself: a line that changes on a terminal, one line a phase elsewhere."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def phase(self, text: str) -> None:
        """A new phase has begun; also written where there is no terminal."""
        if err.is_terminal:
            self._status.update(text)
        else:
            err.print(text, markup=False)

    def update(self, text: str) -> None:
        """The phase goes on; shown on a terminal only."""
        self._status.update(text)


@contextmanager
def working(text: str) -> Iterator[Working]:
    """Show that something is going on, from ``text`` on."""
    with err.status(text) as status:
        shown = Working(status)
        shown.phase(text)
        yield shown


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what an engine in this process and its children print to stderr: stdout is kept for results."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def fail(error: FourfoldError) -> NoReturn:
    """Print the one message of an input error and leave with code 2."""
    err.print("error:", style="bold red", end=" ")
    err.print(str(error), markup=False, soft_wrap=True)
    raise typer.Exit(EXIT_INPUT)


def print_errors(errors: list[str]) -> None:
    """What the load generator said of failed requests; the texts come from servers and are not markup."""
    for error in errors:
        err.print(f"  {error}", markup=False, soft_wrap=True)


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn ``FourfoldError`` into a message and exit code 2."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except FourfoldError as error:
            fail(error)
        except KeyboardInterrupt:
            err.print("interrupted")
            raise typer.Exit(130) from None

    return wrapper


def make_settings(calibration: str | None, prefill: str | None, cache_dir: Path | None) -> Settings:
    """Settings from the environment, with the flags that were given on top.

    Raises:
        FourfoldError: for a value that is not known, before anything is started.
    """
    environ = dict(os.environ)
    for name, value in (
        ("FOURFOLD_CALIBRATION", calibration),
        ("FOURFOLD_PREFILL", prefill),
        ("FOURFOLD_CACHE_DIR", str(cache_dir) if cache_dir else None),
    ):
        if value is not None:
            environ[name] = value
    settings = Settings.from_env(environ)
    if settings.calibration not in ("auto", "none") and not Path(settings.calibration).is_file():
        raise FourfoldError(
            f"there is no calibration file {settings.calibration}", fix="pass auto, none, or the path of a file"
        )
    return settings
