"""Traces of served requests: what `fourfold serve --record-lengths FILE` writes and `ranker train` reads.

One JSON object a line::

    {"v": 1, "features": 1, "codes": "<base64>", "prompt_tokens": 12, "output_tokens": 345, "finish": "stop"}

``codes`` are the little-endian uint32 of ``features.prompt_codes``: hashes, not words.  They are not a secret
(anyone can hash a dictionary and compare), only not readable.  ``"prompt"`` is there when the operator asked.

A line is written with one ``write`` to a file opened with O_APPEND, so several processes may share a file and
a crash costs at most the line being written; the reader leaves out a last line without an end.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import FourfoldError
from fourfold.rank.features import BUCKETS, FEATURES_VERSION, prompt_codes

TRACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One finished request.

    Attributes:
        codes: uint32 [n] hashed features of the prompt.
        prompt_tokens, output_tokens: lengths in the served model's tokens.
        finish: vLLM's finish reason ("stop", "length", "abort", …).
        prompt: the text, if it was recorded.
    """

    codes: NDArray[np.uint32]
    prompt_tokens: int
    output_tokens: int
    finish: str
    prompt: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the model ended the answer itself; otherwise the length is only a lower bound."""
        return self.finish == "stop"


class TraceWriter:
    """Appends rows to a trace.  ``with TraceWriter(path) as trace: trace.write(…)``."""

    def __init__(self, path: Path, *, with_prompts: bool = False) -> None:
        self.path, self.with_prompts = path, with_prompts
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise FourfoldError(
                f"the trace {path} cannot be written", why=str(error), fix="name another file"
            ) from None
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            # an earlier writer died within a line: end it, so that only that line is lost
            os.write(self._handle, b"\n")

    def write(self, prompt: str, *, prompt_tokens: int, output_tokens: int, finish: str) -> None:
        """Append one finished request."""
        self.write_row(TraceRow(prompt_codes(prompt), prompt_tokens, output_tokens, finish, prompt))

    def write_row(self, row: TraceRow) -> None:
        """Append a row whose features are already there; its text is written only by a writer with prompts."""
        value: dict[str, object] = {
            "v": TRACE_VERSION,
            "features": FEATURES_VERSION,
            "codes": base64.b64encode(row.codes.astype("<u4").tobytes()).decode("ascii"),
            "prompt_tokens": row.prompt_tokens,
            "output_tokens": row.output_tokens,
            "finish": row.finish,
        }
        if self.with_prompts and row.prompt is not None:
            value["prompt"] = row.prompt
        os.write(self._handle, (json.dumps(value) + "\n").encode())

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _row(line: bytes) -> TraceRow:
    value = json.loads(line)
    if value["v"] != TRACE_VERSION or value["features"] != FEATURES_VERSION:
        raise FourfoldError(
            "the trace was recorded by another version",
            why=f"it has features {value['features']}, this version computes {FEATURES_VERSION}",
            fix="record a new trace",
        )
    codes = np.frombuffer(base64.b64decode(value["codes"], validate=True), dtype="<u4").astype(np.uint32)
    if not codes.size or int((codes & np.uint32((1 << 24) - 1)).max()) >= BUCKETS or not (codes >> np.uint32(24)).all():
        raise ValueError("damaged features")
    prompt = value.get("prompt")
    return TraceRow(
        codes,
        int(value["prompt_tokens"]),
        int(value["output_tokens"]),
        str(value["finish"]),
        prompt if isinstance(prompt, str) else None,
    )


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Rows of a trace, in order.

    A line that a crash cut short is left out, wherever it stands (the next writer ended it).

    Raises:
        FourfoldError: for a missing file, one of another version, or one where most lines are damaged.
    """
    if not path.is_file():
        raise FourfoldError(f"there is no trace {path}", fix="record one with `fourfold serve --record-lengths FILE`")
    good = bad = 0
    with path.open("rb") as file:
        for line in file:
            try:
                row = _row(line)
            except (ValueError, KeyError, TypeError):
                bad += 1
                continue
            good += 1
            yield row
    if bad > good:
        raise FourfoldError(f"{path} is not a trace", why=f"{bad} of {good + bad} lines are damaged")


def is_trace(path: Path) -> bool:
    """Whether the first line of a JSONL file looks like one of a trace."""
    with path.open("rb") as file:
        head = file.readline(1 << 20)
    return b'"codes"' in head and b'"features"' in head
