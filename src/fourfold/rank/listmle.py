"""ListMLE for a linear ranker over hashed features, in NumPy.

Xia et al., "Listwise Approach to Learning to Rank: Theory and Algorithm" (ICML 2008): the loss of a list whose
true order is y is the negative log-likelihood of y under the Plackett-Luce model of the scores,
``sum_i logsumexp(s[y_i], ..., s[y_n]) - s[y_i]``.  arXiv 2408.15792 uses it to rank requests by output length.

Sums run in float64 through ``bincount`` and ``reduceat`` in a fixed order on one thread, so a training run
gives the same weights again; the float16 of the shipped file hides what the last bits of exp and log differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sparse:
    """Rows of hashed features: ``indptr`` int64 [rows + 1], ``indices`` int64 [nnz], ``values`` float64 [nnz]."""

    indptr: I64
    indices: I64
    values: F64

    @property
    def rows(self) -> int:
        return self.indptr.size - 1

    def dot(self, weights: F64) -> F64:
        """``X @ weights``: float64 [rows].  Every row has at least one feature (the surface features)."""
        return np.asarray(np.add.reduceat(weights[self.indices] * self.values, self.indptr[:-1]), dtype=np.float64)

    def transposed_dot(self, gradient: F64, size: int) -> F64:
        """``X.T @ gradient``: float64 [size]."""
        spread = np.repeat(gradient, np.diff(self.indptr)) * self.values
        return np.bincount(self.indices, weights=spread, minlength=size).astype(np.float64, copy=False)


def list_mle(scores: F64, order: I64) -> tuple[float, F64]:
    """Loss per item and its gradient.

    Args:
        scores: float64 [n].
        order: int64 [lists, items]: rows of ``scores``; each list from the item that should score highest to
            the one that should score lowest.

    Returns:
        mean negative log-likelihood per item, and d loss / d scores, float64 [n].
    """
    ranked = scores[order]
    top = ranked.max(axis=1, keepdims=True)
    exp = np.exp(ranked - top)
    tails = np.cumsum(exp[:, ::-1], axis=1)[:, ::-1]
    tails = np.maximum(tails, 1e-300)
    loss = float((np.log(tails) + top - ranked).sum()) / order.size
    grad = exp * np.cumsum(1.0 / tails, axis=1) - 1.0
    return loss, np.bincount(order.ravel(), weights=grad.ravel(), minlength=scores.size) / order.size


def draw_lists(lengths: F64, size: int, rng: np.random.Generator) -> I64:
    """Shuffle rows into lists of ``size`` (the remainder sits this round out), each ordered longest first.

    Equal lengths fall in random order, which is right: neither should outrank the other.
    """
    rows = rng.permutation(lengths.size)
    rows = rows[: rows.size - rows.size % size].reshape(-1, size)
    return np.take_along_axis(rows, np.argsort(-lengths[rows], axis=1, kind="stable"), axis=1)
