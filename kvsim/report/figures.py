"""The elements of every figure: plotly traces and layouts as plain data.

Colours are names of custom properties of the style sheet, such as `var(--used)`. The page's script
replaces them, so that light and dark follow the reader's system.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Trace = dict[str, Any]
Points = list[float | None]
"""None is a gap in the line."""


class Entry(NamedTuple):
    """One entry of a legend, which shows or hides its traces."""

    label: str
    colour: str
    traces: tuple[int, ...]
    """Positions in the figure's data."""
    kind: str = "area"
    """`area`, `line` or `dash`."""


class Figure(NamedTuple):
    """A figure and the words around it."""

    id: str
    title: str
    note: str
    data: list[Trace]
    layout: dict[str, Any]
    legend: list[Entry]
    time: bool = False
    """Whether its x axis is the run's time; then it zooms together with the others."""
    height: int = 240


class TimeAxis(NamedTuple):
    """The unit in which a page writes simulated time."""

    unit: str
    ns: float
    """Nanoseconds per unit."""
    end: float
    """The end of the run, in this unit."""

    def of(self, instants_ns: NDArray[np.int64]) -> Points:
        """Instants in this unit."""
        return compact(instants_ns / self.ns, digits=8)


def time_axis(end_ns: int) -> TimeAxis:
    """A unit in which the end of the run is a number of few digits."""
    for unit, ns in (("h", 3600e9), ("min", 60e9), ("s", 1e9)):
        if end_ns >= 5 * ns:
            return TimeAxis(unit, ns, end_ns / ns)
    return TimeAxis("ms", 1e6, end_ns / 1e6)


def compact(values: Iterable[float], digits: int = 5) -> Points:
    """Numbers with few digits for a short file; NaN becomes None, a gap in the line."""
    return [None if v != v else float(f"{v:.{digits}g}") for v in map(float, values)]


def held(values: Iterable[float]) -> Points:
    """Values of bins as heights at their edges: the last one is repeated at the end."""
    heights = compact(values)
    return [*heights, *heights[-1:]]


def step_line(x: Points, y: Points, colour: str, name: str) -> Trace:
    """A line of values that hold until the next edge."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": name,
        "line": {"color": f"var(--{colour})", "width": 1.6, "shape": "hv"},
    }


def area(trace: Trace, stack: str = "one") -> Trace:
    """A line as a filled area on top of the previous areas of its stack."""
    colour = trace["line"]["color"]
    line = {**trace["line"], "width": 0}
    return {**trace, "line": line, "stackgroup": stack, "fillcolor": colour}


def band(x: Points, low: Points, high: Points, colour: str) -> list[Trace]:
    """The area between two lines, without the lines."""
    base = {"hoverinfo": "skip", "showlegend": False}
    edges: list[Trace] = [step_line(x, y, colour, "") | base for y in (low, high)]
    for edge in edges:
        edge["line"] = {**edge["line"], "width": 0}
    edges[1] |= {"fill": "tonexty", "fillcolor": f"var(--{colour}-band)"}
    return edges


def bars(x: Points, y: Points, width: float, colour: str, name: str) -> Trace:
    """Bars that start at x."""
    return {
        "type": "bar",
        "x": x,
        "y": y,
        "offset": 0,
        "width": width,
        "name": name,
        "marker": {"color": f"var(--{colour})", "line": {"width": 0}},
    }


def layout(x: dict[str, Any], y: dict[str, Any], **further: Any) -> dict[str, Any]:
    """The common layout; `x` and `y` add to the axes."""
    axis = {
        "gridcolor": "var(--grid)",
        "linecolor": "var(--rule)",
        "zeroline": False,
        "automargin": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "var(--rule)",
        "title": {"standoff": 8},
        "separatethousands": True,
    }
    spike = {"spikecolor": "var(--muted)", "spikethickness": 1, "spikedash": "solid"}
    common = {
        "margin": {"l": 74, "r": 18, "t": 10, "b": 44},
        "font": {"family": "var(--font)", "size": 12, "color": "var(--muted)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "x unified",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--muted)", "orientation": "h"},
        "hoverlabel": {
            "namelength": -1,
            "bgcolor": "var(--card)",
            "bordercolor": "var(--rule)",
            "font": {"family": "var(--font)", "size": 12, "color": "var(--ink)"},
        },
        "uirevision": "kept",
        "xaxis": merge(axis, spike, {"showgrid": False, "hoverformat": ".6~g"}, x),
        "yaxis": merge(
            axis, {"rangemode": "tozero", "fixedrange": True, "hoverformat": ",.4~g"}, y
        ),
    }
    return merge(common, further)


def over_time(axis: TimeAxis, y: dict[str, Any], **further: Any) -> dict[str, Any]:
    """The layout of a figure over simulated time."""
    x = titled(
        f"simulated time ({axis.unit})",
        range=[0, axis.end],
        unifiedhovertitle={"text": f"%{{x:.6~g}} {axis.unit}"},
    )
    return layout(x, y, **further)


def titled(text: str, **further: Any) -> dict[str, Any]:
    """An axis with this title."""
    return {"title": {"text": text}, **further}


def merge(*parts: dict[str, Any]) -> dict[str, Any]:
    """Nested tables of settings merged; later ones win."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            inner = merged.get(key)
            if isinstance(inner, dict) and isinstance(value, dict):
                value = merge(inner, value)
            merged[key] = value
    return merged


def coloured(drawn: Any) -> Any:
    """Traces or a layout with the colours and fonts of the light style sheet, not their names."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    # The first value of a property is that of the light style.
    named = dict(reversed(re.findall(r"--([\w-]+):\s*([^;]+);", style)))
    text = re.sub(
        r"var\(--([\w-]+)\)", lambda match: json.dumps(named[match[1]])[1:-1], json.dumps(drawn)
    )
    return json.loads(text)


def percentages(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    """100 times part over whole, NaN where whole is 0."""
    shares: NDArray[np.float64] = np.divide(
        100 * part, whole, out=np.full(len(part), np.nan), where=whole > 0
    )
    return shares
