"""Draws how latencies are distributed over requests, and what they depend on.

That is tokens to compute, turn, LoRA adapter, and the limits asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count as counting
from typing import Any

import numpy as np

from kvsim.report.pages.figures import (
    Figure,
    Trace,
    chart,
    compact,
    limit_line,
    line,
    points,
    room_for,
    rows_axis,
    scale,
    thinned,
    time_unit,
    titled,
)
from kvsim.report.pages.view import BARS, DOTS, View, lined
from kvsim.results.metrics import LATENCIES
from kvsim.results.numerals import SPACE, count, percent, seconds
from kvsim.results.statistics import Floats, defined, ints, percentiles, ratio
from kvsim.results.summary import good_requests

POINTS = 400
MARKED = (50, 90, 99)
KINDS = {
    "ttft": "From arrival to the first token.",
    "tpot": "Mean gap between the tokens of a request.",
    "e2el": "From arrival to the last token.",
}
"""Latency → what it is."""


def distribution_figures(
    runs: Sequence[tuple[str, str, Mapping[str, Floats]]],
    *,
    goals: Mapping[str, float] | None = None,
) -> list[Figure]:
    """One figure per latency: the share of requests whose latency is at most the value on the axis.

    Each run is (name, colour, durations in ns as returned by `durations_ns`). `goals`:
    limits in ms, drawn as lines. Percentiles of a single run are marked and written out. Latencies
    that no run has are left out.
    """
    figures = (_figure(kind, runs, (goals or {}).get(kind)) for kind in KINDS)
    return [figure for figure in figures if figure is not None]


def curve(values: Floats, colour: str, name: str) -> Trace:
    """The empirical distribution, thinned out to `POINTS` ranks if there are more."""
    ordered, picked = np.sort(values), thinned(len(values), POINTS)
    x, y = compact(ordered[picked]), compact(100 * (picked + 1) / len(ordered))
    return line(x, y, colour, name, shape="hv", hovertemplate="%{y:.1f} %")


def _figure(
    kind: str, runs: Sequence[tuple[str, str, Mapping[str, Floats]]], limit_ms: float | None
) -> Figure | None:
    samples = [
        (name, colour, values)
        for name, colour, durations in runs
        if len(values := defined(durations[kind]) / 1e9)
    ]
    if not samples:
        return None
    everything = np.concatenate([values for *_, values in samples])
    unit, ns = time_unit([1e9 * percentiles(everything, (99,))[0]])
    per_s = 1e9 / ns
    data = [curve(values * per_s, colour, name) for name, colour, values in samples]
    note = KINDS[kind]
    if len(runs) == 1:
        cuts = np.array(percentiles(everything, MARKED))
        named = (f"p{p}{SPACE}{seconds(cut)}" for p, cut in zip(MARKED, cuts, strict=True))
        note = f"{note} {', '.join(named)}."
        data.append(_marks(cuts * per_s, samples[0][1]))
    # The bulk decides on the axis: one request that takes very long would make any axis wide.
    low, high = percentiles(everything, (10, 90))
    wide = low > 0 and high / low > 15
    x = titled(
        f"{LATENCIES[kind]} ({unit})",
        showgrid=True,
        unifiedhovertitle={"text": f"%{{x:.4~g}} {unit}"},
        **((scale(everything * per_s, wide=15) if wide else {}) or {"nticks": 6}),
    )
    y = titled("requests (%)", range=[0, 103], dtick=25)
    shapes = [] if limit_ms is None else [limit_line("x", limit_ms / 1e3 * per_s)]
    id, title = f"dist-{kind}", LATENCIES[kind]
    return chart(id, title, note, data, x, y, keyed=False, height=260, shapes=shapes)


def _marks(cuts: Floats, colour: str) -> Trace:
    return points(compact(cuts), MARKED, colour, size=7, opacity=1) | {
        "mode": "markers+text",
        "text": [f"p{p}" for p in MARKED],
        "textposition": "bottom right",
        "cliponaxis": False,
        "textfont": {"size": 11, "color": "var(--ink)"},
        "hoverinfo": "skip",
    }


MOST_STACKED, MOST_LISTED = 5, 20
"""Most adapters with a colour of their own, and with a row."""
LONGEST = 24
"""Letters of a name that are written."""


def adapters(run: View) -> dict[str, np.ndarray]:
    """Which requests name which adapter, the one with most requests first; empty where the server
    has no adapters. Requests without one are those of the `base model`."""
    named = np.asarray(run.requests.get("lora", ()))
    if not (run.summary["meta"]["config"].get("enable_lora") and (named != "").any()):
        return {}
    names, numbers = np.unique(named, return_counts=True)
    order = np.argsort(-numbers, kind="stable")
    return {str(names[i]) or "base model": named == names[i] for i in order}


def waiting_by_adapter(run: View) -> Iterator[Figure]:
    """Requests in the queue over time, by adapter."""
    those = adapters(run)
    if not those:
        return
    sent, begun = (ints(run.requests[name]) for name in ("arrival_ns", "first_scheduled_ns"))
    begun = np.where(begun < 0, run.end_ns, begun)
    bins = run.sums(sent, BARS)
    edges = bins.edges_ns
    waits = {
        name: np.diff(_elapsed(sent[of], edges) - _elapsed(begun[of], edges)) / np.diff(edges)
        for name, of in those.items()
    }
    ranked = sorted(waits, key=lambda name: -waits[name].sum())
    parts = [
        (waits[name], f"run-{i}", _short(name)) for i, name in enumerate(ranked[:MOST_STACKED], 1)
    ]
    if others := ranked[MOST_STACKED:]:
        rest = np.sum([waits[name] for name in others], axis=0)
        parts.append((rest, "other", f"{count(len(others))} others"))
    most = run.summary["meta"]["config"].get("max_loras") or 1
    note = f"Requests before their first step; at most {count(most)} adapters run together."
    if "waiting_loras_ns" in run.requests:
        lost = seconds(ints(run.requests["waiting_loras_ns"]).sum() / 1e9)
        note += f" In all, requests waited {lost} for a place of their adapter."
    drawn, y = lined(bins.x, parts, "one"), titled("requests")
    yield run.figure("adapters", "Queue by adapter", note, drawn, y)


def _elapsed(instants: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The time that has passed since each of these instants, summed over those before `at`."""
    ordered = np.sort(instants).astype(float)
    before = np.searchsorted(ordered, at)
    sums: np.ndarray = before * at - np.append(0, np.cumsum(ordered))[before]
    return sums


def ttft_by_adapter(run: View) -> Iterator[Figure]:
    """TTFT p50 and p99 of each adapter's requests, the slowest first."""
    ttft, found = run.durations["ttft"], list[tuple[float, float, str]]()
    for name, of in adapters(run).items():
        if (values := defined(ttft[of])).size:
            p50, p99 = percentiles(values, (50, 99))
            found.append((p99, p50, f"{_short(name)} ({count(values.size)})"))
    if not found:
        return
    found = sorted(found, reverse=True)[:MOST_LISTED]
    unit, ns = time_unit([found[0][0]])
    drawn = [
        line(compact((p50 / ns, p99 / ns)), [i, i], "rule", width=3)
        for i, (p99, p50, _) in enumerate(found)
    ]
    ends = compact(p50 / ns for _, p50, _ in found), compact(p99 / ns for p99, *_ in found)
    for x, colour, label in zip(ends, ("running", "peak"), ("p50", "p99"), strict=True):
        dots = points(x, list(range(len(found))), colour, size=9, opacity=1)
        drawn.append(dots | {"name": label, "hovertemplate": "%{x:.3~g}"})
    across = titled(f"TTFT ({unit})", showgrid=True, **scale(np.array(ends, float)))
    labels = [label for *_, label in found]
    note = "In brackets: requests with a first token."
    if len(found) == MOST_LISTED:
        note += f" The {MOST_LISTED} slowest adapters."
    further: dict[str, Any] = {"hovermode": "closest", "height": max(280, 70 + 24 * len(found))}
    further["margin"] = room_for(labels)
    id, title = "ttft-adapter", "TTFT by adapter"
    yield chart(id, title, note, drawn, across, rows_axis(labels), **further)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


MOST_TURNS, LEAST_OF_A_TURN = 30, 5
"""Turns that are drawn, and requests that a turn needs for its percentiles."""


def cause_figures(run: View) -> list[Figure]:
    """TTFT by what had to be computed, by turn and by adapter; goodput by how strict its limits
    are."""
    makers = (_by_tokens, _by_turn, ttft_by_adapter, _by_strictness)
    return [figure for make in makers for figure in make(run)]


def _by_tokens(run: View) -> Iterator[Figure]:
    ttft = run.durations["ttft"]
    known = np.flatnonzero(~np.isnan(ttft))
    if len(known) < 2:
        return
    cached = ints(run.requests["num_cached_tokens"])
    tokens = np.maximum(ints(run.requests["input_length"]) - cached, 1)
    if not np.ptp(tokens[known]):
        return
    unit, ns = time_unit(ttft[known])
    shown = known[thinned(len(known), DOTS)]
    x, y = compact(tokens[shown]), compact(ttft[shown] / ns)
    drawn = [points(x, y, "running", size=4, opacity=0.5) | {"name": "Request"}]
    note = "Prompt tokens that no cache had at the first admission. Dots far above the lowest edge"
    note += " waited in the queue."
    across = titled("prompt tokens to compute", showgrid=True, **scale(tokens[known]))
    up = titled(f"TTFT ({unit})", **scale(ttft[known] / ns))
    further: dict[str, Any] = {"keyed": False, "height": 280, "hovermode": "closest"}
    id, title = "ttft-tokens", "TTFT by tokens to compute"
    yield chart(id, title, note, drawn, across, up, **further)


def _by_turn(run: View) -> Iterator[Figure]:
    turns = turns_of(run.requests["session"])
    there = ~np.isnan(run.durations["ttft"]) & (turns > 0)
    if not (turns[there] > 1).any():
        return
    ttft = run.durations["ttft"]
    unit, ns = time_unit(ttft[there])
    rows = []
    for turn in range(1, min(int(turns[there].max()), MOST_TURNS) + 1):
        values = ttft[there & (turns == turn)] / ns
        if len(values) >= LEAST_OF_A_TURN:
            rows.append([turn, *percentiles(values, (50, 99))])
    if len(rows) < 2:
        return
    x, p50, p99 = zip(*rows, strict=True)
    drawn = [
        line(x, compact(each), colour, label, mode="lines+markers", marker={"size": 5})
        for each, colour, label in ((p50, "running", "p50"), (p99, "peak", "p99"))
    ]
    note = f"Turns of a session that at least {LEAST_OF_A_TURN} requests reached."
    across = titled("turn", showgrid=True, **({"dtick": 1} if len(rows) < 15 else {}))
    up = titled(f"TTFT ({unit})", **scale([*p50, *p99], 50))
    yield chart("ttft-turn", "TTFT by turn", note, drawn, across, up, height=280)


def turns_of(sessions: Any) -> np.ndarray:
    """Which turn of its session each request is, from 1; 0 for those without a session."""
    next_of: dict[str, Iterator[int]] = {}
    return np.array(
        [next(next_of.setdefault(each, counting(1))) if each else 0 for each in sessions], int
    )


def _by_strictness(run: View) -> Iterator[Figure]:
    """Which share of the completed requests is within all limits, were they looser or stricter."""
    goals = run.summary["meta"].get("goodput") or {}
    completed = run.summary["completed"]
    if not goals or not completed:
        return
    factors = np.geomspace(0.1, 10, 81)
    kept = []
    for factor in factors.tolist():
        good = good_requests(run.durations, {kind: ms * factor for kind, ms in goals.items()})
        assert good is not None
        kept.append(100 * int(good.sum()) / completed)
    share = ratio(run.summary["request_goodput"], run.summary["request_throughput"]) or 0.0
    note = "Completed requests within all limits, were these so many times as long;"
    note += f" {percent(share)} at 1. Steep at 1: a little tuning changes much."
    drawn = [line(compact(factors), compact(kept), "good", "Within all limits")]
    across = titled("multiple of the limits", showgrid=True, **scale(factors))
    up = titled("requests (%)", range=[0, 103])
    further: dict[str, Any] = {"keyed": False, "height": 280, "shapes": [limit_line("x", 1.0)]}
    id, title = "goodput-limits", "Goodput by limits"
    yield chart(id, title, note, drawn, across, up, **further)
