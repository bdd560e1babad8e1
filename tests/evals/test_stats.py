"""Intervals against values that are easy to check by other means."""

from __future__ import annotations

import pytest

from fourfold.evals.stats import Z95, paired_difference, wilson


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (10, 10), (50, 100), (3, 7), (1, 1319)])
def test_wilson_bounds_solve_their_equation(correct: int, total: int) -> None:
    """Wilson's bounds are the shares p for which |observed - p| is z standard errors of p."""
    low, high = wilson(correct, total)
    share = correct / total
    assert 0.0 <= low <= share <= high <= 1.0
    for bound in (low, high):
        if bound not in (0.0, 1.0):
            assert (share - bound) ** 2 == pytest.approx(Z95**2 * bound * (1 - bound) / total, rel=1e-9)


def test_no_questions_say_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_paired_difference_counts_only_what_differs() -> None:
    base = [True] * 6 + [False] * 4
    other = [True] * 4 + [False] * 5 + [True]
    result = paired_difference(base, other)
    assert (result["only_base"], result["only_other"]) == (2, 1)
    assert result["difference"] == pytest.approx(-0.1)
    assert result["low"] < -0.1 < result["high"]
    assert result["p_value"] == pytest.approx(1.0)  # three coins, two of one side: 2 · P(≤ 1) = 1


def test_mcnemar_is_exact() -> None:
    result = paired_difference([True] * 5 + [False], [False] * 6)
    assert result["p_value"] == pytest.approx(2 / 2**5)
    same = paired_difference([True, False], [True, False])
    assert (same["difference"], same["low"], same["high"], same["p_value"]) == (0.0, 0.0, 0.0, 1.0)


def test_different_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="same questions"):
        paired_difference([True], [])
