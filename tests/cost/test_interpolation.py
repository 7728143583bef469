"""Look-ups in one, two and four dimensions against numpy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cost.interpolation import Interpolation
from kvsim.cost.profile import MixedGrid

AXES = ([16.0, 32.0, 128.0], [0.0, 16.0, 64.0], [1.0, 4.0, 8.0], [16.0, 64.0])
TIMES = np.random.default_rng(0).uniform(1, 100, [len(axis) for axis in AXES])
GRID = MixedGrid(*AXES, TIMES.tolist())


def twin(values: Any, axes: Any, point: Any) -> float:
    """The last axis first, one after another."""
    for axis, x in zip(reversed(axes), reversed(point), strict=True):
        values = np.apply_along_axis(lambda us, a=axis, x=x: np.interp(x, a, us), -1, values)
    return float(values)


@given(st.integers(1, 128), st.integers(0, 64), st.integers(1, 8), st.floats(1, 64))
def test_four_dimensions(q: int, ctx: int, n: int, kv: float) -> None:
    """Below an axis its first point holds, as in numpy."""
    look = Interpolation()
    assert look.mixed(GRID, [(q, ctx)], n, kv) == pytest.approx(
        [twin(TIMES, AXES, (q, ctx, n, kv))]
    )
    assert look.outside == (q < 16 or kv < 16)


@given(st.integers(1, 400), st.integers(0, 100))
def test_chunks_are_looked_up_one_by_one(q: int, ctx: int) -> None:
    chunks = [(q, ctx), (16, 0)]
    alone = [Interpolation().mixed(GRID, [chunk], 3, 20)[0] for chunk in chunks]
    assert Interpolation().mixed(GRID, chunks, 3, 20) == alone
    assert min(alone) >= 0


@given(st.floats(0, 200), st.floats(0, 100))
def test_two_dimensions_inside_and_below(x: float, y: float) -> None:
    look = Interpolation()
    table = TIMES[:, :, 0, 0]
    if x <= 128 and y <= 64:
        found = look.between(AXES[0], AXES[1], table.tolist(), x, y)
        assert found == pytest.approx(twin(table, AXES[:2], (x, y)))
        assert look.outside == (x < 16)


def test_past_the_end_the_slope_continues_but_not_downwards() -> None:
    look = Interpolation()
    assert look.along([1, 2], [10, 30], 4) == 70
    assert look.outside
    assert look.along([1, 2], [30, 10], 4) == 10
    assert look.between([1, 2], [1, 2], [[0, 1], [10, 11]], 3, 1.5) == 20.5
