import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.results.statistics import PERCENTILES, describe, describe_counts, ratio, weighted_mean


@given(st.dictionaries(st.integers(0, 10**12), st.integers(1, 30), min_size=1, max_size=20))
def test_counted_values_have_the_statistics_of_the_long_list(counts):
    long = np.repeat(list(counts), list(counts.values())).astype(float)
    expected, found = describe(long), describe_counts(counts)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-3)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50))
def test_statistics_are_numpys(values):
    found = describe(np.array(values))
    assert found["mean"] == pytest.approx(np.mean(values))
    assert found["std"] == pytest.approx(np.std(values), abs=1e-6)
    for p in PERCENTILES:
        assert found[f"p{p}"] == float(np.percentile(values, p))


@given(st.lists(st.tuples(*[st.integers(0, 99) | st.integers(0, 2**40)] * 2), min_size=1))
def test_a_weighted_mean_is_that_of_exactly_rounded_sums(pairs):
    values, weights = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    total = sum(weight for _, weight in pairs)
    expected = (
        math.fsum(float(value) * weight for value, weight in pairs) / total if total else None
    )
    assert weighted_mean(values, weights) == expected


@given(st.lists(st.floats(-1e15, 1e15), min_size=1))
def test_a_mean_is_that_of_the_exactly_rounded_sum(values):
    assert describe(np.array(values), ("mean",))["mean"] == math.fsum(values) / len(values)


def test_nothing_has_no_statistics():
    assert set(describe(np.zeros(0)).values()) == {None}
    assert set(describe_counts({}).values()) == set(describe_counts({5: 0}).values()) == {None}


def test_the_mean_of_no_weight_and_a_share_of_nothing_are_undefined():
    nothing = np.zeros(3, dtype=np.int64)
    assert weighted_mean(np.arange(3), nothing) is None
    assert weighted_mean(np.array([1, 4]), np.array([1, 3])) == 3.25
    assert ratio(1, 0) is ratio(None, 2) is ratio(1, None) is None
    assert ratio(0, 4) == 0.0
