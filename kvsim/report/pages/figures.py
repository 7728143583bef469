"""The elements of every figure: plotly traces and layouts as plain data.

Colours are names of custom properties of the style sheet, such as `used`. They are written as
`var(--used)`, which the page's script replaces, so that light and dark follow the reader's system.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Trace = dict[str, Any]
Axis = dict[str, Any]
Points = list[float | None]
"""None is a gap in the line."""

WIDE = 20.0
"""Ratio of the largest to the smallest value from which a logarithmic axis reads better."""


_LETTER_PX = 7
"""Width of a letter of an axis, of names of settings."""


class Entry(NamedTuple):
    """One entry of a legend, which shows or hides its traces."""

    label: str
    colour: str
    traces: tuple[int, ...]
    """Positions in the figure's data."""
    kind: str = "area"
    """`area`, `line`, `dash` or `dot`."""


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
    least_width: int = 0
    """Pixels below which the figure scrolls sideways."""


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


def time_unit(values_ns: Iterable[float]) -> tuple[str, float]:
    """`s` or `ms`, whichever writes the largest of these durations short; and its nanoseconds."""
    return ("s", 1e9) if _ends(values_ns)[1] >= 1e9 else ("ms", 1e6)


_TENS = np.array([float(f"1e{power}") for power in range(16)])
"""Powers of ten, all of which floats hold exactly."""


def compact(values: Iterable[float], digits: int = 5) -> Points:
    """Numbers with few digits for a short file; NaN becomes None, a gap in the line."""
    given = np.asarray(values if isinstance(values, np.ndarray) else [*values], dtype=float)
    sizes = np.where(given == 0, 1.0, np.abs(given))
    places = digits - 1 - np.floor(np.log10(sizes))
    usual = np.abs(places) < len(_TENS)
    places = np.where(usual, places, 0).astype(int)
    up, down = _TENS[np.maximum(places, 0)], _TENS[np.maximum(-places, 0)]
    scaled = np.where(usual, given, 0.0) * up / down
    whole = np.rint(scaled)
    written: Points = (whole / up * down).tolist()
    # Python decides where the products are too inexact to round by: it knows all digits.
    for i in np.flatnonzero(~usual | (np.abs(scaled - whole) > 0.4999)).tolist():
        written[i] = None if np.isnan(given[i]) else float(f"{given[i]:.{digits}g}")
    return written


def held(values: Iterable[float]) -> Points:
    """Values of bins as heights at their edges: the last one is repeated at the end."""
    heights = compact(values)
    return [*heights, *heights[-1:]]


def thinned(number: int, most: int) -> NDArray[np.intp]:
    """At most `most` places of `number`, evenly, the first and the last among them."""
    picked = np.linspace(0, number - 1, min(most, number)).round().astype(np.intp)
    return picked[np.diff(picked, prepend=-1) > 0]


def line(
    x: Sequence[Any],
    y: Sequence[Any],
    colour: str,
    name: str = "",
    *,
    shape: str = "linear",
    width: float = 2,
    dash: str = "solid",
    **further: Any,
) -> Trace:
    """A line; without a name, nothing appears under the pointer."""
    stroke = {"color": f"var(--{colour})", "width": width, "shape": shape, "dash": dash}
    trace: Trace = {"type": "scatter", "mode": "lines", "x": list(x), "y": list(y), "line": stroke}
    return trace | ({"name": name} if name else {"hoverinfo": "skip"}) | further


def step_line(x: Points, values: Iterable[float], colour: str, name: str) -> Trace:
    """A line of values of bins, each of which holds until the next edge."""
    return line(x, held(values), colour, name, shape="hv", width=1.6)


def points(
    x: Sequence[Any], y: Sequence[Any], colour: str, *, size: float = 6, opacity: float = 0.7
) -> Trace:
    """Filled marks; add `hovertemplate` or `hoverinfo`."""
    marker = {"color": f"var(--{colour})", "size": size, "opacity": opacity, "line": {"width": 0}}
    return {"type": "scatter", "mode": "markers", "x": list(x), "y": list(y), "marker": marker}


def told(trace: Trace, texts: Sequence[str]) -> Trace:
    """A trace that shows a text of its own at each point under the pointer."""
    return trace | {"text": texts, "hovertemplate": "%{text}<extra></extra>"}


def band(x: Points, low: Points, high: Points, colour: str, group: str) -> list[Trace]:
    """The area between two lines, without the lines; its entry in the legend is that of `group`."""
    edges = [line(x, y, colour, shape="hv", width=0, legendgroup=group) for y in (low, high)]
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


def chart(
    id: str,
    title: str,
    note: str,
    data: list[Trace],
    x: Axis,
    y: Axis,
    *,
    keyed: bool = True,
    height: int = 240,
    **further: Any,
) -> Figure:
    """A figure of these traces on these axes.

    `keyed`: whether the figure has a legend of its own. `further`: more of plotly's layout;
    `yaxis2`: what a second y axis, below the first one, has of its own.
    """
    below = further.pop("yaxis2", None)
    look = layout(x, y, **further)
    if below:
        look["yaxis2"] = merge(look["yaxis"], below)
        look["xaxis"]["anchor"] = "y2"
    legend = legend_of(data) if keyed else []
    return Figure(id, title, note, data, look, legend, height=height)


def time_chart(
    axis: TimeAxis,
    id: str,
    title: str,
    note: str,
    data: list[Trace],
    y: Axis,
    *,
    height: int = 200,
    **further: Any,
) -> Figure:
    """A figure over simulated time; `further`: arguments of `chart`."""
    x = titled(
        f"simulated time ({axis.unit})",
        range=[0, axis.end],
        unifiedhovertitle={"text": f"%{{x:.6~g}} {axis.unit}"},
    )
    return chart(id, title, note, data, x, y, height=height, **further)._replace(time=True)


def legend_of(data: Iterable[Trace]) -> list[Entry]:
    """An entry for each trace with a name, or for each `legendgroup`, as its first trace looks."""
    entries: dict[str, Entry] = {}
    for i, trace in enumerate(data):
        if label := trace.get("legendgroup", trace.get("name")):
            first = entries.get(label, Entry(label, _colour_of(trace), (), _kind_of(trace)))
            entries[label] = first._replace(traces=(*first.traces, i))
    return list(entries.values())


def _colour_of(trace: Trace) -> str:
    drawn = trace["line"] if "line" in trace else trace["marker"]
    return str(drawn["color"]).removeprefix("var(--").removesuffix(")")


def _kind_of(trace: Trace) -> str:
    if trace.get("mode") == "markers":
        return "dot"
    if "line" not in trace or "fillcolor" in trace:
        return "area"
    return "line" if trace["line"]["dash"] == "solid" else "dash"


def rule(axis: str, at: float, colour: str = "ink", width: float = 1, dash: str = "solid") -> Axis:
    """A straight line across a figure at a value of axis `x` or `y`, for `shapes`."""
    other = "y" if axis == "x" else "x"
    return {
        "type": "line",
        f"{axis}0": at,
        f"{axis}1": at,
        f"{other}0": 0,
        f"{other}1": 1,
        f"{other}ref": "paper",
        "line": {"color": f"var(--{colour})", "width": width, "dash": dash},
    }


def limit_line(axis: str, at: float) -> Axis:
    """The limit of an objective, for `shapes`."""
    return rule(axis, at, "bad", 1.2, "dot")


def scale(values: Iterable[float], wide: float = WIDE) -> Axis:
    """A logarithmic axis with readable ticks for positive values that differ widely; else {}."""
    low, high = _ends(values)
    return log_ticks(low, high) if low > 0 and high / low >= wide else {}


def log_ticks(low: float, high: float) -> Axis:
    """A logarithmic axis for these values: at most about ten ticks, written as plain numbers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    densities = {12: (1, 1.5, 2, 3, 5, 7), 200: (1, 2, 5), 20_000: (1, 3)}
    digits = next((each for most, each in densities.items() if high / low < most), (1,))
    every = -(-len(decades) // 8) if len(digits) == 1 else 1
    ticks = [float(f"{digit}e{decade}") for decade in decades[::every] for digit in digits]
    return {
        "type": "log",
        "rangemode": "normal",
        "tickangle": 0,
        "tickvals": ticks,
        "ticktext": [f"{tick:,.6g}" for tick in ticks],
    }


def log_axes(x_title: str, y_title: str, data: Sequence[Trace]) -> tuple[Axis, Axis]:
    """Two logarithmic axes for lines whose x are mostly powers of two; y up to 0 are not drawn."""
    first, last = (math.log2(end) for end in _ends(x for trace in data for x in trace["x"]))
    powers = [2.0**power for power in range(math.ceil(first), math.floor(last) + 1, 2)]
    across = {"type": "log", "tickvals": powers, "ticktext": [f"{p:,.6g}" for p in powers]}
    drawn = [y for trace in data for y in trace["y"] if y is not None and y > 0]
    up = log_ticks(*_ends(drawn)) if drawn else {"type": "log"}
    return titled(x_title, showgrid=True, **across), titled(y_title, **up)


def layout(x: Axis, y: Axis, **further: Any) -> dict[str, Any]:
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
    upright = {"rangemode": "tozero", "fixedrange": True, "hoverformat": ",.4~g"}
    common = {
        "margin": {"l": 74, "r": 18, "t": 10, "b": 44},
        "font": {"family": "var(--font)", "size": 12, "color": "var(--muted)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {
            "namelength": -1,
            "bgcolor": "var(--card)",
            "bordercolor": "var(--rule)",
            "font": {"family": "var(--font)", "size": 12, "color": "var(--ink)"},
        },
        "uirevision": "kept",
        "xaxis": merge(axis, spike, {"showgrid": False, "hoverformat": ".6~g"}, x),
        "yaxis": merge(axis, upright, y),
    }
    return merge(common, further)


def rows_axis(labels: Sequence[str]) -> Axis:
    """A y axis with a row for each label, the first one on top."""
    return {
        "range": [len(labels) - 0.5, -0.5],
        "tickvals": list(range(len(labels))),
        "ticktext": list(labels),
        "rangemode": "normal",
        "showgrid": False,
    }


def room_for(labels: Sequence[str]) -> dict[str, int]:
    """A margin in which the labels of rows have room."""
    return {"l": round(_LETTER_PX * max(map(len, labels))) + 16}


def titled(text: str, **further: Any) -> Axis:
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
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    # The first value of a property is that of the light style; it may name another property.
    named = dict(reversed(re.findall(r"--([\w-]+):\s*([^;]+);", style)))
    text = json.dumps(drawn)
    while "var(--" in text:
        text = re.sub(r"var\(--([\w-]+)\)", lambda match: json.dumps(named[match[1]])[1:-1], text)
    return json.loads(text)


def ratios(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    """Part over whole, NaN where whole is 0."""
    found: NDArray[np.float64] = np.divide(
        part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0
    )
    return found


def _ends(values: Iterable[float]) -> tuple[float, float]:
    array = values if isinstance(values, np.ndarray) else np.array(list(values), float)
    return (float(array.min()), float(array.max())) if len(array) else (0.0, 0.0)
