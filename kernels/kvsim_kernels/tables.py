"""Lines through measured points on raw axes, and lines fitted to scattered ones. No torch here.

Between points values are interpolated linearly; below the first the first holds, past the last the
last slope goes on, but never downwards: the rules by which a table cost model reads a profile.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Table = dict[str, Any]
"""A table of a profile, in plain values."""

ROBUST_SCALE = 0.05
"""Relative residual above which a point loses weight."""


def along(xs: Sequence[float], us: Sequence[float], x: float) -> float:
    """The line through `(xs[i], us[i])` at `x`; `us` may end before `xs`."""
    last = len(us) - 1
    if x <= xs[last]:
        return float(np.interp(x, xs[: last + 1], us))
    slope = (us[last] - us[last - 1]) / (xs[last] - xs[last - 1])
    return float(us[last] + max(slope, 0.0) * (x - xs[last]))


def between(
    xs: Sequence[float], ys: Sequence[float], rows: Sequence[Sequence[float]], x: float, y: float
) -> float:
    """The grid `rows[i][j]` at `(xs[i], ys[j])` in `(x, y)`; rows may end before `ys`."""
    return along(xs, [along(ys, row, y) for row in rows], x)


def robust_fit(terms: ArrayLike, us: ArrayLike) -> Floats:
    """Coefficients c with terms @ c near `us`, by relative distance.

    Soft L1 (pseudo-Huber) loss of the relative residuals by iterated reweighting (Huber and
    Ronchetti 2009, section 7.8): a few disturbed points do not bend the fit.
    """
    matrix, measured = np.asarray(terms, float), np.asarray(us, float)
    scaled = matrix / measured[:, None]
    weights = np.ones(len(measured))
    found = np.zeros(matrix.shape[1])
    for _ in range(100):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(scaled * root[:, None], root, rcond=None)[0]
        residual = scaled @ found - 1.0
        weights = 1.0 / np.sqrt(1.0 + (residual / ROBUST_SCALE) ** 2)
    return np.asarray(found, float)


def grid(rows: Sequence[dict[str, Any]], x: str, ctx: str = "ctx") -> dict[str, Any]:
    """`{x: [...], "ctx": [...], "us": [[...]]}` of rows that measure a grid; lines may end early.

    Raises ValueError for a hole, and for a line of fewer than two points.
    """
    known = {(row["shape"][x], row["shape"][ctx]): row["us"] for row in rows}
    xs = sorted({point[0] for point in known})
    contexts = sorted({point[1] for point in known})
    lines = []
    for each in xs:
        line = [known[each, at] for at in contexts if (each, at) in known]
        if len(line) < 2 or any((each, at) not in known for at in contexts[: len(line)]):
            raise ValueError(f"the grid has a hole at {x} {each}")
        lines.append([max(us, 0.0) for us in line])
    if len(xs) < 2:
        raise ValueError(f"the grid has {len(xs)} points of {x}, and needs two")
    return {x: xs, "ctx": contexts, "us": lines}


def odd_cells(table: dict[str, Any], x: str) -> list[str]:
    """Cells above 1.5 times what their neighbours along either axis interpolate to.

    A table that a disturbed process measured shows such cells, though its repeats agree.
    """
    found, xs, contexts, us = [], table[x], table["ctx"], table["us"]
    for i, line in enumerate(us):
        for j, here in enumerate(line):
            column = [us[k][j] for k in (i - 1, i + 1) if 0 <= k < len(us) and j < len(us[k])]
            row = [line[k] for k in (j - 1, j + 1) if 0 <= k < len(line)]
            if len(row) == 2 and len(column) == 2:
                across = along((contexts[j - 1], contexts[j + 1]), row, contexts[j])
                down = along((xs[i - 1], xs[i + 1]), column, xs[i])
                if here > 1.5 * across and here > 1.5 * down:
                    found.append(f"{x} {xs[i]}, ctx {contexts[j]}")
    return found
