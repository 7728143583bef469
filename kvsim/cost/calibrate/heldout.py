"""The error of a finished table on measured rows that it was not made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvsim.cost.calibrate.compare import Point, reader
from kvsim.cost.calibrate.surface import error


def table_error(table: Any, rows: Mapping[Point, float]) -> dict[str, float]:
    """Errors in percent of the table, interpolated as in a run, at the points of `rows`.

    `rows`: point → microseconds. Points outside the table are left out; with no other, `points` is
    all there is.
    """
    at = reader(table)
    pairs = [(found, us) for point, us in rows.items() if (found := at(point)) is not None]
    if not pairs:
        return {"points": 0}
    fitted, measured = np.array(pairs).T
    return dict(error(fitted, measured)._asdict())
