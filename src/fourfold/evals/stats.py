"""Intervals for accuracies."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""


def wilson(correct: int, total: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, JASA 22, 1927)."""
    if total <= 0:
        return 0.0, 1.0
    share = correct / total
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    centre, scale = share + z * z / (2 * total), 1 + z * z / total
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return (0.0 if correct == 0 else low), (1.0 if correct == total else high)


def paired_difference(base: Sequence[bool], other: Sequence[bool], z: float = Z95) -> dict[str, float | int]:
    """Difference of two accuracies on the same questions, with its 95% interval and McNemar's exact p value.

    Returns:
        ``difference`` (other minus base), ``low``, ``high``, ``only_base``, ``only_other`` (questions that only one
        of the two answers), ``p_value`` of the exact two-sided test (Q. McNemar, Psychometrika 12, 1947).

    Raises:
        ValueError: the two have different lengths or are empty.
    """
    if len(base) != len(other) or not base:
        raise ValueError("paired answers need the same questions")
    only_base = sum(a and not b for a, b in zip(base, other, strict=True))
    only_other = sum(b and not a for a, b in zip(base, other, strict=True))
    n, split = len(base), only_base + only_other
    difference = (only_other - only_base) / n
    spread = z * math.sqrt(max(split - (only_other - only_base) ** 2 / n, 0.0)) / n
    tail = sum(math.comb(split, k) for k in range(min(only_base, only_other) + 1)) / 2**split
    return {
        "difference": difference,
        "low": max(-1.0, difference - spread),
        "high": min(1.0, difference + spread),
        "only_base": only_base,
        "only_other": only_other,
        "p_value": min(1.0, 2 * tail) if split else 1.0,
    }
