"""Lines and grids read as the simulator reads them; fits that a few bad points do not bend."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsim_kernels.tables import along, between, odd_cells, robust_fit

from kvsim.cost.profile import Interpolation

Times = st.floats(0, 1e5, allow_subnormal=False)


@st.composite
def axes(draw: st.DrawFn) -> list[float]:
    points = draw(st.lists(st.integers(0, 40_000), min_size=2, max_size=6, unique=True))
    return [float(point) for point in sorted(points)]


@given(axes(), st.data())
def test_lines_are_read_as_the_simulator_reads_them(xs: list[float], data: st.DataObject) -> None:
    us = data.draw(st.lists(Times, min_size=2, max_size=len(xs)))
    x = data.draw(st.floats(0, 80_000))
    assert along(xs, us, x) == pytest.approx(Interpolation().along(xs, us, x), rel=1e-9, abs=1e-6)


@given(axes(), axes(), st.data())
def test_grids_are_read_as_the_simulator_reads_them(
    xs: list[float], ys: list[float], data: st.DataObject
) -> None:
    row = st.lists(Times, min_size=2, max_size=len(ys))
    rows = data.draw(st.lists(row, min_size=len(xs), max_size=len(xs)))
    x, y = data.draw(st.floats(0, 80_000)), data.draw(st.floats(0, 80_000))
    expected = Interpolation().between(xs, ys, rows, x, y)
    assert between(xs, ys, rows, x, y) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.integers(0, 1000))
def test_a_robust_fit_ignores_a_few_disturbed_points(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.uniform(1, 1000, 40)
    us = 50 + 3 * x
    us[:4] *= rng.uniform(2, 5, 4)
    base, slope = robust_fit(np.stack((np.ones(40), x), axis=1), us)
    assert slope == pytest.approx(3, rel=0.05)
    assert base + slope * 100 == pytest.approx(350, rel=0.12)


def test_only_a_cell_above_both_its_neighbourhoods_is_odd() -> None:
    n, ctx = [1, 2, 4, 8], [16, 32, 64, 128]
    smooth = [[5.0 + a * b / 10 for b in ctx] for a in n]
    table = {"n": n, "ctx": ctx, "us": smooth}
    assert odd_cells(table, "n") == []
    steep = [[us * (3 if a >= 4 else 1) for us in line] for a, line in zip(n, smooth, strict=True)]
    assert odd_cells({**table, "us": steep}, "n") == []
    bumped = [list(line) for line in smooth]
    bumped[2][1] *= 2
    assert odd_cells({**table, "us": bumped}, "n") == ["n 4, ctx 32"]
