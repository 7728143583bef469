"""Student's t distribution against closed forms and SciPy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.explain.certainty import reach, two_sided

DISTANCES = st.floats(1e-3, 1e4)
FREEDOMS = st.one_of(st.integers(1, 30), st.integers(31, 100_000))
LEVELS = st.floats(1e-12, 0.999)


@given(DISTANCES)
def test_one_and_two_degrees_have_closed_forms(t: float) -> None:
    """Abramowitz and Stegun, 26.7.3 and 26.7.4; written so that the far tail does not cancel."""
    assert two_sided(t, 1) == pytest.approx(2 / math.pi * math.atan(1 / t), rel=1e-12)
    root = math.sqrt(2 + t * t)
    assert two_sided(t, 2) == pytest.approx(2 / (root * (root + t)), rel=1e-12)


@given(DISTANCES, FREEDOMS)
def test_chances_are_those_of_scipy(t: float, freedom: int) -> None:
    from scipy import stats

    assert two_sided(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-8, abs=1e-250)


@given(LEVELS, FREEDOMS)
def test_reaches_are_those_of_scipy(level: float, freedom: int) -> None:
    from scipy import stats

    assert reach(level, freedom) == pytest.approx(stats.t.isf(level / 2, freedom), rel=1e-9)


@given(LEVELS, FREEDOMS)
def test_a_reach_is_exceeded_with_its_chance(level: float, freedom: int) -> None:
    assert two_sided(reach(level, freedom), freedom) == pytest.approx(level, rel=1e-11)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)]
)
def test_the_quantiles_of_the_printed_table(freedom: int, quantile: float) -> None:
    """NIST/SEMATECH e-Handbook, 1.3.6.7.2: upper 2.5 % points."""
    assert round(reach(0.05, freedom), 3) == quantile


def test_the_ends() -> None:
    assert two_sided(0.0, 3) == 1
    assert two_sided(1e200, 3) == 0
    assert reach(1.0, 3) == pytest.approx(0)
