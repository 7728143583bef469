"""Draws what the latencies of requests depend on: tokens to compute, turn, and the limits asked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as counting
from typing import Any

import numpy as np

from kvsim.report.pages.adapters import ttft_by_adapter
from kvsim.report.pages.figures import (
    Figure,
    chart,
    compact,
    limit_line,
    line,
    points,
    scale,
    thinned,
    time_unit,
    titled,
)
from kvsim.report.pages.view import DOTS, View
from kvsim.results.numerals import percent
from kvsim.results.phases import ints
from kvsim.results.statistics import percentiles, ratio
from kvsim.results.summary import good_requests

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
    across = titled("turn", showgrid=True)
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
    note = (
        f"Completed requests within all limits, were these so many times as long; {percent(share)}"
    )
    note += " at 1. Steep at 1: a little tuning changes much."
    drawn = [line(compact(factors), compact(kept), "good", "Within all limits")]
    across = titled("limits times", showgrid=True, **scale(factors))
    up = titled("requests (%)", range=[0, 103])
    further: dict[str, Any] = {"keyed": False, "height": 280, "shapes": [limit_line("x", 1.0)]}
    id, title = "goodput-limits", "Goodput by limits"
    yield chart(id, title, note, drawn, across, up, **further)
