"""Surfaces on complete grids: near smooth laws, equal to solving the whole system at once."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cost.calibrate.surface import OFFSET, SMOOTH_NOISE, SMOOTH_SCALE, Smooth

AXES = [[1.0, 2, 4, 8, 16, 32], [0.0, 16, 64, 256, 1024], [16.0 * 2**i for i in range(9)]]


def law(n: float, ctx: float, kv: float) -> float:
    return 8 + 0.3 * n + 0.002 * ctx + n * kv / 400


def on(axes: list[list[float]]) -> np.ndarray:  # type: ignore[type-arg]
    return np.array([law(*point) for point in product(*axes)]).reshape([len(x) for x in axes])


def test_a_smooth_law_is_met_between_the_points() -> None:
    between = [[3.0, 6, 24], [8.0, 100, 700], [32.0, 300, 3000]]
    assert Smooth(AXES, on(AXES)).at(between) == pytest.approx(on(between), rel=0.07)


def test_measured_points_are_smoothed_not_copied() -> None:
    noisy = on(AXES) * np.exp(np.random.default_rng(1).normal(0, 0.02, on(AXES).shape))
    again = Smooth(AXES, noisy).at(AXES)
    assert again == pytest.approx(noisy, rel=0.08)
    assert np.mean(again == noisy) < 0.01


def test_it_equals_the_system_of_all_points() -> None:
    """Kernel ridge regression, solved without the structure of the grid."""
    us = on(AXES)
    places = np.array(list(product(*[np.log2(np.add(x, OFFSET if 0 in x else 0)) for x in AXES])))
    closeness = np.ones((len(places), len(places)))
    for column in places.T:
        distance = np.abs(np.subtract.outer(column, column)) / SMOOTH_SCALE * np.sqrt(5)
        closeness *= (1 + distance + distance**2 / 3) * np.exp(-distance)
    logs = np.log(us.ravel())
    weights = np.linalg.solve(closeness + SMOOTH_NOISE * np.eye(len(places)), logs - logs.mean())
    expected = np.exp(closeness @ weights + logs.mean()).reshape(us.shape)
    assert Smooth(AXES, us).at(AXES) == pytest.approx(expected, rel=1e-6)


@given(st.floats(0.5, 100))
def test_the_unit_of_time_does_not_matter(factor: float) -> None:
    us = on(AXES)
    assert Smooth(AXES, factor * us).at(AXES) == pytest.approx(factor * Smooth(AXES, us).at(AXES))


def test_a_line_is_a_grid_of_one_axis() -> None:
    x = [1.0, 2, 4, 8, 16, 32, 64]
    us = [10 + 2 * each for each in x]
    assert Smooth([x], us).at([[12.0, 48.0]]) == pytest.approx([34, 106], rel=0.02)
