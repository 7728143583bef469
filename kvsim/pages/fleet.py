"""Writes the report of several replicas: a lane for each, decisions, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvsim.fleet.folder import FleetRun
from kvsim.fleet.routing import in_flight, of_admitted, sent_to
from kvsim.pages.distribution import distribution_figures
from kvsim.pages.document import document, placed
from kvsim.pages.figures import (
    Figure,
    Points,
    TimeAxis,
    area,
    held,
    legend_of,
    over_time,
    percentages,
    step_line,
    time_axis,
    titled,
)
from kvsim.pages.html import Html, card, cards, facts, id_of, join, key_of, lead, panel, table
from kvsim.pages.over_time import RATES, View, below_the_first, look_at, one_axis
from kvsim.pages.run import tags
from kvsim.report import binning, wording
from kvsim.report.metrics import LATENCIES
from kvsim.report.numerals import count, number, plural, seconds, show
from kvsim.report.routing import (
    CAUSE_WORDS,
    HITS_HEAD,
    LEG_HEAD,
    REGRET_HEAD,
    REPLICA_HEAD,
    fleet_title,
    fleet_verdict,
    hit_rows,
    leg_rows,
    named_rows,
    regret_rows,
    replica_names,
)
from kvsim.schema import CAUSES

MOST_LANES = 16
"""Lanes that are drawn; of more replicas, those with the most prompt tokens."""
MOST_CURVES = 8
COSTLIEST = 12
CAUSE_COLOURS = {
    "load": "waiting",
    "stale_index": "recompute",
    "index_cap": "swap",
    "tie": "swap-in",
    "no_index": "cause-slots",
}
_LANE_PX = 190


def build_fleet(run: FleetRun) -> str:
    """The page of a run of several replicas."""
    summary = run.summary
    views = [look_at(*replica[:3]) for replica in run.replicas]
    end_ns = max(view.end_ns for view in views)
    axis, caching = time_axis(end_ns), summary["meta"]["prefix_caching"]
    lanes = one_axis(list(_lanes(run, views, axis)))
    over = [_load(run, axis)] + ([_found(run, axis, end_ns)] if caching else [])
    curves = [(f"replica {i}", f"run-{i}", v.durations) for i, v in enumerate(views[:MOST_CURVES])]
    left, left_out = len(run.replicas) - MOST_LANES, None
    if left > 0:
        words = f"Drawn: the {MOST_LANES} with the most prompt tokens; {left} more have folders."
        left_out = lead(words)
    spread, key = distribution_figures(curves), key_of((colour, name) for name, colour, _ in curves)
    rows = [[f"replica {name}", *row] for name, *row in named_rows(summary)]
    replicas = panel(None, table(["", *REPLICA_HEAD], rows))
    sections = {
        "At a glance": _cards(run),
        "Decisions": join((lead(_DECISIONS), *_decisions(run))) if caching else None,
        "Over time": placed(over) if end_ns else None,
        "Replicas": join((replicas, _legs(run), left_out, _KEY, placed(lanes, "one lanes"))),
        "Latency": join((key, placed(spread, "trio"))) if spread else None,
        "To repeat it": _origin(run),
    }
    figures = [*(over + lanes if end_ns else ()), *spread]
    return document(
        "kvsim run --replicas",
        fleet_title(summary),
        sections,
        figures,
        subject=wording.subject(summary["meta"]),
        about=[tags(summary)],
        remarks=fleet_verdict(summary),
    )


_DECISIONS = (
    "What each decision chose from: the prompt tokens that an admission at that moment would have"
    " found in the engines' real caches, which no router sees. Regret: what the best eligible"
    " replica had more than the chosen one."
)
_KEY = key_of([("running", "Running"), ("waiting", "Waiting"), ("peak", "KV cache in use")])


def _cards(run: FleetRun) -> Html:
    summary, routing = run.summary, run.summary["routing"]
    shown = [
        card(
            "Throughput",
            show(summary["output_throughput"], "tokens/s"),
            f"{show(summary['request_throughput'], 'requests/s')} completed",
        ),
        *(
            card(
                f"{LATENCIES[kind]} p99",
                show(summary[f"p99_{kind}_ms"], "ms"),
                f"median {show(summary[f'p50_{kind}_ms'], 'ms')}",
            )
            for kind in ("ttft", "tpot", "e2el")
        ),
        card("Preemptions", count(summary["num_preemptions"])),
        card(
            "Load imbalance",
            "–" if summary["load_imbalance"] is None else f"×{number(summary['load_imbalance'])}",
            "busiest replica over the mean, by requests in flight",
        ),
    ]
    if summary["meta"]["prefix_caching"]:
        rate = show(summary["prefix_cache_hit_rate"], "share")
        shown.append(card("Hits", rate, "of prompt tokens, first admissions"))
        lost = show(routing["regret_share"], "share")
        shown.append(card("Regret", lost, "of prompt tokens were cached in a better replica"))
    return cards(shown)


def _legs(run: FleetRun) -> Html | None:
    """The mean time of each leg of a request in a prefill/decode split."""
    rows = leg_rows(run.summary)
    return panel("Legs of a request", table(LEG_HEAD, rows)) if rows else None


def _decisions(run: FleetRun) -> Iterator[Html]:
    """Regret by cause, where hits came from, and the decisions that cost most."""
    routing = run.summary["routing"]
    used = dict(CAUSE_WORDS.values())
    rows = [[name, used.get(name, ""), *rest] for name, *rest in regret_rows(routing)]
    head = [REGRET_HEAD[0], "what it means", *REGRET_HEAD[1:]]
    yield panel("Why the best replica was not chosen", table(head, rows, text_columns=2))
    hits = table(HITS_HEAD, hit_rows(routing))
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


def _load(run: FleetRun, axis: TimeAxis) -> Figure:
    """Requests in flight of the busiest, the mean and the idlest replica."""
    replicas = len(run.replicas)
    instants, counts = in_flight(sent_to([each.requests for each in run.replicas]), replicas)
    edges = binning.even_edges(int(instants[-1]) if len(instants) else 1, 4 * RATES)
    mean = np.array([_mean_in_bins(instants, each, edges) for each in counts])
    lines = [
        (mean.max(axis=0), "peak", "busiest"),
        (mean.mean(axis=0), "running", "mean"),
        (mean.min(axis=0), "cached", "idlest"),
    ]
    data = [step_line(axis.of(edges), held(y), colour, name) for y, colour, name in lines]
    note = "Requests that were sent and are not over, of whichever replica has most and fewest."
    look = over_time(axis, titled("requests"))
    return Figure("load", "Load of the replicas", note, data, look, legend_of(data), True, 200)


def _mean_in_bins(instants: np.ndarray, levels: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The mean of a level in each bin, which holds from each instant on until the next."""
    spans = np.diff(instants, append=instants[-1:])
    whole = np.concatenate(([0.0], np.cumsum(levels * spans.astype(float))))[:-1]
    place = np.clip(np.searchsorted(instants, edges, side="right") - 1, 0, None)
    upto = whole[place] + np.where(
        edges >= instants[0], levels[place] * (edges - instants[place]).astype(float), 0.0
    )
    means: np.ndarray = np.diff(upto) / np.diff(edges)
    return means


def _found(run: FleetRun, axis: TimeAxis, end_ns: int) -> Figure:
    """Of the prompt tokens sent at a time: cached where they went, and lost by cause."""
    noted = of_admitted(run.decisions, run.requests)
    edges = binning.even_edges(end_ns, RATES)
    whole = binning.bin_events(noted["time_ns"], noted["input_length"], edges)
    lost = noted["best_tokens"] - noted["cached_tokens"]
    parts: list[tuple[np.ndarray, str, str]] = [
        (noted["cached_tokens"], "cached", "Cached where it was sent")
    ]
    for code, cause in enumerate(CAUSES):
        those = np.where(noted["cause"] == code, lost, 0)
        if those.any():
            parts.append((those, CAUSE_COLOURS[cause], f"Lost: {CAUSE_WORDS[cause][0]}"))
    data = [
        area(step_line(axis.of(edges), _of_whole(amounts, noted, whole, edges), colour, name))
        for amounts, colour, name in parts
    ]
    note = "Of the prompt tokens of requests sent at this time; the rest was in no cache."
    look = over_time(axis, titled("prompt tokens (%)", range=[0, 101]))
    return Figure("found", "What decisions found", note, data, look, legend_of(data), True, 220)


def _of_whole(
    amounts: np.ndarray, noted: dict[str, np.ndarray], whole: np.ndarray, edges: np.ndarray
) -> Points:
    sums = binning.bin_events(noted["time_ns"], amounts, edges)
    return held(np.nan_to_num(percentages(sums, whole)))


def _lanes(run: FleetRun, views: Sequence[View], axis: TimeAxis) -> Iterator[Figure]:
    """A figure for each replica: its requests above, its KV cache below; all with one scale."""
    top = max(
        float((view.coarse.bins.mean["running"] + view.coarse.bins.mean["waiting"]).max(initial=1))
        for view in views
    )
    sent = [each["total_input_tokens"] for each in run.summary["replicas"]]
    most = sorted(range(len(views)), key=lambda i: -sent[i])[:MOST_LANES]
    names = replica_names(run.summary)
    for i in sorted(most):
        view, each = views[i], run.summary["replicas"][i]
        mean, x = view.coarse.bins.mean, axis.of(view.coarse.bins.edges_ns)
        pool = int(view.summary["meta"]["num_gpu_blocks"])
        data = [
            area(step_line(x, held(mean["running"]), "running", "Running")),
            area(step_line(x, held(mean["waiting"]), "waiting", "Waiting")),
            {
                **area(
                    step_line(x, held(100 * mean["used_blocks"] / pool), "peak", "KV cache"), "two"
                ),
                "yaxis": "y2",
            },
        ]
        hits = show(each["prefix_cache_hit_rate"], "share")
        note = f"{plural(each['num_requests'], 'request')}, hits {hits}, KV cache"
        note += f" {show(each['kv_cache_usage_mean'], 'share')} in use on average."
        y = titled("requests", domain=[0.46, 1], range=[0, 1.05 * top], nticks=4)
        look = over_time(axis, y)
        below_the_first(look, "KV (%)", [0, 0.34], range=[0, 101], tickvals=[0, 100])
        yield Figure(f"lane-{i}", f"Replica {names[i]}", note, data, look, [], True, _LANE_PX)


def _origin(run: FleetRun) -> Html:
    meta = run.summary["meta"]
    arguments = ", ".join(f"{key}={value}" for key, value in meta["router"]["args"].items())
    named = {
        "Command": meta["command"] or None,
        "Router": meta["router"]["name"],
        "Arguments": arguments or None,
        "Replicas": len(run.replicas),
        "Trace": meta["trace"]["path"],
        "Trace SHA-256": meta["trace"]["sha256"],
        "Requests": meta["trace"]["requests"],
        "Seed": meta["seed"],
        "kvsim": meta["kvsim_version"],
    }
    words = "The folder replica-0 and its neighbours hold the report of each engine."
    return join((lead(words), panel("Origin", facts(named))))
