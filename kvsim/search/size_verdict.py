"""States the result of a search: in remarks, in a row for each value around it, and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log10
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.explain.certainty import LEVEL
from kvsim.fleet import FleetConfig
from kvsim.report import Remark, diagnosis_of
from kvsim.report.pages.figures import (
    Axis,
    Figure,
    Trace,
    chart,
    compact,
    line,
    points,
    rule,
    scale,
    titled,
    told,
)
from kvsim.report.pages.html import Html, document, element, join, lead, panel, placed, table
from kvsim.results.load import rates_words
from kvsim.results.metrics import Metric
from kvsim.results.numerals import MISSING, count, percent, plural, show, signed_percent
from kvsim.results.plain import plain
from kvsim.search.size import (
    LASTING,
    Answer,
    Cliff,
    Knob,
    Laboratory,
    Search,
    Tried,
    boundary,
    neighbourhood,
    slope,
)
from kvsim.search.sweep_page import Side, origin_panels, side, tags
from kvsim.settings.config import to_table
from kvsim.version import __version__

_MOST_NAMED = 6
SERVED_TOKENS = "total_token_throughput", "output_throughput"

HEAD = ("vs. answer", "seeds passing")
"""Columns of `row` between the knob and the figures."""

PAGE = "size.html"
_NEAR = 0.25
"""Share of an answer that the close view shows on either side."""
_FEW = 8
"""Widest axis of whole numbers on which each one is written."""


def verdict(lab: Laboratory, found: Answer, price: float | None = None) -> list[Remark]:
    """All remarks on a search, the answer first. `price`: of a GPU for an hour."""
    if found.kept is None:
        remarks = _nothing(lab) if found.too_short is None else [_nothing_lasts(lab, found)]
    elif lab.knob.goal == "best":
        remarks = _best(lab, found, found.kept)
    else:
        remarks = _boundary(lab, found, found.kept)
    if cost := cost_of(lab, found, price):
        remarks.append(Remark(str(cost)))
    remarks += [_cliff(lab, found, cliff) for cliff in found.cliffs]
    return [*remarks, _certainty(lab, found)]


class Cost(NamedTuple):
    """What an answer costs; amounts are in the currency of the price."""

    price: float
    """Of a GPU for an hour."""
    gpus: int
    per_million_tokens: float
    """Of prompt and output tokens together."""
    per_million_output_tokens: float

    def __str__(self) -> str:
        return (
            f"At ${self.price:.2f} per GPU hour, {plural(self.gpus, 'GPU')} cost"
            f" ${self.price * self.gpus:,.2f} an hour: ${self.per_million_tokens:.3g} per million"
            f" tokens, ${self.per_million_output_tokens:.3g} per million output tokens."
        )


def cost_of(lab: Laboratory, found: Answer, price: float | None) -> Cost | None:
    """The cost of an answer; None without one, or without a price.

    A load that is kept up with is served as fast as it is offered, apart from the last outputs.
    """
    if price is None or found.kept is None:
        return None
    gpus = _gpus(lab, found.kept)
    figures = lab.tried[found.kept].figures
    offered = lab.objectives.steady and "total_token_rate" in figures
    rates = ("total_token_rate", "output_token_rate") if offered else SERVED_TOKENS
    # The price of a second, over the tokens of a second.
    return Cost(price, gpus, *(price * gpus / 3600 / figures[rate] * 1e6 for rate in rates))


def _gpus(lab: Laboratory, value: float) -> int:
    settings = lab.settings(value, lab.seeds[0])
    replicas = settings.replicas if isinstance(settings, FleetConfig) else 1
    return replicas * settings.tensor_parallel_size * settings.pipeline_parallel_size


def written(knob: Knob, value: float) -> str:
    """A value of the knob in words."""
    if knob.unit == "requests/s":
        return f"{value:g} requests/s"
    if knob.unit == "GiB":
        return f"{value:,g} GiB"
    if knob.unit == "share":
        return f"{value:g}"
    if knob.unit == "replicas":
        return plural(round(value), "replica")
    return f"{count(value)} {knob.unit}".strip()


def slopes(lab: Laboratory, value: float) -> list[tuple[Metric, float]]:
    """How steep each bounded figure is at the answer, where that is known."""
    found = [(m, slope(lab.ascending, value, m)) for m in lab.objectives.metrics]
    return [(metric, each) for metric, each in found if each is not None]


def _nothing(lab: Laboratory) -> list[Remark]:
    knob, tried, bad = lab.knob, sorted(lab.tried), boundary(lab)[1]
    stretch = f"{knob.name} from {tried[0]:g} to {tried[-1]:g}"
    if bad is not None and any(each.meets for each in lab.tried.values()):
        requests = plural(_number(lab), "request")
        text = f"No {stretch} is sure to keep {_bounds(lab)} with {requests}."
        if knob.grows:
            end = f"below {knob.low:g}" if knob.goal == "most" else f"above {knob.high:g}"
            text += f" Set --{'from' if knob.goal == 'most' else 'to'} {end} to look further."
        return [Remark(text, "bad"), *_beyond(lab, None, bad)]
    text = f"No {stretch} keeps {_bounds(lab)}."
    value, best = min(lab.tried.items(), key=lambda each: each[1].load)
    if best.load == inf:
        why = _suffers(lab, value) or "requests were rejected"
        return [Remark(f"{text} At {value:g}: {best.reason or why}", "bad")]
    nearest = (
        f"Nearest is {written(lab.knob, value)}, with {best.load:.3g} times a limit on a seed."
    )
    return [Remark(f"{text} {nearest} {_suffers(lab, value)}".rstrip(), "bad")]


def _nothing_lasts(lab: Laboratory, found: Answer) -> Remark:
    """Values hold for the load of the search, none for the longer one."""
    most, enough = lab.knob.goal == "most", boundary(lab)[0]
    assert found.too_short is not None and enough is not None
    short, way = written(lab.knob, enough), "down" if most else "up"
    holds = f"up to {short}" if most else f"from {short} on"
    text = (
        f"No {lab.knob.name} {way} to {written(lab.knob, found.too_short)} that was tried keeps"
        f" {_bounds(lab)} with {count(found.held)} requests. With {count(len(lab.trace.rows))} they"
        f" hold {holds}."
    )
    return Remark(text, "bad")


def _best(lab: Laboratory, found: Answer, value: float) -> list[Remark]:
    key, figures = lab.knob.key, _figures(lab, value)
    text = f"Farthest from the limits of {_bounds(lab)} is {key} {written(lab.knob, value)}."
    remarks = [Remark(f"{text} {figures}")]
    if found.as_good:
        stretches = _stretches(lab, (*found.as_good, value))
        remarks.append(Remark(f"No significant difference on these seeds: {stretches}."))
    return remarks


def _boundary(lab: Laboratory, found: Answer, value: float) -> list[Remark]:
    knob, bad = lab.knob, boundary(lab)[1]
    most = knob.goal == "most"
    text = f"The {'highest' if most else 'least'} {knob.name} that keeps {_bounds(lab)}:"
    answer = written(knob, value)
    if knob.unit == "replicas" and (gpus := _gpus(lab, value)) > value:
        answer += f", {count(gpus)} GPUs in all"
    remarks = [Remark(f"{text} {answer}. {_figures(lab, value)}")]
    if bad is None:
        way = "up" if most else "down"
        text = f"All tried values keep them, {way} to {value:g}: the limit lies beyond."
        return [*remarks, Remark(text, "warning"), *_lasting(lab, found)]
    return [*remarks, *_beyond(lab, value, bad), *_lasting(lab, found)]


def _beyond(lab: Laboratory, value: float | None, bad: float) -> list[Remark]:
    """The first value that breaks the objectives, and those past it that keep them by chance."""
    met, seeds = lab.tried[bad].met, len(lab.seeds)
    held = f"hold on {met} of {plural(seeds, 'seed')}" if seeds > 1 else "do not hold"
    text = f"With {written(lab.knob, bad)}, the objectives {held}. {_suffers(lab, bad)}".rstrip()
    remarks = [Remark(text)]
    most = lab.knob.goal == "most"
    lucky = [v for v, each in lab.ascending if each.meets and (v > bad) == most]
    if lucky:
        values = ", ".join(f"{v:g}" for v in lucky[:_MOST_NAMED])
        rest = "" if value is None else ", too, but not at all values between"
        remarks.append(Remark(f"By chance they hold at {values}{rest}.", "warning"))
    return remarks


def _suffers(lab: Laboratory, value: float) -> str:
    """What the worst seed of a value suffers from; empty where it did not finish."""
    worst = max(lab.tried[value].records, key=lab.objectives.load)
    return next((remark.text for remark in diagnosis_of(worst)), "")


def _bounds(lab: Laboratory) -> str:
    return " and ".join(map(str, lab.objectives.each))


def _figures(lab: Laboratory, value: float) -> str:
    figures = lab.tried[value].figures
    listed = (f"{m.label} {show(figures.get(m.key), m.unit)}" for m in lab.objectives.metrics)
    average = " on average" if len(lab.seeds) > 1 else ""
    return f"There {', '.join(listed)}; {rates_words(figures)}{average}."


def _stretches(lab: Laboratory, values: Sequence[float]) -> str:
    """Values as few ranges of tried values: `0.005 to 0.05, 0.1`."""
    stretches: list[list[float]] = [[]]
    for value in sorted(lab.tried):
        if value in values:
            stretches[-1].append(value)
        elif stretches[-1]:
            stretches.append([])
    ends = ((each[0], each[-1]) for each in stretches if each)
    return ", ".join(f"{a:g}" if a == b else f"{a:g} to {b:g}" for a, b in ends)


def _lasting(lab: Laboratory, found: Answer) -> list[Remark]:
    """Whether the answer also holds under a longer load."""
    if lab.knob.key not in LASTING:
        return []
    number = len(lab.trace.rows)
    if not found.held:
        text = f"A load longer than its {plural(number, 'request')} was not tried."
        return [Remark(text, "warning")]
    text = f"It was found with {plural(number, 'request')}, and also holds with"
    remarks = [Remark(f"{text} {count(found.held)}.")]
    last = boundary(lab)[0]
    if last != found.value and last is not None:
        way = "Up" if lab.knob.goal == "most" else "Down"
        text = f"{way} to {written(lab.knob, last)} they hold for the shorter time only."
        remarks.append(Remark(text))
    return remarks


def _cliff(lab: Laboratory, found: Answer, cliff: Cliff) -> Remark:
    unit, knob = cliff.metric.unit, lab.knob
    moved = f"{percent(abs(cliff.step))} {'more' if cliff.step > 0 else 'less'}"
    times = f"{cliff.times:.1f} times as {'high' if cliff.figure_beyond > cliff.figure else 'low'}"
    text = (
        f"Cliff: with {written(knob, cliff.beyond)} instead of {written(knob, cliff.safe)}"
        f" ({moved}), {cliff.metric.label} is {times}: {show(cliff.figure_beyond, unit)} instead of"
        f" {show(cliff.figure, unit)}."
    )
    value = found.kept
    if value is not None and (cliff.beyond - value) * (cliff.safe - value) <= 0:
        text += " The answer is right at its edge: leave a margin."
    elif value is not None:
        text += f" The answer is {percent(abs(cliff.safe / value - 1))} away from its edge."
    return Remark(text, "warning")


def _certainty(lab: Laboratory, found: Answer) -> Remark:
    """How far the result holds for other seeds.

    The answer is the worst of the thresholds of `n` seeds. With confidence `1 - p**n`, at least a
    share `p` of other seeds has a threshold no worse.
    """
    seeds = len(lab.seeds)
    if not found.varies:
        return Remark(
            "One run is enough for this trace: nothing is drawn at random. Give --request-rate to"
            " see other arrivals, too."
        )
    if seeds == 1:
        return Remark("One seed: the influence of chance is unknown; give --seeds.", "warning")
    varies = ", ".join(found.varies)
    text = f"Every value was tried on the same {count(seeds)} seeds ({varies} differ)."
    if found.meets and lab.knob.goal != "best":
        at_least, sure = percent(LEVEL ** (1 / seeds)), percent(1 - LEVEL)
        text += f" What holds on all of them holds on at least {at_least} of all seeds, with"
        text += f" {sure} confidence."
    return Remark(text)


def row(lab: Laboratory, answer: float | None, value: float) -> list[str]:
    """One value: the knob, its distance, the seeds, the figures (means over the seeds)."""
    configuration = lab.tried[value]
    metrics = lab.objectives.metrics
    if configuration.outcome != "finished":
        figures = [configuration.outcome.replace("-", " "), *[MISSING] * (len(metrics) - 1)]
    else:
        figures = [_figure(lab, metric, answer, value) for metric in metrics]
    return [
        f"{value:g}" if lab.knob.unit == "share" else f"{value:,}",
        _distance(answer, value),
        f"{configuration.met} of {len(lab.seeds)}",
        *figures,
    ]


def _distance(answer: float | None, value: float) -> str:
    if answer is None or not answer:
        return ""
    if value == answer:
        return "answer"
    share = abs(value / answer - 1)
    text = percent(share) if share >= 0.001 else f"{100 * share:.1g} %"
    return f"{'+' if value > answer else '−'}{text}"


def _figure(lab: Laboratory, metric: Metric, answer: float | None, value: float) -> str:
    """A figure; if it is far from that of the answer, also how many times that it is."""
    figure = lab.tried[value].figures.get(metric.key)
    text = show(figure, metric.unit)
    own = None if answer is None else lab.tried[answer].figures.get(metric.key)
    if figure is None or not own or value == answer:
        return text
    times = figure / own
    return text if 0.67 < times < 1.5 else f"{text} (×{times:.{1 if times < 100 else 0}f})"


LOAD = [("request_rate", "requests/s"), ("request_throughput", "requests/s")]


def router_of(lab: Laboratory) -> str:
    """The router of a search over replicas."""
    assert isinstance(lab.base, FleetConfig)
    return lab.base.router


def router_table(
    searches: Sequence[Search], price: float | None
) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the answer of each search, what its figures are there, and what it costs."""
    first = searches[0].lab
    labels = [metric.label for metric in first.objectives.metrics]
    head = ["router", first.knob.key, *labels, "offered", "served"]
    head += ["$/M tokens"] * (price is not None)
    rows = []
    for lab, found in searches:
        shown = [(metric.key, metric.unit) for metric in lab.objectives.metrics] + LOAD
        figures = {} if found.kept is None else lab.tried[found.kept].figures
        value = "none" if found.kept is None else f"{found.kept:,.6g}"
        cost = cost_of(lab, found, price)
        costs = [f"{cost.per_million_tokens:.3g}" if cost else MISSING] * (price is not None)
        cells = (show(figures.get(key), unit) for key, unit in shown)
        rows.append([router_of(lab), value, *cells, *costs])
    return head, rows


def compared(searches: Sequence[Search]) -> Remark:
    """Which routers have the best answer."""
    knob = searches[0].lab.knob
    values = {router_of(lab): found.kept for lab, found in searches if found.kept is not None}
    if not values:
        return Remark(f"No router has a {knob.name} that keeps the objectives.", "bad")
    best = max(values.values()) if knob.goal == "most" else min(values.values())
    names = " and ".join(name for name, value in values.items() if value == best)
    word = "Highest" if knob.goal == "most" else "Least"
    return Remark(f"{word} {knob.name}: {written(knob, best)}, behind {names}.")


NAME = "size.json"


def size_record(searches: Sequence[Search], price: float | None = None) -> dict[str, Any]:
    """Searches as plain values; `price`: of a GPU for an hour. Figures are means over the seeds."""
    lab = searches[0].lab
    record: dict[str, Any] = plain(
        {
            "kvsim_version": __version__,
            "find": lab.knob.key,
            "slo": lab.objectives.text,
            "seeds": list(lab.seeds),
            "searches": [_searched(search, price) for search in searches],
        }
    )
    return record


def _searched(search: Search, price: float | None) -> dict[str, Any]:
    lab, found = search
    base, cost = lab.base, cost_of(lab, found, price)
    return {
        "router": base.router if isinstance(base, FleetConfig) else None,
        "config": to_table(base),
        "trace": {
            "name": Path(lab.trace.path).name,
            "sha256": lab.trace.sha256,
            "requests": len(lab.trace.rows),
        },
        "value": found.value,
        "meets": found.meets,
        "longer_requests": found.held or None,
        "cost": None if cost is None else cost._asdict(),
        "verdict": [remark.text for remark in verdict(lab, found, price)],
        "tried": [
            {
                "value": value,
                "outcome": configuration.outcome,
                "seeds_met": configuration.met,
                "figures": configuration.figures,
            }
            for value, configuration in lab.ascending
        ],
    }


def build_page(searches: Sequence[Search], price: float | None = None) -> str:
    """The page of a search, or of searches for several routers. `price`: of a GPU for an hour."""
    lab = searches[0].lab
    base, requests = lab.base, plural(_number(lab), "request")
    subject = base.engine, base.model, base.hardware, f"{_name(lab)}, {requests}"
    answers = [
        "none" if found.kept is None else written(lab.knob, found.kept) for _, found in searches
    ]
    if len(searches) == 1:
        remarks = verdict(*searches[0], price)
        sections = _sections(searches[0], price)
    else:
        remarks = [compared(searches)]
        sections = {"Routers": panel(None, table(*router_table(searches, price)))}
        names = [router_of(search.lab) for search in searches]
        answers = [f"{value} behind {name}" for value, name in zip(answers, names, strict=True)]
        for search, name in zip(searches, names, strict=True):
            sections |= _sections(search, price, name)
    return document(
        "kvsim size",
        f"{lab.knob.name}: {', '.join(answers)}",
        {**sections, "To repeat it": _origin(lab)},
        subject=" · ".join(str(each) for each in subject if each is not None),
        about=[tags(each.records for search in searches for each in search.lab.tried.values())],
        remarks=remarks,
    )


def _sections(search: Search, price: float | None, router: str = "") -> dict[str, Html]:
    """The sections of a search; of one of several, which `router` names, with its verdict."""
    of = f" of {router}" if router else ""
    leads = (lead(remark.text) for remark in verdict(*search, price)) if router else ()
    return {
        f"Curves{of}": join([*leads, placed(_curves(*search, router), "duo")]),
        f"Around the answer{of}": _table(*search),
    }


def _name(lab: Laboratory) -> str:
    return lab.trace.path.rpartition("/")[2]


def _number(lab: Laboratory) -> int:
    """How many requests every run sends."""
    number = len(lab.trace.rows)
    return min(number, lab.base.num_prompts or number)


def _table(lab: Laboratory, found: Answer) -> Html:
    metrics = lab.objectives.metrics
    head = [lab.knob.name, *HEAD, *(metric.label for metric in metrics)]
    rows = []
    for value, _ in neighbourhood(lab, found.value):
        cells = row(lab, found.value, value)
        rows.append([element("strong", c) if value == found.value else c for c in cells])
    steep = []
    if found.kept is not None:
        steep = [
            f"{metric.label} changes by {signed_percent(each / 100)} for each % of {lab.knob.name}"
            for metric, each in slopes(lab, found.kept)
        ]
    around = lead(f"Around the answer, {'; '.join(steep)}.") if steep else None
    return join((around, panel(None, table(head, rows))))


def _origin(lab: Laboratory) -> Html:
    origin = {
        "Trace": _name(lab),
        "Trace SHA-256": lab.trace.sha256,
        "Objectives": lab.objectives.text,
        "Values tried": count(len(lab.tried)),
        "Seeds": ", ".join(map(str, lab.seeds)),
        "kvsim": next(iter(lab.tried.values())).records[0]["kvsim_version"],
    }
    return origin_panels(origin, plain(to_table(lab.base)))


def _curves(lab: Laboratory, found: Answer, router: str) -> list[Figure]:
    """For each bounded figure, a curve of all tried values, and a closer one near an answer.

    `router`: what tells these figures from others on the page; empty if there are none.
    """
    of = f"-{router}" if router else ""
    figures = []
    for metric in lab.objectives.metrics:
        whole = [(v, each) for v, each in lab.ascending if metric.key in each.figures]
        if whole:
            title = f"{metric.label} by {lab.knob.name}"
            figures.append(_curve(lab, found, metric, whole, f"whole{of}", title))
        if (value := found.kept) is not None:
            close = [each for each in whole if abs(each[0] - value) <= _NEAR * value]
            title = f"{metric.label} near the answer"
            if len(close) > 1:
                figures.append(_curve(lab, found, metric, close, f"near{of}", title))
    return figures


def _curve(
    lab: Laboratory, found: Answer, metric: Metric, tried: Tried, name: str, title: str
) -> Figure:
    """A bounded figure by the knob: every seed as a point, the mean as a line."""
    up = side(metric, [each for _, each in tried], lab.objectives.limit(metric))
    first, last = tried[0][0], tried[-1][0]
    across = scale((first, last))
    if not across and last - first <= _FEW and all(value % 1 == 0 for value, _ in tried):
        across = {"dtick": 1}
    shapes, notes = up.limit_line("y"), []
    for cliff in found.cliffs:
        if cliff.metric.key == metric.key and first <= cliff.safe <= last:
            shapes.append(_span(cliff))
            notes.append(_times(cliff, across.get("type") == "log"))
    if found.kept is not None:
        shapes.append(rule("x", found.kept, "good", 1.4))
    note = "Dotted: the limit. Green: the answer." + (" Red: the cliff." if notes else "")
    data, x = [_seeds(tried, up), _means(tried, up)], titled(lab.knob.name, **across)
    return chart(
        *(f"{name}-{metric.key}", title, note, data, x, up.look),
        height=360,
        hovermode="closest",
        shapes=shapes,
        annotations=notes,
    )


def _seeds(tried: Tried, up: Side) -> Trace:
    places = [
        (value, record["figures"][up.metric.key] / up.per_unit)
        for value, each in tried
        for record in each.records
    ]
    x, y = [x for x, _ in places], compact(y for _, y in places)
    return points(x, y, "used", size=5, opacity=0.45) | {"name": "each seed", "hoverinfo": "skip"}


def _means(tried: Tried, up: Side) -> Trace:
    texts = [
        f"{value:,.6g}: {show(each.figures[up.metric.key], up.metric.unit)}"
        for value, each in tried
    ]
    x, y = [value for value, _ in tried], compact(up.of(each) for _, each in tried)
    marker = {"color": "var(--peak)", "size": 5}
    mean = line(x, y, "peak", "mean over the seeds", width=1.6, mode="lines+markers", marker=marker)
    return told(mean, texts)


def _span(cliff: Cliff) -> Axis:
    ends = sorted((cliff.safe, cliff.beyond))
    box = {"type": "rect", "yref": "paper", "x0": ends[0], "x1": ends[1], "y0": 0, "y1": 1}
    look = {"fillcolor": "var(--bad)", "line": {"width": 5, "color": "var(--bad)"}}
    return {**box, **look, "opacity": 0.35}


def _times(cliff: Cliff, logarithmic: bool) -> Axis:
    """How high a cliff is, written beside it."""
    middle = (cliff.safe + cliff.beyond) / 2
    return {
        # Plotly places annotations on a logarithmic axis by the exponent.
        "x": log10(middle) if logarithmic else middle,
        "y": 0.66,
        "yref": "paper",
        "text": f"<b>×{cliff.times:.1f}</b>",
        "showarrow": False,
        "xanchor": "right",
        "xshift": -6,
        "font": {"color": "var(--bad)", "size": 13},
    }
