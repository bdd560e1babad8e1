"""How long an engine step takes: a linear model, fitted to recorded steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fourfold.errors import FourfoldError
from fourfold.files import write_json


@dataclass(frozen=True, slots=True)
class StepTime:
    """``base + prefill_token * p + decode_seq * n + context_token * c`` seconds for a step.

    Attributes:
        base: seconds a step costs whatever is in it (weights are read once, host work).
        prefill_token: seconds a prompt token.
        decode_seq: seconds a decoding sequence.
        context_token: seconds a token of KV that the decoding sequences attend to.
    """

    base: float
    prefill_token: float
    decode_seq: float
    context_token: float

    def __post_init__(self) -> None:
        values = (self.base, self.prefill_token, self.decode_seq, self.context_token)
        if not all(np.isfinite(values)) or min(values) < 0 or self.base <= 0:
            raise FourfoldError(
                "a step-time model needs finite, non-negative times and a positive base", why=f"it has {values}"
            )

    def seconds(self, prefill_tokens: int, decode_seqs: int, context_tokens: int) -> float:
        return (
            self.base
            + self.prefill_token * prefill_tokens
            + self.decode_seq * decode_seqs
            + self.context_token * context_tokens
        )

    def save(self, path: Path) -> Path:
        return write_json(path, {"step_time": asdict(self)})

    @classmethod
    def load(cls, path: Path) -> StepTime:
        """Read ``{"step_time": {…}}``, or fit ``{"steps": [{…}, …]}``, whose elements have the fields of ``Step``."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if "step_time" in value:
                return cls(**{key: float(number) for key, number in value["step_time"].items()})
            return fit_steps([Step(**step) for step in value["steps"]])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FourfoldError(
                f"{path} holds no step times", why=str(error), fix="pass a recorded run with a list `steps`"
            ) from None


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded engine step."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    seconds: float


def fit_steps(steps: Sequence[Step]) -> StepTime:
    """Non-negative least squares of the four times, relative error (a slow step counts no more than a fast one).

    Columns whose time would be negative are dropped, worst first, until none is.
    """
    if len(steps) < 8:
        raise FourfoldError(f"{len(steps)} recorded steps are too few to fit a step-time model", fix="record more")
    rows = np.array([(1.0, s.prefill_tokens, s.decode_seqs, s.context_tokens) for s in steps])
    seconds = np.array([s.seconds for s in steps])
    weighted = rows / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-30)
    columns = [0, 1, 2, 3]
    while True:
        solution = np.linalg.lstsq(weighted[:, columns] / scale[columns], np.ones(len(steps)), rcond=None)[0]
        if solution.min() >= 0:
            break
        columns.pop(int(solution.argmin()))
    times = np.zeros(4)
    times[columns] = solution / scale[columns]
    return StepTime(*times.tolist())
