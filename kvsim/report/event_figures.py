"""Draws the events of steps, summed over short times; all figures share one time axis."""

from __future__ import annotations

import numpy as np

from kvsim.report import binning
from kvsim.report.figures import (
    Entry,
    Figure,
    Trace,
    bars,
    compact,
    held,
    over_time,
    percentages,
    step_line,
    titled,
)
from kvsim.report.numerals import seconds
from kvsim.report.view import View

EVENT_BINS = 200
"""Number of bars: fewer than bins of states, because a bar needs some pixels."""


def event_figures(run: View) -> list[Figure]:
    """Every figure of events that has something to show."""
    figures = [make(run) for make in (_preemptions, _swaps, _hit_rate)]
    return [figure for figure in figures if figure is not None]


def _preemptions(run: View) -> Figure | None:
    if not run.summary["num_preemptions"]:
        return None
    return _event_bars(
        run,
        "preemptions",
        "Preemptions",
        "Requests that lost their blocks, per bar.",
        "requests",
        [
            ("preempted_recompute", 1, "recompute", "Recompute"),
            ("preempted_swap", 1, "swap", "Swap"),
        ],
    )


def _swaps(run: View) -> Figure | None:
    if not run.summary["swapped_out_blocks"] and not run.summary["swapped_in_blocks"]:
        return None
    return _event_bars(
        run,
        "swaps",
        "Swapped blocks",
        "Blocks copied to the CPU (down) and back to the GPU (up), per bar.",
        "blocks",
        [
            ("swap_in_blocks", 1, "swap-in", "Swapped in"),
            ("swap_out_blocks", -1, "swap", "Swapped out"),
        ],
    )


def _event_bars(
    run: View,
    id: str,
    title: str,
    note: str,
    unit: str,
    kinds: list[tuple[str, int, str, str]],
) -> Figure:
    edges = binning.even_edges(run.end_ns, EVENT_BINS)
    x = run.axis.of(edges)[:-1]
    width = float((edges[1] - edges[0]) / run.axis.ns)
    data: list[Trace] = []
    legend = []
    highest = 0
    for column, sign, colour, label in kinds:
        if run.steps[column].any():
            sums = binning.bin_events(run.steps["start_ns"], run.steps[column], edges)
            highest = max(highest, int(sums.max()))
            legend.append(Entry(label, f"var(--{colour})", (len(data),)))
            data.append(bars(x, compact(sign * sums), width, colour, label))
    whole = {"dtick": 1} if highest < 5 else {}
    return Figure(
        id,
        title,
        f"{note} A bar is {seconds(width * run.axis.ns / 1e9)} wide.",
        data,
        over_time(run.axis, titled(unit, **whole), barmode="relative", bargap=0),
        legend,
        time=True,
        height=180,
    )


def _hit_rate(run: View) -> Figure | None:
    if not run.summary["meta"].get("prefix_caching"):
        return None
    edges = binning.even_edges(run.end_ns, EVENT_BINS)
    start = run.steps["start_ns"]
    hits = binning.bin_events(start, run.steps["cached_tokens"], edges)
    asked = hits + binning.bin_events(start, run.steps["prefill_tokens"], edges)
    x = run.axis.of(edges)
    width = float((edges[1] - edges[0]) / run.axis.ns)
    so_far = percentages(np.cumsum(hits), np.cumsum(asked))
    data = [
        bars(x[:-1], compact(percentages(hits, asked)), width, "cached", "In each bar"),
        step_line(x, held(so_far), "ink", "Since the start"),
    ]
    return Figure(
        "hit-rate",
        "Prefix cache hit rate",
        "Share of scheduled prompt tokens whose computation a hit saved, re-admissions included.",
        data,
        over_time(run.axis, titled("tokens (%)"), bargap=0),
        [
            Entry("In each bar", "var(--cached)", (0,)),
            Entry("Since the start", "var(--ink)", (1,), "line"),
        ],
        time=True,
        height=200,
    )
