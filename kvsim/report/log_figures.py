"""Line charts over counts, with two logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvsim.report.figures import Points, Trace, layout, titled

FEW_DECADES = 3
"""Up to this number of decades, an axis has labels for 1, 2 and 5 of each; beyond, one per
decade."""


def line(x: Sequence[float], y: Points, colour: str, name: str, dash: str = "solid") -> Trace:
    """Straight lines between points; `colour` is a name of the style sheet."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": y,
        "name": name,
        "line": {"color": f"var(--{colour})", "width": 2, "dash": dash},
    }


def log_layout(x_title: str, y_title: str, data: Sequence[Trace], **further: Any) -> dict[str, Any]:
    """The layout for lines whose x are mostly powers of two; values up to 0 are not drawn."""
    xs = [x for trace in data for x in trace["x"] if x > 0]
    ys = [y for trace in data for y in trace["y"] if y is not None and y > 0]
    return layout(
        titled(x_title, type="log", showgrid=True, **_labels(_powers(xs))),
        titled(y_title, type="log", rangemode="normal", **_labels(_decades(ys))),
        **further,
    )


def _powers(values: Sequence[float]) -> list[float]:
    """Every second power of two."""
    first, last = math.ceil(math.log2(min(values))), math.floor(math.log2(max(values)))
    return [2.0**power for power in range(first, last + 1, 2)]


def _decades(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    digits = (1, 2, 5) if last - first <= FEW_DECADES else (1,)
    return [float(f"{digit}e{decade}") for decade in range(first, last + 1) for digit in digits]


def _labels(ticks: list[float]) -> dict[str, Any]:
    return {"tickvals": ticks, "ticktext": [f"{tick:,.6g}" for tick in ticks]}
