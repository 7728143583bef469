"""Look-ups in one, two and four dimensions against numpy, and lines against look-ups."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cost.kernels import Fused, Line, Lines
from kvsim.cost.profile import Interpolation, MixedGrid, PrefillGrid

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
    fused = Fused(GRID)
    assert fused.us([(q, ctx)], n, kv) == pytest.approx(twin(TIMES, AXES, (q, ctx, n, kv)))
    assert fused.outside == (q < 16 or kv < 16)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 100)), min_size=1, max_size=4))
def test_a_further_chunk_adds_what_it_takes_beyond_the_smallest(
    chunks: list[tuple[int, int]],
) -> None:
    """Decodes are beside the longest chunk; the others are beside the fewest and shortest."""
    fused, longest = Fused(GRID), max(chunks)
    others = list(chunks)
    others.remove(longest)
    further = [Fused(GRID).us([chunk], 1, 16) - TIMES[0, 0, 0, 0] for chunk in others]
    expected = Fused(GRID).us([longest], 3, 20) + sum(max(us, 0) for us in further)
    assert fused.us(chunks, 3, 20) == pytest.approx(expected)
    assert fused.outside == any(not (16 <= q <= 128 and ctx <= 64) for q, ctx in chunks)


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


RISING = st.lists(st.integers(0, 5000), min_size=2, max_size=12, unique=True).map(sorted)


@given(RISING, st.data())
def test_a_line_is_the_interpolation(xs: list[int], data: st.DataObject) -> None:
    times = st.lists(st.floats(0, 1e6), min_size=len(xs), max_size=len(xs))
    us, x = data.draw(times), data.draw(st.integers(-100, 20_000))
    line, look = Line(xs, us), Interpolation()
    assert line.at(x) == pytest.approx(look.along(xs, us, x), rel=1e-9, abs=1e-3)
    assert look.outside == (not line.first <= x <= line.last)


@given(RISING, RISING, st.floats(0, 10_000), st.data())
def test_a_grid_is_read_by_context_to_the_bit(
    xs: list[int], contexts: list[int], x: float, data: st.DataObject
) -> None:
    """Rows may end early; reading along them first, or across them first, is the same."""
    rows = st.lists(st.floats(0, 1e6), min_size=2, max_size=len(contexts))
    us = data.draw(st.lists(rows, min_size=len(xs), max_size=len(xs)))
    grid, look = PrefillGrid(list(map(float, xs)), list(map(float, contexts)), us), Interpolation()
    lines = Lines(grid)
    across = [lines.at(x, context) for context in grid.ctx]
    assert across == [look.between(grid.x, grid.ctx, us, x, context) for context in grid.ctx]
    stretched = [lines.at(x, 3 * context, 3, 5, 2, 10) for context in grid.ctx]
    assert stretched == [(5 + 2 * us) * 10 for us in across]


def test_a_grid_was_measured_where_both_rows_were() -> None:
    """A point of the grid belongs to the cell that ends there."""
    grid = PrefillGrid([1.0, 2.0, 3.0], [0.0, 8.0, 16.0], [[1, 2, 3], [4, 5], [6, 7, 8]])
    lines = Lines(grid)

    def inside(x: float, context: float) -> bool:
        lines.at(x, context)
        return lines.inside

    assert inside(1, 16)
    assert [inside(x, 8) for x in (0.5, 1, 1.5, 2, 3, 3.5)] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    assert not any(inside(x, 9) for x in (1.5, 2, 2.5, 3))
