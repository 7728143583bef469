"""Draws figures of configurations against each other, and against each setting.

Every figure ends with the trace of `highlight`. The page's script puts the configuration under the
pointer into it, in all figures at once; `customdata` names the configuration of a point.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kvsim.machine.hardware import GIB
from kvsim.report.pages.figures import (
    WIDE,
    Axis,
    Figure,
    Trace,
    chart,
    compact,
    limit_line,
    line,
    points,
    scale,
    titled,
    told,
)
from kvsim.results.metrics import NAMED, Metric
from kvsim.results.numerals import number, show
from kvsim.search.sweep.choose import (
    GOODPUT,
    MEMORY,
    RATE,
    SERVED,
    THROUGHPUT,
    TPOT,
    TTFT,
    Chosen,
    Configuration,
    pareto,
    value_words,
    words,
)

_MOST_TICKS = 12
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Scale(NamedTuple):
    """An axis of numbers or of words."""

    title: str
    shares: tuple[float | None, ...]
    """The place of each configuration from 0 to 1; None if it has none."""
    texts: tuple[str, ...]
    """The value of each configuration, in words."""
    ticks: tuple[tuple[float, str], ...]
    limit: float | None = None
    """Place of an objective's limit, if it is on the axis."""


def setting_scale(key: str, configurations: Sequence[Configuration]) -> Scale:
    """The axis of a setting: its values if they are few or words, else a scale of numbers."""
    values = [configuration.settings[key] for configuration in configurations]
    texts = tuple(map(value_words, values))
    distinct = ordered(values)
    if len(distinct) > _MOST_TICKS and all(map(is_number, distinct)):
        return _numbers(key, [float(value) for value in values], texts, number)
    span = max(len(distinct) - 1, 1)
    places = {value_words(value): rank / span for rank, value in enumerate(distinct)}
    ticks = tuple((place, text) for text, place in places.items())
    return Scale(key, tuple(places[text] for text in texts), texts, ticks)


def figure_scale(
    metric: Metric, configurations: Sequence[Configuration], limit: float | None = None
) -> Scale:
    """The axis of a figure."""
    values = [configuration.figures.get(metric.key) for configuration in configurations]
    texts = tuple(show(value, metric.unit) for value in values)
    return _numbers(metric.label, values, texts, lambda v: show(v, metric.unit), limit)


def ordered(values: Sequence[Any]) -> list[Any]:
    """Distinct values: numbers by size, others in order of appearance."""
    distinct = list({value_words(value): value for value in values}.values())
    return sorted(distinct) if all(map(is_number, distinct)) else distinct


def is_number(value: Any) -> bool:
    """Whether a value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(
    title: str,
    values: Sequence[float | None],
    texts: tuple[str, ...],
    write: Callable[[float], str],
    limit: float | None = None,
) -> Scale:
    there = [value for value in values if value is not None]
    if not there:
        return Scale(title, tuple(None for _ in values), texts, ())
    low, high = min(there), max(there)
    logarithmic = low > 0 and high / low >= WIDE

    def share(value: float) -> float:
        if high == low:
            return 0.5
        if logarithmic:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def value_at(place: float) -> float:
        return low * (high / low) ** place if logarithmic else low + place * (high - low)

    places = [0.5] if high == low else _TICKS
    ticks = tuple((place, write(value_at(place))) for place in places)
    within = limit is not None and low < limit < high
    return Scale(
        title,
        tuple(None if value is None else share(value) for value in values),
        texts,
        ticks,
        share(limit) if within and limit is not None else None,
    )


_IN_SECONDS = 2000
"""Milliseconds from which an axis is in seconds."""
_MOST_EFFECTS = 9


class Side(NamedTuple):
    """An axis of a figure of the summary."""

    metric: Metric
    unit: str
    per_unit: float
    """Units of the metric per unit of the axis."""
    limit: float | None
    look: Axis
    """The layout settings of the axis."""

    def of(self, configuration: Configuration) -> float:
        """The place of a configuration on the axis."""
        return configuration.figures[self.metric.key] / self.per_unit

    def limit_line(self, axis: str) -> list[Axis]:
        """The limit as a line across, on axis `x` or `y`; empty if there is none."""
        return [] if self.limit is None else [limit_line(axis, self.limit / self.per_unit)]


def side(metric: Metric, shown: Sequence[Configuration], limit: float | None) -> Side:
    """The axis of a figure that all `shown` have, bounded by `limit`."""
    values = [configuration.figures[metric.key] for configuration in shown]
    unit, per_unit = metric.unit if metric.unit in ("ms", "s", "tokens/s") else "", 1.0
    if metric.unit == "bytes":
        unit, per_unit = "GiB", GIB
    elif metric.unit == "ms" and max(values, default=0.0) >= _IN_SECONDS:
        unit, per_unit = "s", 1000.0
    title = f"{metric.label} ({unit})" if unit else metric.label
    if unit == "tokens/s":
        title = f"{metric.label.split()[0]} tokens/s"
    look = titled(title, exponentformat="none", **scale(value / per_unit for value in values))
    return Side(metric, unit, per_unit, limit, look)


def limit_of(chosen: Chosen, metric: Metric) -> float | None:
    """The limit that an objective sets for a figure."""
    if chosen.objectives is None:
        return None
    return next((o.limit for o in chosen.objectives.each if o.metric.key == metric.key), None)


def groups(
    chosen: Chosen, shown: Sequence[Configuration]
) -> Iterable[tuple[str, str, list[Configuration]]]:
    """(label, colour, members): those that miss an objective first, below the others."""
    if chosen.objectives is None:
        yield "configuration", "used", list(shown)
        return
    for label, colour, meets in (
        ("misses an objective", "other", False),
        ("meets all", "good", True),
    ):
        members = [configuration for configuration in shown if configuration.meets == meets]
        if members:
            yield label, colour, members


def highlight(mode: str) -> Trace:
    """An empty trace for the configuration under the pointer."""
    ring = {"color": "var(--waiting)", "width": 3}
    empty = points([None], [None], "waiting", size=15, opacity=1) | {"hoverinfo": "skip"}
    empty["marker"] |= {"color": "rgba(0,0,0,0)", "line": ring}
    return empty | {"mode": mode, "meta": "highlight", "line": {**ring, "width": 3.5}}


def about(configuration: Configuration) -> str:
    """A configuration in a few lines."""
    settings = [f"{key} {value_words(value)}" for key, value in configuration.settings.items()]
    figures = [
        f"{metric.label} {show(configuration.figures.get(metric.key), metric.unit)}"
        for metric in (TTFT, TPOT, THROUGHPUT)
    ]
    return "<br>".join([f"<b>#{configuration.number}</b>", *settings, *figures])


def tradeoff_figures(chosen: Chosen) -> list[Figure]:
    """Pairs of figures against each other, with the Pareto front."""
    pairs = [(TTFT, THROUGHPUT), (TPOT, TTFT)]
    if chosen.by_memory:
        pairs.insert(0, (MEMORY, TTFT))
    return [
        _tradeoff(chosen, x, y, both) for x, y in pairs if (both := _having(chosen, x.key, y.key))
    ]


def effect_figures(chosen: Chosen, axes: Sequence[str]) -> list[Figure]:
    """The first figure against every setting; the line joins the best at each value."""
    metric = chosen.metrics[0]
    shown = _having(chosen, metric.key)
    return [_effect(chosen, shown, key, metric) for key in axes[:_MOST_EFFECTS] if shown]


def _having(chosen: Chosen, *keys: str) -> list[Configuration]:
    return [c for c in chosen.configurations if set(keys) <= c.figures.keys()]


def _marks(
    group: Sequence[Configuration],
    x: Callable[[Configuration], Any],
    y: Callable[[Configuration], float],
    colour: str,
    name: str,
) -> Trace:
    """A point for each configuration."""
    marks = points(list(map(x, group)), compact(map(y, group)), colour, size=8, opacity=0.8)
    marks |= {"name": name, "customdata": [configuration.number for configuration in group]}
    return told(marks, list(map(about, group)))


def _tradeoff(chosen: Chosen, x: Metric, y: Metric, both: Sequence[Configuration]) -> Figure:
    front = pareto(both, x, y)
    across, up = (side(metric, both, limit_of(chosen, metric)) for metric in (x, y))
    shape = "hv" if y.better == "lower" else "vh"
    ends = compact(map(across.of, front)), compact(map(up.of, front))
    data = [line(*ends, "peak", "not beaten", shape=shape, width=1.5, hoverinfo="skip")]
    for label, colour, members in groups(chosen, both):
        data.append(_marks(members, across.of, up.of, colour, label))
    words = (y, ("lower", "upper")), (x, ("left", "right"))
    corner = " ".join(word[metric.better == "higher"] for metric, word in words)
    return chart(
        f"tradeoff-{x.key}-{y.key}",
        f"{y.label} against {x.label}",
        f"The {corner} corner is best.",
        [*data, highlight("markers")],
        across.look,
        {**up.look, "fixedrange": False},
        height=340,
        hovermode="closest",
        shapes=across.limit_line("x") + up.limit_line("y"),
    )


def _effect(chosen: Chosen, shown: Sequence[Configuration], key: str, metric: Metric) -> Figure:
    values = ordered([c.settings[key] for c in shown])
    numeric = all(map(is_number, values))
    up = side(metric, shown, limit_of(chosen, metric))

    def place(value: Any) -> Any:
        return value if numeric else value_words(value)

    data = [
        _marks(members, lambda c: place(c.settings[key]), up.of, colour, label)
        for label, colour, members in groups(chosen, shown)
    ]
    if 2 * len(values) <= len(shown):
        best = [chosen.best_of((c for c in shown if c.settings[key] == v), metric) for v in values]
        ends = [place(value) for value in values], compact(map(up.of, best))
        data.insert(0, line(*ends, "peak", width=1.5))
    kind = (
        scale(values) if numeric else {"type": "category", "categoryarray": [*map(place, values)]}
    )
    return chart(
        f"effect-{key.replace('.', '-')}",
        f"{metric.label} by {key}",
        "",
        [*data, highlight("markers")],
        titled(key, **kind),
        up.look,
        keyed=False,
        hovermode="closest",
        shapes=up.limit_line("y"),
        margin={"l": 62},
    )


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


_COLOURS = 5
"""Most combinations of other settings that are drawn, each in its colour."""
_PANELS = (
    ("TTFT", (TTFT, NAMED["p50_ttft_ms"]), "Solid: p99; dashed: p50."),
    ("TPOT", (TPOT, NAMED["p50_tpot_ms"]), "Solid: p99; dashed: p50."),
    ("Served", (SERVED, GOODPUT), "Solid: served; dotted: offered."),
)


def rate_figures(chosen: Chosen) -> list[Figure]:
    """Figures by request rate, a line for each combination of other settings; none if fewer than
    two rates ran. Of many combinations, the first are drawn."""
    ran = [c for c in chosen.configurations if c.figures and is_number(c.settings.get(RATE))]
    lines = [
        (label, sorted(members, key=lambda each: each.settings[RATE]))
        for label, members in groupby(sorted(ran, key=_others), _others)
    ]
    lines = [(label, members) for label, members in lines if members[1:]][:_COLOURS]
    return [_panel(chosen, lines, *panel) for panel in _PANELS] if lines else []


def _others(configuration: Configuration) -> str:
    """The settings besides the rate, in words."""
    others = {key: value for key, value in configuration.settings.items() if key != RATE}
    return words(others) if others else ""


def _panel(
    chosen: Chosen,
    lines: Sequence[tuple[str, list[Configuration]]],
    title: str,
    metrics: tuple[Metric, Metric],
    note: str,
) -> Figure:
    drawn = [each for _, members in lines for each in members]
    up = side(metrics[0], drawn, limit_of(chosen, metrics[0]))
    data: list[Trace] = []
    for i, (label, members) in enumerate(lines, 1):
        for metric, dash in zip(metrics, ("solid", "dash"), strict=True):
            having = [each for each in members if metric.key in each.figures]
            data += _line(having, up._replace(metric=metric), f"run-{i}", label, dash)
    rates, unit = [each.settings[RATE] for each in drawn], up.unit or "requests/s"
    if metrics[0] == SERVED:
        ends = [min(rates), max(rates)]
        data.insert(0, line(ends, ends, "muted", width=1.2, dash="dot"))
        if any(GOODPUT.key in each.figures for each in drawn):
            title, note = "Served and goodput", "Solid: served; dashed: goodput; dotted: offered."
    across = titled("request rate (requests/s)", showgrid=True, **scale(rates, 50))
    y = {**up.look, **titled(f"{title.partition(' ')[0]} ({unit})")}
    return chart(
        *(f"rate-{metrics[0].key}", title, note, [*data, highlight("markers")], across, y),
        keyed=len(lines) > 1,
        height=300,
        hovermode="closest",
        shapes=up.limit_line("y"),
    )


def _line(
    members: Sequence[Configuration], up: Side, colour: str, label: str, dash: str
) -> Iterator[Trace]:
    if members:
        x, y = [each.settings[RATE] for each in members], compact(map(up.of, members))
        owners = [each.number for each in members]
        look: dict[str, Any] = {"mode": "lines+markers", "legendgroup": label, "customdata": owners}
        drawn = line(x, y, colour, label or up.metric.label, dash=dash, **look)
        yield told(drawn, list(map(about, members)))
