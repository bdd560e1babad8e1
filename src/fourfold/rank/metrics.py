"""Kendall's tau-b, and how sure one can be of it."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fourfold.errors import FourfoldError


def _ties(sorted_values: NDArray[np.float64]) -> int:
    """Pairs of equal values in a sorted array."""
    counts = np.diff(np.flatnonzero(np.r_[True, sorted_values[1:] != sorted_values[:-1], True]))
    return int((counts * (counts - 1) // 2).sum())


def _swaps(values: NDArray[np.int64]) -> int:
    """Pairs (i < j) with values[i] > values[j].  Bisection into a sorted list: for the thousands of values that occur
    here its memory moves cost less than a merge sort's NumPy calls."""
    before: list[int] = []
    total = 0
    for i, value in enumerate(values.tolist()):
        place = bisect_right(before, value)
        total += i - place
        before.insert(place, value)
    return total


def kendall_tau(a: ArrayLike, b: ArrayLike) -> float:
    """Kendall's tau-b (Kendall, 1945; Knight's algorithm, 1966) of two equally long sequences; 0.0 if undefined.

    Raises:
        FourfoldError: NaN is among the values.  (It has no place in an order, and sorting would count it as one.)
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if np.isnan(x).any() or np.isnan(y).any():
        raise FourfoldError(
            "there is no rank correlation of numbers that are NaN", why="a model's scores may be broken"
        )
    n = x.size
    if n < 2:
        return 0.0
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    pairs = n * (n - 1) // 2
    tied_x, tied_y = _ties(x), _ties(np.sort(y))
    both = np.flatnonzero(np.r_[True, (x[1:] != x[:-1]) | (y[1:] != y[:-1]), True])
    counts = np.diff(both)
    tied_both = int((counts * (counts - 1) // 2).sum())
    dense = np.unique(y, return_inverse=True)[1].astype(np.int64)
    concordance = pairs - tied_x - tied_y + tied_both - 2 * _swaps(dense)
    scale = math.sqrt((pairs - tied_x) * (pairs - tied_y))
    return concordance / scale if scale else 0.0


def tau_interval(a: ArrayLike, b: ArrayLike, *, draws: int = 300, seed: int = 0) -> tuple[float, float]:
    """95% interval of tau from ``draws`` half-samples.

    Halves drawn without replacement make no ties, which a bootstrap would, and their spread around the
    estimate is that of the full sample (Politis, Romano and Wolf, "Subsampling", 1999, section 2).
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    rng = np.random.default_rng(seed)
    taus = []
    for _ in range(draws):
        half = rng.permutation(x.size)[: max(2, x.size // 2)]
        taus.append(kendall_tau(x[half], y[half]))
    low, high = np.quantile(taus, [0.025, 0.975])
    return float(low), float(high)


def null_deviation(n: int) -> float:
    """Standard deviation of tau when there is no relation at all (Kendall, 1938)."""
    return math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1))) if n > 1 else 1.0
