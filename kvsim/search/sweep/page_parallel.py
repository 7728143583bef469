"""Draws every configuration as a line from its settings to its figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvsim.report.pages.figures import Axis, Figure, Trace, chart, compact, line, told
from kvsim.search.sweep.choose import Chosen, Configuration
from kvsim.search.sweep.page_axes import Scale, figure_scale, setting_scale
from kvsim.search.sweep.page_figures import about, groups, highlight, limit_of

_MANY = 60
"""Number of lines from which they are drawn fainter."""
_SHORT, _AXIS_PX = 13, 104
"""Letters that fit beside the next axis, and the pixels that they take."""


def parallel_figure(chosen: Chosen, axes: Sequence[str]) -> Figure:
    """An axis for each setting and each of the first figures, a line for each configuration."""
    shown = [c for c in chosen.configurations if c.figures]
    scales = [setting_scale(key, shown) for key in axes]
    scales += [figure_scale(m, shown, limit_of(chosen, m)) for m in chosen.metrics]
    rank = {configuration.number: i for i, configuration in enumerate(shown)}
    data = [
        _lines([(c, rank[c.number]) for c in members], scales, colour, label)
        for label, colour, members in groups(chosen, shown)
    ]
    note = "Each line is a configuration; point at one to see it in every chart of this page."
    if any(scale.limit is not None for scale in scales):
        note += " The short red bars are limits."
    x: Axis = {
        "range": [-0.5, len(scales) - 0.3],
        "tickmode": "array",
        "tickvals": list(range(len(scales))),
        "ticktext": [_broken(scale.title) for scale in scales],
        "tickangle": 0,
        "ticks": "",
        "showline": False,
        "fixedrange": True,
    }
    return chart(
        "parallel",
        "From settings to figures",
        note,
        [*data, highlight("lines")],
        x,
        {"range": [-0.06, 1.06], "visible": False},
        height=410,
        least_width=_AXIS_PX * len(scales),
        hovermode="closest",
        margin={"l": 12, "r": 12, "t": 26, "b": 64},
        shapes=[shape for x, scale in enumerate(scales) for shape in _axis_shapes(x, scale)],
        annotations=[
            _tick(x, place, text) for x, scale in enumerate(scales) for place, text in scale.ticks
        ],
    )


def _broken(title: str) -> str:
    """A long name broken into lines of about `_SHORT` letters."""
    lines = [""]
    for word in re.findall(r"[^_ .]+[_ .]?", title):
        if lines[-1] and len(lines[-1] + word) > _SHORT:
            lines.append("")
        lines[-1] += word
    return "<br>".join(each.strip() for each in lines)


def _lines(
    members: Sequence[tuple[Configuration, int]], scales: Sequence[Scale], colour: str, label: str
) -> Trace:
    """All lines of a group as one trace with gaps; members carry their rank in the scales."""
    x: list[int | None] = []
    y: list[float | None] = []
    owners: list[int] = []
    texts: list[str] = []
    for configuration, i in members:
        shares = (scale.shares[i] for scale in scales)
        x += [*range(len(scales)), None]
        y += [*compact(float("nan") if share is None else share for share in shares), None]
        owners += [configuration.number] * (len(scales) + 1)
        lines = about(configuration)
        texts += [*(f"<b>{s.title} {s.texts[i]}</b><br>{lines}" for s in scales), ""]
    opacity = 0.75 if len(members) <= _MANY else 0.4
    return told(line(x, y, colour, label, width=1.5, opacity=opacity, customdata=owners), texts)


def _axis_shapes(x: int, scale: Scale) -> Iterable[Axis]:
    yield _bar(x, x, 0, 1, "var(--rule)", 1)
    if scale.limit is not None:
        yield _bar(x - 0.09, x + 0.09, scale.limit, scale.limit, "var(--bad)", 2.5)


def _bar(x0: float, x1: float, y0: float, y1: float, colour: str, width: float) -> Axis:
    line = {"color": colour, "width": width}
    return {"type": "line", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "line": line}


def _tick(x: int, place: float, text: str) -> Axis:
    return {
        "x": x,
        "y": place,
        "text": text,
        "showarrow": False,
        "xanchor": "left",
        "xshift": 4,
        "font": {"size": 11, "color": "var(--muted)"},
        "bgcolor": "var(--card)",
        "opacity": 0.85,
    }
