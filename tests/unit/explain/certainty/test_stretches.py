"""Intervals from one replay: long stretches of requests, drawn again."""

import numpy as np
import pytest

from kvsim.explain import certainty
from kvsim.explain.certainty import FEWEST_STRETCHES, Figure, stretch, together


def mean(values: np.ndarray) -> np.ndarray:
    return np.asarray(values.mean(axis=-1))


def p90(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.percentile(values, 90, axis=-1))


def waves(random: np.random.Generator, number: int, memory: float) -> np.ndarray:
    """Values each of which remembers the one before."""
    values = random.normal(size=number)
    for i in range(1, number):
        values[i] += memory * values[i - 1]
    return values


def test_the_longer_the_memory_the_longer_a_stretch() -> None:
    random = np.random.default_rng(0)
    lengths = [stretch(waves(random, 4000, memory)) for memory in (0.0, 0.8, 0.97)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 16  # the cube root
    assert lengths[2] > 60


def test_equal_runs_do_not_differ() -> None:
    values = np.random.default_rng(1).exponential(size=300)
    found = together({"mean": Figure(values, values.copy(), mean)})
    assert found["mean"].interval(0.001) == (0.0, 0.0)


def test_a_replay_that_is_one_long_wave_says_nothing() -> None:
    wave = np.sin(np.linspace(0, 3, 500))
    noise = np.random.default_rng(2).normal(size=500)
    figures = {
        "wave": Figure(np.zeros(500), wave, mean),
        "noise": Figure(np.zeros(500), noise, mean),
    }
    assert stretch(wave) * FEWEST_STRETCHES > 500
    assert set(together(figures)) == {"noise"}
    assert together({}) == {}


def test_the_same_stretches_are_drawn_in_both_runs() -> None:
    """A constant shift is known exactly, however much the values scatter."""
    values = np.random.default_rng(3).exponential(size=400)
    estimate = together({"p90": Figure(values, values + 2, p90)})["p90"]
    assert estimate.interval(0.001) == pytest.approx((2, 2))


def test_draws_do_not_depend_on_how_many_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(4)
    figure = {"mean": Figure(random.normal(size=200), random.normal(size=200), mean)}
    whole = together(figure)["mean"]
    monkeypatch.setattr(certainty, "_AT_ONCE", 200)
    assert together(figure)["mean"].difference == whole.difference
    assert together(figure)["mean"].error == pytest.approx(whole.error, rel=0.1)


def test_the_level_is_kept_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single requests drawn by themselves would be wrong in half of these samples."""
    monkeypatch.setattr(certainty, "STRETCH_DRAWS", 199)
    random = np.random.default_rng(5)
    wrong = naive = 0
    for _ in range(150):
        first, other = waves(random, 1500, 0.9), waves(random, 1500, 0.9)
        changes = other - first
        found = together({"mean": Figure(first, other, mean)})
        wrong += "mean" in found and found["mean"].p <= 0.05
        naive += abs(changes.mean()) > 1.96 * changes.std() / len(changes) ** 0.5
    assert wrong / 150 <= 0.09
    assert naive / 150 > 0.4
