"""Many differences judged at once, and again and again while the sample grows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.explain import certainty
from kvsim.explain.certainty import (
    FEWEST_SEEDS,
    HEADLINE_SHARE,
    Estimate,
    Pair,
    judge,
    judge_pairs,
    paired,
    plan_looks,
)


class Known:
    """An estimate whose p is given."""

    def __init__(self, p: float) -> None:
        self.p, self.difference = p, 1.0

    def interval(self, level: float) -> tuple[float, float]:
        return (0.5, 1.5) if self.p <= level else (-0.5, 2.5)


def told_by_hand(p: list[float], level: float) -> list[bool]:
    """Holm's procedure as the book has it: adjusted p, the largest so far."""
    told, worst = [False] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        worst = max(worst, (len(p) - rank) * p[i])
        told[i] = worst <= level
    return told


@given(st.lists(st.sampled_from([0.001, 0.004, 0.01, 0.02, 0.04, 0.3, 1.0]), max_size=8))
def test_holm(p: list[float]) -> None:
    verdicts = judge([Known(each) for each in p], [0.0] * len(p), 0.05)  # type: ignore[misc]
    assert [v.finding == "significant" for v in verdicts] == told_by_hand(p, 0.05)
    for verdict in verdicts:
        assert (verdict.finding == "significant") == (verdict.low > 0)


def test_findings() -> None:
    """However sure a difference is, it is one only beyond the margin."""
    sure = [(5.0, 0.1), (0.02, 0.001), (0.099, 0.01)]
    cases = [(0.0, 0.0), *sure, (0.02, 0.01), (0.02, 1.0)]
    found = judge([Estimate(d, e, 7) for d, e in cases], [0.1] * len(cases), 0.05)
    assert [verdict.finding for verdict in found] == [
        "same",
        "significant",
        "equal",
        "insignificant",
        "equal",
        "insignificant",
    ]
    assert [verdict.settled for verdict in found] == [True, True, True, False, True, False]


@given(st.integers(2, 100), st.floats(0.001, 0.5))
def test_looks_spend_the_level_and_no_more(seeds: int, level: float) -> None:
    looks = plan_looks(seeds, level)
    sizes = [look.seeds for look in looks]
    assert sizes == sorted(set(sizes)) and sizes[-1] == seeds
    assert all(size >= min(FEWEST_SEEDS, seeds) for size in sizes)
    assert sum(look.level for look in looks) == pytest.approx(level)
    assert all(look.level > 0 for look in looks)


def test_headlines_and_the_rest_share_the_level() -> None:
    estimate = Estimate(1.0, 0.01, 7)
    pairs = {Pair(key, 0, 1): estimate for key in ("head", "a", "b")}
    values = dict.fromkeys(("head", "a", "b"), ((1.0,), (2.0,)))
    verdicts = judge_pairs(pairs, values, ("head",), level=0.05, margin=0.01)
    assert list(verdicts) == list(pairs)
    assert verdicts[Pair("head", 0, 1)].level == pytest.approx(0.05 * HEADLINE_SHARE)
    others = [verdicts[Pair(key, 0, 1)].level for key in "ab"]
    assert sorted(others) == pytest.approx([0.005, 0.01])


def test_a_against_a_is_told_apart_at_most_as_often_as_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole comparisons of two samples of the same thing, seeds not even shared: figures that hang
    together, skewed ones, counts and percentiles, judged at every look."""
    monkeypatch.setattr(certainty, "DRAWS", 999)
    random = np.random.default_rng(11)
    wrong = sum(_differs(random) for _ in range(250))
    assert wrong / 250 <= 0.05


def test_a_true_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certainty, "DRAWS", 999)
    random = np.random.default_rng(11)
    assert sum(_differs(random, shift=3.0) for _ in range(20)) >= 19


def _differs(random: np.random.Generator, shift: float = 0.0) -> bool:
    """Whether two samples of 12 seeds are told apart at any look."""
    first, other = _sample(random), _sample(random)
    other["mean"] += shift
    for look in plan_looks(12, 0.05):
        found = {
            Pair(key, 0, 1): paired(
                first[key][: look.seeds],
                other[key][: look.seeds],
                whole=key == "count",
                percentile=key == "p99",
            )
            for key in first
        }
        values = dict.fromkeys(first, ((1.0,), (1.0,)))
        verdicts = judge_pairs(found, values, ("mean", "p99"), level=look.level, margin=0.0)
        if any(verdict.finding == "significant" for verdict in verdicts.values()):
            return True
    return False


def _sample(random: np.random.Generator) -> dict[str, np.ndarray]:
    mean = random.normal(10, 1, 12)
    return {
        "mean": mean,
        "twin": 2 * mean + random.normal(0, 0.1, 12),
        "p99": np.exp(random.normal(0, 1, 12)),
        "count": random.poisson(1.5, 12).astype(float),
    }
