"""Intervals and chances of error of paired differences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import long

from kvsim.explain.certainty import Estimate, paired, single

# Squares of far smaller values underflow, here as in SciPy.
VALUES = st.floats(-1e6, 1e6).filter(lambda value: value == 0 or abs(value) > 1e-9)
SAMPLES = st.lists(VALUES, min_size=4, max_size=20)


def between(changes: list[float], *, percentile: bool = False, whole: bool = False) -> Estimate:
    other = np.array(changes, dtype=float)
    return paired(np.zeros(len(other)), other, whole=whole, percentile=percentile)


@long
@given(SAMPLES)
def test_a_mean_has_students_interval_and_p(changes: list[float]) -> None:
    estimate = between(changes)
    # SciPy warns of differences that are equal but for rounding.
    if estimate.error > 1e-9 * abs(estimate.difference):
        from scipy import stats

        known = stats.ttest_1samp(changes, 0)
        assert estimate.p == pytest.approx(known.pvalue)
        assert estimate.interval(0.03) == pytest.approx(tuple(known.confidence_interval(0.97)))


@given(SAMPLES, st.floats(1e-5, 0.5), st.booleans())
def test_an_interval_excludes_0_where_p_is_small_and_only_there(
    changes: list[float], level: float, percentile: bool
) -> None:
    estimate = between(changes[:6], percentile=percentile)
    low, high = estimate.interval(level)
    if abs(estimate.p - level) > 1e-9:
        assert (estimate.p <= level) == (low > 0 or high < 0)
    assert low <= estimate.difference <= high


def test_the_interval_of_a_percentile_covers_student_and_the_bootstrap() -> None:
    changes = list(np.random.default_rng(5).exponential(size=9) - 0.3)
    plain, both = between(changes), between(changes, percentile=True)
    assert both.draws is not None
    low, high = both.interval(0.1)
    for inner in (plain.interval(0.1), tuple(np.quantile(both.draws, [0.05, 0.95]))):
        assert low <= inner[0] + 1e-3 and inner[1] - 1e-3 <= high


def test_nothing_differs_where_no_pair_does() -> None:
    estimate = between([0.0] * 5, percentile=True)
    assert (estimate.p, estimate.interval(0.001)) == (1.0, (0.0, 0.0))


def test_equal_counts_may_be_equal_by_rounding() -> None:
    """Three times one preemption more is no proof; eight times is."""
    assert between([1.0] * 3, whole=True).p > 0.01
    assert between([1.0] * 8, whole=True).p < 0.001
    assert between([1.5] * 3).p == 0


def test_one_machine_is_known_worse_than_the_mean_of_many() -> None:
    """The interval is for the next pair, not for the mean of all."""
    random = np.random.default_rng(1)
    inside = 0
    for _ in range(800):
        *changes, further = random.normal(1, 2, 7)
        low, high = single(np.zeros(6), np.array(changes), whole=False).interval(0.1)
        inside += low <= further <= high
    assert inside / 800 == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("kind", ["normal", "skewed", "counts"])
def test_the_level_is_kept(kind: str) -> None:
    """Of samples without a difference in the mean at most 5 % seem to have one."""
    random = np.random.default_rng(7)
    draw = {
        "normal": lambda: random.normal(0, 1, 8),
        "skewed": lambda: random.exponential(1, 8) - random.exponential(1, 8),
        "counts": lambda: random.poisson(0.5, 8) - random.poisson(0.5, 8),
    }[kind]
    wrong = sum(between(list(draw()), whole=kind == "counts").p <= 0.05 for _ in range(1500))
    assert wrong / 1500 < 0.065
