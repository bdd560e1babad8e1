"""Requests for the simulator: lengths, Poisson arrivals, and rankers of a chosen quality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import FourfoldError
from fourfold.rank.base import Ranker
from fourfold.rank.lengthmap import LengthMap
from fourfold.rank.metrics import kendall_tau

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spec:
    """One request of a workload.

    Attributes:
        arrival: seconds.  prompt_tokens, output_tokens: true lengths.  prompt: what the ranker sees.
        max_tokens: what the request asks for at most (the policy may see it).
        priority: the user's, lower goes first.
    """

    request_id: str
    arrival: float
    prompt_tokens: int
    output_tokens: int
    prompt: str = ""
    max_tokens: int = 4096
    priority: int = 0


def load_lengths(path: Path) -> list[tuple[int, int]]:
    """``[[prompt_tokens, output_tokens], …]`` from a JSON file."""
    try:
        pairs = [(int(p), int(o)) for p, o in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise FourfoldError(f"{path} holds no list of lengths", why=str(error)) from None
    if not pairs or min(min(pair) for pair in pairs) < 1:
        raise FourfoldError(f"{path} holds no positive lengths")
    return pairs


def poisson(
    lengths: Sequence[tuple[int, int]],
    *,
    rate: float,
    requests: int,
    seed: int = 0,
    prompts: Sequence[str] | None = None,
    max_tokens: int = 4096,
) -> list[Spec]:
    """Draw ``requests`` of the given lengths (without replacement while they last) at ``rate`` a second.

    Without ``prompts`` the text of a request is its index in ``lengths``, which ``SyntheticRanker`` reads.
    """
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(lengths)) for _ in range(-(-requests // len(lengths)))])[:requests]
    arrivals = np.cumsum(rng.exponential(1.0 / rate, requests)) if np.isfinite(rate) else np.zeros(requests)
    return [
        Spec(
            f"r{i}",
            float(arrivals[i]),
            lengths[j][0],
            lengths[j][1],
            prompts[j] if prompts is not None else str(j),
            max(max_tokens, lengths[j][1]),
        )
        for i, j in enumerate(order.tolist())
    ]


class SyntheticRanker(Ranker):
    """A ranker of a chosen tau for lengths that have no text: log length plus Gaussian noise.

    ``score`` reads the prompt as an index into the lengths.
    """

    name = "synthetic"

    def __init__(self, outputs: Sequence[int], *, tau: float, seed: int = 0) -> None:
        truth = np.log(np.asarray(outputs, dtype=np.float64))
        noise = np.random.default_rng(seed).normal(size=truth.size)
        # what the noise has in common with the truth by chance would be a tau of its own
        centred = truth - truth.mean()
        noise -= centred * float(noise @ centred) / max(1e-12, float(centred @ centred))
        low, high = 0.0, 100.0 * float(truth.std() + 1e-9)
        for _ in range(30):  # tau falls as the noise grows: bisect
            middle = (low + high) / 2
            low, high = (middle, high) if kendall_tau(truth + middle * noise, truth) > tau else (low, middle)
        self._scores = truth + (low if tau < 1 else 0.0) * noise
        self.lengths = LengthMap.fit(self._scores, np.asarray(outputs, dtype=np.float64))

    def score(self, prompts: Sequence[str]) -> F64:
        return np.array([self._scores[int(prompt)] for prompt in prompts])
