"""Perplexity, KL divergence and agreement of two models' next-token distributions, in blocks of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

ROWS = 128
"""Positions handled at a time; with 152k tokens of vocabulary a block of float32 is 78 MB."""


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """``[positions, vocabulary]`` logits of any float dtype to float32 log-probabilities."""
    return logits.float().log_softmax(dim=-1)


@dataclass(slots=True)
class Totals:
    """Sums over positions; natural logarithms."""

    positions: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agree: int = 0

    def add_nll(self, logp: torch.Tensor, targets: torch.Tensor) -> None:
        """Add the negative log-likelihood of ``targets [n]`` under ``logp [n, vocabulary]``."""
        self.positions += len(targets)
        self.nll -= float(logp.gather(1, targets[:, None]).double().sum())

    def add_divergence(self, base: torch.Tensor, logp: torch.Tensor) -> None:
        """Add KL(base || this) and whether both rank the same token first; both ``[n, vocabulary]`` float32."""
        weight = base.exp()
        # exp(-inf) · (-inf − x) is NaN; a token of probability zero adds nothing
        terms = torch.where(weight > 0, weight * (base - logp), torch.zeros_like(base))
        self.kl += float(terms.double().sum())
        self.agree += int((base.argmax(-1) == logp.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nll / self.positions)


class Store:
    """Log-probabilities of the baseline on disk: one file of raw float32 rows a window."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder, self.vocabulary = folder, vocabulary

    def path(self, window: int) -> Path:
        """File of a window."""
        return self.folder / f"window-{window:04d}.f32"

    def write(self, window: int, rows: torch.Tensor, append: bool) -> None:
        """Write or append ``[n, vocabulary]`` float32 rows."""
        with self.path(window).open("ab" if append else "wb") as sink:
            sink.write(rows.contiguous().numpy().tobytes())

    def read(self, window: int, start: int, count: int) -> torch.Tensor:
        """``[count, vocabulary]`` float32 rows from row ``start``."""
        row = 4 * self.vocabulary
        with self.path(window).open("rb") as source:
            source.seek(start * row)
            data = source.read(count * row)
        if len(data) != count * row:
            raise ValueError(f"window {window} holds fewer than {start + count} rows")
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(count, self.vocabulary)
