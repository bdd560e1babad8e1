import numpy as np
import pytest

from fourfold.errors import FourfoldError
from fourfold.rank.metrics import kendall_tau, null_deviation, tau_interval


def _slow_tau(a, b):
    """Straight from the definition of tau-b."""
    x, y = np.sign(np.subtract.outer(a, a)), np.sign(np.subtract.outer(b, b))
    scale = np.sqrt((x != 0).sum() * (y != 0).sum())
    return (x * y).sum() / scale if scale else 0.0


@pytest.mark.parametrize("size", [2, 3, 8, 33, 200])
@pytest.mark.parametrize("values", [2, 10, 10**6])
def test_tau_is_the_definition(size, values):
    rng = np.random.default_rng(size * values)
    a = rng.integers(0, values, size)
    b = a * rng.integers(0, 2, size) + rng.integers(0, values, size)
    assert kendall_tau(a, b) == pytest.approx(_slow_tau(a, b), abs=1e-12)


def test_tau_of_nothing_is_zero():
    assert kendall_tau([], []) == 0.0
    assert kendall_tau([1.0], [2.0]) == 0.0
    assert kendall_tau([1, 1, 1], [1, 2, 3]) == 0.0


def test_tau_of_nan_is_an_error_and_no_number():
    """Sorted, sixty NaN are one value after another, and once gave 0.999."""
    with pytest.raises(FourfoldError, match="NaN"):
        kendall_tau([float("nan")] * 60, list(range(60)))
    with pytest.raises(FourfoldError, match="NaN"):
        kendall_tau([1.0, 2.0], [1.0, float("nan")])


def test_interval_covers_and_null_deviation_is_right():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(200, 300))
    taus = [kendall_tau(x, x + 2 * rng.normal(size=300)) for x in a]
    low, high = tau_interval(a[0], a[0] + 2 * rng.normal(size=300))
    assert high - low == pytest.approx(4 * np.std(taus), rel=0.35)
    nothing = [kendall_tau(x, rng.normal(size=300)) for x in a]
    assert np.std(nothing) == pytest.approx(null_deviation(300), rel=0.2)
