"""Writes a sweep as one HTML file, with figures of configurations against each other, and against
each setting.

Every figure ends with the trace of `highlight`. The page's script puts the configuration under the
pointer into it, in all figures at once; `customdata` names the configuration of a point.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, groupby, islice, product
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
from kvsim.report.pages.html import (
    Html,
    columns,
    document,
    element,
    facts,
    join,
    lead,
    panel,
    placed,
    strip,
    table,
)
from kvsim.report.pages.html import tags as tags_of
from kvsim.results.metrics import NAMED, Metric
from kvsim.results.numerals import MISSING, SPACE, count, number, percent, plural, show
from kvsim.results.plain import to_toml
from kvsim.search.slo import Objective
from kvsim.search.store import Record
from kvsim.search.sweep import (
    GOODPUT,
    MEMORY,
    RATE,
    SERVED,
    THROUGHPUT,
    TPOT,
    TTFT,
    Chosen,
    Configuration,
    Plan,
    pareto,
    sources,
    value_words,
    words,
)

_MOST_TICKS = 12
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)

PAGE = "sweep.html"
MOST_BEST, MOST_ROWS, MOST_ALIKE = 10, 300, 3
MOST_VALUES, MOST_MAPS = 16, 6
"""Most values of a setting that can be a side of a map, and most maps."""
_FULL = math.log(4)
"""Full colour is reached at four times a limit, or at a quarter of it."""


class Scale(NamedTuple):
    """An axis of numbers or of words."""

    title: str
    shares: dict[int, float | None]
    """Number of a configuration → its place from 0 to 1; None if it has none."""
    texts: dict[int, str]
    """Number of a configuration → its value, in words."""
    ticks: tuple[tuple[float, str], ...]
    limit: float | None = None
    """Place of an objective's limit, if it is on the axis."""


def setting_scale(key: str, configurations: Sequence[Configuration]) -> Scale:
    """The axis of a setting: its values if they are few or words, else a scale of numbers."""
    values = {c.number: c.settings[key] for c in configurations}
    texts = {which: value_words(value) for which, value in values.items()}
    distinct = ordered(list(values.values()))
    if len(distinct) > _MOST_TICKS and all(map(is_number, distinct)):
        return _numbers(key, values, texts, number)
    span = max(len(distinct) - 1, 1)
    places = {value_words(value): rank / span for rank, value in enumerate(distinct)}
    ticks = tuple((place, text) for text, place in places.items())
    return Scale(key, {which: places[text] for which, text in texts.items()}, texts, ticks)


def _figure_scale(
    metric: Metric, configurations: Sequence[Configuration], limit: float | None
) -> Scale:
    """The axis of a figure."""
    write = partial(show, unit=metric.unit)
    values = {c.number: c.figures.get(metric.key) for c in configurations}
    texts = {which: write(value) for which, value in values.items()}
    return _numbers(metric.label, values, texts, write, limit)


def ordered(values: Sequence[Any]) -> list[Any]:
    """Distinct values: numbers by size, others in order of appearance."""
    distinct = list({value_words(value): value for value in values}.values())
    return sorted(distinct) if all(map(is_number, distinct)) else distinct


def is_number(value: Any) -> bool:
    """Whether a value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class _Stretch(NamedTuple):
    """An axis from its least to its greatest value; logarithmic if that is far."""

    low: float
    high: float

    @property
    def _logarithmic(self) -> bool:
        return self.low > 0 and self.high / self.low >= WIDE

    def share(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        if self.high == self.low:
            return 0.5
        if self._logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def value_at(self, share: float) -> float:
        """The value there."""
        if self._logarithmic:
            return self.low * math.pow(self.high / self.low, share)
        return self.low + share * (self.high - self.low)


def _numbers(
    title: str,
    values: Mapping[int, float | None],
    texts: dict[int, str],
    write: Callable[[float], str],
    limit: float | None = None,
) -> Scale:
    there = [value for value in values.values() if value is not None]
    if not there:
        return Scale(title, dict.fromkeys(values), texts, ())
    stretch = _Stretch(min(there), max(there))
    places = [0.5] if stretch.low == stretch.high else _TICKS
    ticks = tuple((place, write(stretch.value_at(place))) for place in places)
    shares = {which: None if x is None else stretch.share(x) for which, x in values.items()}
    across = None
    if limit is not None and stretch.low < limit < stretch.high:
        across = stretch.share(limit)
    return Scale(title, shares, texts, ticks, across)


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
    return None if chosen.objectives is None else chosen.objectives.limit(metric)


def groups(
    chosen: Chosen, shown: Sequence[Configuration]
) -> list[tuple[str, str, Sequence[Configuration]]]:
    """(label, colour, members): those that miss an objective first, below the others."""
    if chosen.objectives is None:
        return [("configuration", "used", shown)]
    missing, meeting = ([c for c in shown if c.meets == meets] for meets in (False, True))
    found = ("misses an objective", "other", missing), ("meets all", "good", meeting)
    return [group for group in found if group[2]]


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
    if MEMORY in chosen.metrics:
        pairs.insert(0, (MEMORY, TTFT))
    return [
        _tradeoff(chosen, x, y, both)
        for x, y in pairs
        if (both := _having(chosen.configurations, x.key, y.key))
    ]


def effect_figures(chosen: Chosen, axes: Sequence[str]) -> list[Figure]:
    """The first figure against every setting; the line joins the best at each value."""
    metric = chosen.metrics[0]
    shown = _having(chosen.configurations, metric.key)
    return [_effect(chosen, shown, key, metric) for key in axes[:_MOST_EFFECTS] if shown]


def _having(configurations: Sequence[Configuration], *keys: str) -> list[Configuration]:
    return [each for each in configurations if set(keys) <= each.figures.keys()]


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
    # With hardly more than one configuration at each value, there is no best to join.
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
    shown = chosen.finished
    scales = [setting_scale(key, shown) for key in axes]
    scales += [_figure_scale(metric, shown, limit_of(chosen, metric)) for metric in chosen.metrics]
    data = [
        _lines(members, scales, colour, label) for label, colour, members in groups(chosen, shown)
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
        hovermode="closest",
        margin={"l": 12, "r": 12, "t": 26, "b": 64},
        shapes=[shape for x, scale in enumerate(scales) for shape in _axis_shapes(x, scale)],
        annotations=[
            _tick(x, place, text) for x, scale in enumerate(scales) for place, text in scale.ticks
        ],
    )._replace(least_width=_AXIS_PX * len(scales))


def _broken(title: str) -> str:
    """A long name broken into lines of about `_SHORT` letters."""
    lines = [""]
    for word in re.findall(r"[^_ .]+[_ .]?", title):
        if lines[-1] and len(lines[-1] + word) > _SHORT:
            lines.append("")
        lines[-1] += word
    return "<br>".join(each.strip() for each in lines)


def _lines(
    members: Sequence[Configuration], scales: Sequence[Scale], colour: str, label: str
) -> Trace:
    """All lines of a group as one trace with gaps."""
    x: list[int | None] = []
    y: list[float | None] = []
    owners: list[int] = []
    texts: list[str] = []
    for configuration in members:
        which = configuration.number
        shares = (scale.shares[which] for scale in scales)
        x += [*range(len(scales)), None]
        y += [*compact(math.nan if share is None else share for share in shares), None]
        owners += [which] * (len(scales) + 1)
        lines = about(configuration)
        texts += [*(f"<b>{s.title} {s.texts[which]}</b><br>{lines}" for s in scales), ""]
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
            if having := _having(members, metric.key):
                data.append(_line(having, up._replace(metric=metric), f"run-{i}", label, dash))
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


def _line(members: Sequence[Configuration], up: Side, colour: str, label: str, dash: str) -> Trace:
    x, y = [each.settings[RATE] for each in members], compact(map(up.of, members))
    owners = [each.number for each in members]
    look: dict[str, Any] = {"mode": "lines+markers", "legendgroup": label, "customdata": owners}
    drawn = line(x, y, colour, label or up.metric.label, dash=dash, **look)
    return told(drawn, list(map(about, members)))


def build_page(plan: Plan, chosen: Chosen) -> str:
    """The page of a sweep."""
    rates = placed(rate_figures(chosen), "trio")
    sections = {"By request rate": rates, "Best": _best(chosen)}
    if len(chosen.finished) > 1:
        sections |= {
            "Trade-offs": placed(tradeoff_figures(chosen), "trio"),
            "All at once": placed([parallel_figure(chosen, plan.axes)]),
            "Two settings at once": heat_maps(chosen, plan.axes),
            "Each setting": placed(effect_figures(chosen, plan.axes), "trio"),
        }
    sections |= {"Every configuration": _all(chosen), "To repeat it": _origin(plan, chosen)}
    runs, configurations = len(plan.points), plural(len(chosen.configurations), "configuration")
    seeds = max(len(configuration.records) for configuration in chosen.configurations)
    over = f", {plural(runs, 'run')} on {plural(seeds, 'seed')}" if seeds > 1 else ""
    trace = f"{plan.trace.name}, {_requests(plan)}"
    return document(
        "kvsim sweep",
        f"{configurations} of {', '.join(plan.axes) or 'seeds'}",
        sections,
        subject=f"{_engine(plan)} · {trace}{over}",
        about=[tags(configuration.records for configuration in chosen.configurations)],
        remarks=chosen.verdict,
    )


def _requests(plan: Plan) -> str:
    """How many requests of the trace were sent; the least and the most where that is varied."""
    whole = plan.trace.requests
    given = ({**plan.base, **point.settings}.get("num_prompts") for point in plan.points)
    sent = sorted({min(whole, number or whole) for number in given})
    fewest = f"{count(sent[0])} to " if sent[1:] else ""
    return f"{fewest}{plural(sent[-1], 'request')}"


def _engine(plan: Plan) -> str:
    """Engine, model and hardware, as far as they are not varied."""
    named = ("engine", "model", "hardware")
    told = (plan.base[key] for key in named if key not in plan.axes)
    return " · ".join(str(each) for each in told if each is not None)


def tags(groups: Iterable[Sequence[Record]]) -> Html:
    """Where step times come from, in colours that distinguish measured from estimated."""
    return tags_of((text, "good" if good else "warning") for text, good in sources(groups))


def _best(chosen: Chosen) -> Html:
    if not chosen.best:
        return panel(None, lead("No configuration meets all objectives."))
    listed = chosen.best[:MOST_BEST]
    keys = tuple(listed[0].first.settings)
    judged = chosen.objectives is not None
    head = ["#", *keys, *(metric.label for metric in chosen.metrics), *["Limit used"] * judged]
    rows = [
        [
            f",{SPACE}".join(str(each.number) for each in place.members[:MOST_ALIKE]),
            *place.settings.values(),
            *_figures(place.first, chosen),
            *([_use(place.first)] if judged else []),
        ]
        for place in listed
    ]
    text = chosen.rule
    if len(chosen.best) > MOST_BEST:
        text += f" The first {MOST_BEST} of {count(len(chosen.best))}."
    return join((lead(text), panel(None, table(head, rows, text_columns=1 + len(keys)))))


def _figures(configuration: Configuration, chosen: Chosen) -> list[str]:
    return [show(configuration.figures.get(m.key), m.unit) for m in chosen.metrics]


def _use(configuration: Configuration) -> Html:
    """How much of the tightest limit is used, as a bar."""
    share = min(configuration.load, 1.0)
    bar = strip((("good", share, ""), ("free", 1 - share, "")))
    return element("div", percent(configuration.load), bar, class_="used")


def _all(chosen: Chosen) -> Html:
    listed = chosen.configurations[:MOST_ROWS]
    keys = tuple(listed[0].settings)
    judged = chosen.objectives is not None
    head = ["#", *keys, *["Meets"] * judged, "Outcome"]
    rows = []
    for c in listed:
        met = [_met(c)] if judged else []
        settings = [value_words(c.settings[key]) for key in keys]
        rows.append([c.number, *settings, *met, _outcome(c), *_figures(c, chosen)])
    labels = (metric.label for metric in chosen.metrics)
    whole = panel(None, table([*head, *labels], rows, text_columns=len(head)))
    rest = len(chosen.configurations) - len(listed)
    return join((whole, lead(f"{count(rest)} more are in sweep.parquet.") if rest else None))


def _met(configuration: Configuration) -> Html:
    seeds = len(configuration.records)
    if seeds == 1:
        text = "yes" if configuration.meets else "no"
    else:
        text = f"{configuration.met}{SPACE}of{SPACE}{seeds}"
    return element("span", text, class_="better" if configuration.meets else "muted")


def _outcome(configuration: Configuration) -> Html:
    text = configuration.outcome.replace("-", " ")
    if configuration.outcome == "finished":
        return element("span", text, class_="muted")
    return element(
        "details", element("summary", text, class_="worse"), configuration.reason or MISSING
    )


def _origin(plan: Plan, chosen: Chosen) -> Html:
    origin = {
        "Trace": plan.trace.name,
        "Trace SHA-256": plan.trace.sha256,
        "Requests in the trace": plan.trace.requests,
        "Objectives": plan.slo,
        "Runs": len(plan.points),
        "kvsim": chosen.configurations[0].records[0]["kvsim_version"],
    }
    return origin_panels(origin, plan.base)


def origin_panels(origin: Mapping[str, Any], settings: Mapping[str, Any]) -> Html:
    """Where runs come from, and the settings that they share."""
    shared = panel("Settings of every run", element("pre", to_toml(settings)))
    return columns((panel("Origin", facts(origin)), shared))


def heat_maps(chosen: Chosen, axes: Sequence[str]) -> Html:
    """Maps of the first figures for every pair of settings with few values, if there is a pair."""
    there = chosen.finished
    values = {key: [*map(value_words, ordered([c.settings[key] for c in there]))] for key in axes}
    pairs = list(combinations((k for k in axes if 2 <= len(values[k]) <= MOST_VALUES), 2))
    if not pairs:
        return Html()
    bounds, metrics = dict[Metric, Objective](), list(chosen.metrics[:2])
    text = "Stronger colours stand for larger values."
    if chosen.objectives is not None:
        bounds = {objective.metric: objective for objective in chosen.objectives.each}
        metrics = list(bounds)
        text = "Green is within the limit, red beyond it; full colour at a quarter of it or four"
        text += " times it."
    note = lead("Each cell shows the best of the other settings.") if axes[2:] else None
    maps = []
    for pair, metric in islice(product(pairs, metrics), MOST_MAPS):
        # The setting with more values goes down.
        across, down = sorted(pair, key=lambda key: len(values[key]))
        cells = _best_of_each(chosen, (down, across), metric)
        sides = {down: values[down], across: values[across]}
        maps.append(_map(cells, sides, metric, bounds.get(metric), note))
    return join((lead(text), element("div", *maps, class_="maps")))


def _best_of_each(
    chosen: Chosen, keys: tuple[str, str], metric: Metric
) -> dict[tuple[str, str], Configuration]:
    """The best configuration for each pair of values of two settings."""
    members: dict[tuple[str, str], list[Configuration]] = {}
    for each in chosen.finished:
        down, across = (value_words(each.settings[key]) for key in keys)
        members.setdefault((down, across), []).append(each)
    return {place: chosen.best_of(alike, metric) for place, alike in members.items()}


def _map(
    cells: Mapping[tuple[str, str], Configuration],
    sides: Mapping[str, Sequence[str]],
    metric: Metric,
    objective: Objective | None,
    note: Html | None,
) -> Html:
    """A map of one figure; `sides`: the settings down and across, with their values."""
    values = [c.figures[metric.key] for c in cells.values() if metric.key in c.figures]
    ends = min(values, default=0.0), max(values, default=0.0)
    (down, rows), (across, columns) = sides.items()

    def cell(row: str, column: str) -> Html:
        configuration = cells.get((row, column))
        value = None if configuration is None else configuration.figures.get(metric.key)
        if configuration is None or value is None:
            return element("td", MISSING, class_="number muted")
        colour, strength = _shade(value, metric, objective, *ends)
        return element(
            "td",
            show(value, metric.unit),
            title=f"#{configuration.number}: {words(configuration.settings)}",
            class_="number shaded",
            style=f"--colour: var(--{colour}); --strength: {strength:.0f}%",
        )

    head = (
        element("tr", element("th"), element("th", across, colspan=len(columns))),
        element("tr", element("th", down), *(element("th", column) for column in columns)),
    )
    body = (
        element("tr", element("th", row, scope="row"), *(cell(row, column) for column in columns))
        for row in rows
    )
    title = metric.label if objective is None else str(objective)
    whole = element("table", element("thead", *head), element("tbody", *body), class_="heat")
    return element(
        "figure",
        element("figcaption", element("h3", title), note),
        element("div", whole, class_="scroll", tabindex="0"),
    )


def _shade(
    value: float, metric: Metric, objective: Objective | None, low: float, high: float
) -> tuple[str, float]:
    """Green within a limit and red beyond it, stronger with distance; else blue by size."""
    if objective is not None:
        figures = {metric.key: value}
        load = objective.load(figures)
        far = min(abs(math.log(load)) / _FULL, 1.0) if 0 < load < math.inf else 1.0
        return ("good" if objective.met(figures) else "bad"), 14 + 56 * far
    if high == low:
        return "used", 20
    share = (value - low) / (high - low)
    if low > 0 and high / low > WIDE:
        share = math.log(value / low) / math.log(high / low)
    return "used", 6 + 60 * share
