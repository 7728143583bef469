"""Writes the report of several replicas, and says why two such runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from kvsim.core.schema import CAUSES, LEG_LABELS, LEGS
from kvsim.explain.certainty import Comparison
from kvsim.fleet.figures import in_flight, of_admitted, sent_to
from kvsim.fleet.folder import FleetRun
from kvsim.report import Explanation, wording
from kvsim.report.compare import explain_requests
from kvsim.report.pages.compare import COLOURS, comparison_page, diff_page
from kvsim.report.pages.figures import (
    Figure,
    Points,
    TimeAxis,
    compact,
    ratios,
    rows_axis,
    time_axis,
    time_chart,
    titled,
)
from kvsim.report.pages.html import (
    Html,
    card,
    cards,
    document,
    element,
    id_of,
    join,
    key_of,
    lead,
    panel,
    placed,
    shares,
    table,
)
from kvsim.report.pages.latencies import distribution_figures
from kvsim.report.pages.over_time import one_axis
from kvsim.report.pages.run import figure_cards, labels, provenance_panels
from kvsim.report.pages.view import RATES, View, bin_states, lined, look_at, sums_of
from kvsim.report.wording import (
    CAUSE_WORDS,
    HITS,
    REGRET_HEAD,
    REGRETS,
    REPLICA_HEAD,
    REPLICAS,
    TRIP,
    fleet_title,
    fleet_verdict,
    regret_rows,
    replica_names,
    replica_rows,
    routing_tables,
)
from kvsim.results.numerals import MISSING, count, milliseconds, number, plural, seconds, show

MOST_LANES = 16
"""Lanes that are drawn; of more replicas, those with the most prompt tokens."""
COSTLIEST = 12
CAUSE_COLOURS = {
    "load": "waiting",
    "stale_index": "recompute",
    "index_cap": "swap",
    "tie": "swap-in",
    "no_index": "cause-slots",
}
LEG_COLOURS = (
    *("waiting", "prefill", "cause-watermark", "part-interference", "swap", "part-waiting_load"),
    *("part-waiting_step", "recompute", "decode"),
)
_LANE_PX = 190


def build_fleet(run: FleetRun) -> str:
    """The page of a run of several replicas."""
    summary = run.summary
    views = [look_at(*replica[:3]) for replica in run.replicas]
    end_ns = max(view.end_ns for view in views)
    axis, caching = time_axis(end_ns), summary["meta"]["prefix_caching"]
    lanes = one_axis(list(_lanes(run, views, axis)))
    # Nothing over time if no time passed.
    over = [*_load(run, axis), *([_found(run, axis, end_ns)] if caching else [])] if end_ns else []
    curves = [(f"replica {i}", f"run-{i}", v.durations) for i, v in enumerate(views[:COLOURS])]
    left, left_out = len(run.replicas) - MOST_LANES, None
    if left > 0:
        words = f"Drawn: the {MOST_LANES} with the most prompt tokens; {left} more have folders."
        left_out = lead(words)
    spread, key = distribution_figures(curves), key_of((colour, name) for name, colour, _ in curves)
    tables = routing_tables(summary)
    replicas = panel(None, table(*tables[REPLICAS]))
    legs = _legs(summary) if TRIP in tables else None
    sections = {
        "At a glance": _cards(run),
        "Decisions": join((lead(_DECISIONS), *_decisions(run))) if caching else None,
        "Over time": placed(one_axis(over)),
        "Replicas": join((replicas, legs, left_out, _KEY, placed(lanes if end_ns else []))),
        "Latency": join((key, placed(spread, "trio"))) if spread else None,
        "Provenance": join((lead(_FOLDERS), provenance_panels(summary["meta"]))),
    }
    return document(
        "kvsim run --replicas",
        fleet_title(summary),
        sections,
        subject=wording.subject(summary["meta"]),
        about=[labels(summary)],
        remarks=fleet_verdict(summary),
    )


_DECISIONS = (
    "What each decision chose from: the prompt tokens that an admission at that moment would have"
    " found in the engines' real caches, which no router sees. Regret: what the best eligible"
    " replica had more than the chosen one."
)
_FOLDERS = "The folder replica-0 and its neighbours hold the report of each engine."
_KEY = key_of([("running", "Running"), ("waiting", "Waiting"), ("peak", "KV cache in use")])


def _cards(run: FleetRun) -> Html:
    """The figures of a single run, and those of the router."""
    summary = run.summary
    shown = figure_cards(summary)
    if imbalance := summary["load_imbalance"]:
        words = "busiest replica over the mean, by requests in flight"
        shown.append(card("Load imbalance", f"×{number(imbalance)}", words))
    if summary["meta"]["prefix_caching"]:
        lost = show(summary["routing"]["regret_share"], "share")
        shown.append(card("Regret", lost, "of prompt tokens were cached in a better replica"))
    return cards(shown)


def _decisions(run: FleetRun) -> Iterator[Html]:
    """Regret by cause, where hits came from, and the decisions that cost most."""
    routing = run.summary["routing"]
    used = dict(CAUSE_WORDS.values())
    rows = [[name, used.get(name, ""), *rest] for name, *rest in regret_rows(routing)]
    head = [REGRET_HEAD[0], "what it means", *REGRET_HEAD[1:]]
    if rows:
        yield panel("Why the best replica was not chosen", table(head, rows, text_columns=2))
    hits = table(*routing_tables(run.summary)[HITS])
    yield panel("Where hits came from, and what others could have hit", hits)
    if costly := _costliest(run):
        head = ["request", "why", "sent at", "chosen", "cached there", "in flight", "least"]
        head += ["best", "cached there"]
        yield panel("The decisions that cost most", table(head, costly, text_columns=2))


def _costliest(run: FleetRun) -> list[list[object]]:
    """The decisions with the most regret, first the worst."""
    noted = of_admitted(run.decisions, run.requests)
    lost = noted["best_tokens"] - noted["cached_tokens"]
    order = np.argsort(-lost, kind="stable")[:COSTLIEST]
    ids, rows = run.requests["id"], list[list[object]]()
    for place in order[lost[order] > 0].tolist():
        row = {name: int(column[place]) for name, column in noted.items()}
        rows.append(
            [
                id_of(ids[row["request"]]),
                CAUSE_WORDS[CAUSES[row["cause"]]][0],
                seconds(row["time_ns"] / 1e9),
                row["replica"],
                count(row["cached_tokens"]),
                row["in_flight"],
                row["least_in_flight"],
                row["best_replica"],
                count(row["best_tokens"]),
            ]
        )
    return rows


def _legs(summary: Mapping[str, Any]) -> Html:
    """The legs of the mean request, up to its first token and up to its last one."""
    means = summary["handovers"]
    legs = [
        (colour, means[f"mean_{name.removesuffix('_ns')}_ms"] or 0.0, LEG_LABELS[name])
        for name, colour in zip(LEGS, LEG_COLOURS, strict=True)
    ]
    bars = (
        (element("h3", title), shares(parts, milliseconds))
        for title, parts in (("Mean TTFT, by leg", legs[:-1]), ("Mean E2EL, by leg", legs))
    )
    return panel(None, *(part for bar in bars for part in bar))


def _load(run: FleetRun, axis: TimeAxis) -> Iterator[Figure]:
    """Requests in flight of the busiest, the mean and the idlest replica; and of each."""
    replicas = len(run.replicas)
    instants, counts = in_flight(sent_to([each.requests for each in run.replicas]), replicas)
    bins = bin_states(
        np.append(0, instants[:-1]),
        int(instants[-1]),
        [str(replica) for replica in range(replicas)],
        lambda name, first, last: np.append(0, counts[int(name)])[first:last],
        4 * RATES,
    )
    mean = np.array(list(bins.mean.values()))
    lines = [
        (mean.max(axis=0), "waiting", "busiest"),
        (mean.mean(axis=0), "running", "mean"),
        (mean.min(axis=0), "run-0", "idlest"),
    ]
    x = axis.of(bins.edges_ns)
    data = lined(x, lines)
    note = "Requests in flight on the busiest and the idlest replica, and on average."
    yield time_chart(axis, "load", "Load of the replicas", note, data, titled("requests"))
    yield _heat(axis, x, mean, replica_names(run.summary))


def _heat(axis: TimeAxis, x: Points, mean: np.ndarray, names: Sequence[str]) -> Figure:
    """Requests in flight, a row for each replica."""
    data = {
        "type": "heatmap",
        "x": x,
        "y0": 0,
        "dy": 1,
        "z": [compact(row, 3) for row in mean],
        "colorscale": [[0, "var(--least)"], [1, "var(--most)"]],
        "showscale": False,  # A bar beside it would part its axis from those of the others.
        "hovertemplate": "%{z:.3~g} in flight<extra>%{y}</extra>",
    }
    note = f"Requests in flight on each replica: the strongest colour is {count(mean.max())}."
    height = 80 + min(14 * len(names), 320) + 26 * (len(names) < 8)
    id, title = "heat", "Replicas over time"
    # Roles behind the numbers say as much, and take the room of a title.
    y = rows_axis(names) if " " in names[0] else titled("replica", **rows_axis(names))
    return time_chart(axis, id, title, note, [data], y, keyed=False, height=height)


def _found(run: FleetRun, axis: TimeAxis, end_ns: int) -> Figure:
    """Of the prompt tokens sent at a time: cached where they went, and lost by cause."""
    noted = of_admitted(run.decisions, run.requests)
    bins = sums_of(axis, end_ns, noted["time_ns"], RATES)
    whole = bins.of(noted["input_length"])
    lost = noted["best_tokens"] - noted["cached_tokens"]
    parts: list[tuple[np.ndarray, str, str]] = [
        (noted["cached_tokens"], "cached", "Cached where it was sent")
    ]
    for code, cause in enumerate(CAUSES):
        those = np.where(noted["cause"] == code, lost, 0)
        if those.any():
            parts.append((those, CAUSE_COLOURS[cause], f"Lost: {CAUSE_WORDS[cause][0]}"))
    shares = (
        (np.nan_to_num(100 * ratios(bins.of(amounts), whole)), colour, name)
        for amounts, colour, name in parts
    )
    note = "Of the prompt tokens of requests sent at this time; the rest was in no cache."
    y = titled("prompt tokens (%)", range=[0, 101])
    data = lined(bins.x, shares, "one")
    return time_chart(axis, "found", "What decisions found", note, data, y, height=220)


def _lanes(run: FleetRun, views: Sequence[View], axis: TimeAxis) -> Iterator[Figure]:
    """A figure for each replica: its requests above, its KV cache below; all with one scale."""
    top = max(
        float((view.coarse.mean["running"] + view.coarse.mean["waiting"]).max(initial=1))
        for view in views
    )
    fullest = max(each["kv_cache_usage_max"] or 0.0 for each in run.summary["replicas"])
    full = next(share for share in (2, 5, 10, 20, 50, 100) if share >= min(100, 100 * fullest))
    sent = [each["total_input_tokens"] for each in run.summary["replicas"]]
    most = sorted(range(len(views)), key=lambda i: -sent[i])[:MOST_LANES]
    names = replica_names(run.summary)
    for i in sorted(most):
        view, each = views[i], run.summary["replicas"][i]
        mean, x = view.coarse.mean, axis.of(view.coarse.edges_ns)
        pool = int(view.summary["meta"]["num_gpu_blocks"])
        levels = [(mean[level], level, level.capitalize()) for level in ("running", "waiting")]
        [used] = lined(x, [(100 * mean["used_blocks"] / pool, "peak", "KV cache")], "two")
        data = [*lined(x, levels, "one"), {**used, "yaxis": "y2"}]
        hits = show(each["prefix_cache_hit_rate"], "share")
        note = f"{plural(each['num_requests'], 'request')}, hits {hits}, KV cache"
        note += f" {show(each['kv_cache_usage_mean'], 'share')} in use on average."
        y = titled("requests", domain=[0.46, 1], range=[0, 1.05 * top], nticks=4)
        below = titled("KV (%)", domain=[0, 0.34], range=[0, 1.01 * full], tickvals=[0, full])
        id, title = f"lane-{i}", f"Replica {names[i]}"
        yield time_chart(axis, id, title, note, data, y, yaxis2=below, keyed=False, height=_LANE_PX)


def build_diff(first: NamedFleet, other: NamedFleet) -> str:
    """The page that says why the second run differs from the first."""
    rows = replica_differences(first[1], other[1])
    routing = join(_routing_panels((first, other), (REGRETS, HITS)))
    return diff_page(
        explain_fleets(first, other),
        (first, other),
        {"Replicas": panel(None, table(REPLICA_DIFF_HEAD, rows)), "Decisions": routing},
    )


def build_comparison(fleets: Sequence[NamedFleet], comparison: Comparison | None = None) -> str:
    """The page of two fleets or more, all compared with the first; see that of engines."""
    first, *others = fleets
    parts = [_shares_of_hits(fleets), *_routing_panels(fleets, (REGRETS, REPLICAS, TRIP))]
    return comparison_page(
        fleets,
        [explain_fleets(first, other) for other in others],
        comparison,
        {"Decisions and replicas": join(parts)},
    )


def _routing_panels(fleets: Sequence[NamedFleet], titles: Sequence[str]) -> Iterator[Html]:
    """The tables with these titles, each of all runs that have it."""
    tables = [(name, routing_tables(run.summary)) for name, run in fleets]
    for title in titles:
        for name, each in tables:
            if title in each:
                yield panel(f"{name}: {title}", table(*each[title]))


def _shares_of_hits(fleets: Sequence[NamedFleet]) -> Html | None:
    """Where the prompt tokens of each run were hit; None where no run has a cache."""
    tables = [(name, routing_tables(run.summary)) for name, run in fleets]
    hits = [(name, each[HITS][1]) for name, each in tables if HITS in each]
    alike = zip(*(rows for _, rows in hits), strict=False)
    shares = ([rows[0][0], *(row[-1] for row in rows)] for rows in alike)
    head = ["prompt tokens", *(name for name, _ in hits)]
    return panel("Of the prompt tokens", table(head, shares)) if hits else None


NamedFleet = tuple[str, FleetRun]


def explain_fleets(first: NamedFleet, other: NamedFleet) -> Explanation:
    """Compare the second run with the first, request by request; the first divergent decision is
    that of a router."""
    explanation = explain_requests(first, other)
    if not explanation.waterfalls:
        return explanation
    return explanation._replace(divergence_words=_divergence_words(first, other))


def _divergence_words(first: NamedFleet, other: NamedFleet) -> list[str]:
    """Which request was the first one to go elsewhere, and how many did."""
    if first[1].handovers is not None or other[1].handovers is not None:
        return ["A prefill/decode split makes two decisions about each request; none is compared."]
    chosen = [run.requests["replica"] for _, run in (first, other)]
    # Both have the requests of one trace, one of them perhaps more.
    number = min(map(len, chosen))
    (elsewhere,) = np.nonzero(np.asarray(chosen[0][:number]) != np.asarray(chosen[1][:number]))
    if not len(elsewhere):
        return ["Both routers sent every request to the same replica."]
    times_ns = np.asarray(first[1].decisions["time_ns"])[elsewhere]
    place = int(elsewhere[np.argmin(times_ns)])
    return [
        f"{count(len(elsewhere))} of {plural(number, 'request')} went to another replica."
        f" Request {first[1].requests['id'][place]} was the first of them.",
        *(f"{name}: {_decision_words(run, place)}" for name, run in (first, other)),
    ]


def _decision_words(run: FleetRun, place: int) -> str:
    """Where a request was sent, when, and what was known there."""
    noted: dict[str, Any] = {name: int(column[place]) for name, column in run.decisions.items()}
    if noted["replica"] < 0:
        return "it was sent to nobody."
    return (
        f"at {seconds(noted['time_ns'] / 1e9)} to replica {noted['replica']} with"
        f" {plural(noted['in_flight'], 'request')} in flight (idlest replica:"
        f" {noted['least_in_flight']}) and {plural(noted['cached_tokens'], 'token')} of its"
        f" prompt cached (most: replica {noted['best_replica']}, {count(noted['best_tokens'])})."
    )


REPLICA_DIFF_HEAD = ("replica", *REPLICA_HEAD)


def replica_differences(first: FleetRun, other: FleetRun) -> list[list[str]]:
    """A row for each replica of either run, with the columns `REPLICA_DIFF_HEAD`: the figure in
    both runs, once where they are equal."""
    nothing = [MISSING] * len(REPLICA_HEAD)
    pairs = zip_longest(replica_rows(first.summary), replica_rows(other.summary), fillvalue=nothing)
    return [
        [str(i), *(a if a == b else f"{a} → {b}" for a, b in zip(*pair, strict=True))]
        for i, pair in enumerate(pairs)
    ]
