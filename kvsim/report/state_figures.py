"""Draws the state of the engine over simulated time; all figures share one time axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsim.report.figures import (
    Entry,
    Figure,
    TimeAxis,
    Trace,
    area,
    band,
    held,
    merge,
    over_time,
    percentages,
    step_line,
    titled,
)
from kvsim.report.metrics import BLOCKED_BY
from kvsim.report.numerals import count, percent, seconds
from kvsim.report.view import View
from kvsim.schema import BLOCKED


def state_figures(run: View) -> list[Figure]:
    """Every figure of the engine's state that has something to show."""
    makers = (_gpu_blocks, _cpu_blocks, _queues, _blocked, _batch, _fragmentation)
    figures = [make(run) for make in makers]
    return [figure for figure in figures if figure is not None]


def _pool_layout(axis: TimeAxis, total: int, watermark: int) -> dict[str, Any]:
    """A y axis up to the size of the pool, with a line for the watermark."""
    look = over_time(axis, titled("GPU blocks", range=[0, total * 1.02]))
    if not watermark:
        return look
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1}
    line |= {"y0": total - watermark, "y1": total - watermark}
    line["line"] = {"color": "var(--ink)", "width": 1, "dash": "dash"}
    note = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": 1}
    note |= {"yanchor": "bottom", "showarrow": False, "font": {"size": 11}}
    note["text"] = f"dashed: watermark, {count(watermark)} blocks kept free at admission"
    return merge(look, {"shapes": [line], "annotations": [note], "margin": {"t": 22}})


def _gpu_blocks(run: View) -> Figure:
    meta, mean = run.summary["meta"], run.fine.bins.mean
    total = int(meta.get("num_gpu_blocks") or 0)
    kinds = (("used", "In use"), ("cached", "Cached, free to reuse"), ("free", "Free"))
    shown = [(k, label) for k, label in kinds if k != "cached" or mean["cached_blocks"].any()]
    data = [area(step_line(run.fine.x, held(mean[f"{k}_blocks"]), k, label)) for k, label in shown]
    legend = [Entry(label, f"var(--{k})", (i,)) for i, (k, label) in enumerate(shown)]
    _add_peak(run, "used_blocks", data, legend)
    used, most = run.summary["kv_cache_usage_mean"], run.summary["kv_cache_usage_max"]
    note = ""
    if used is not None and most is not None:
        note = (
            f"{percent(used)} of {count(total)} blocks in use on average, {percent(most)} at most."
        )
    return Figure(
        "gpu-blocks",
        "GPU block use",
        note,
        data,
        _pool_layout(run.axis, total, int(meta.get("watermark_blocks") or 0)),
        legend,
        time=True,
        height=300,
    )


def _cpu_blocks(run: View) -> Figure | None:
    if not run.fine.bins.high["cpu_used_blocks"].any():
        return None
    total = int(run.summary["meta"].get("num_cpu_blocks") or 0)
    name, mean = "Swapped out", held(run.fine.bins.mean["cpu_used_blocks"])
    data = [area(step_line(run.fine.x, mean, "swapped", name))]
    legend = [Entry(name, "var(--swapped)", (0,))]
    _add_peak(run, "cpu_used_blocks", data, legend)
    return Figure(
        "cpu-blocks",
        "CPU block use",
        f"Blocks of swapped requests, in a pool of {count(total)}.",
        data,
        over_time(run.axis, titled("CPU blocks")),
        legend,
        time=True,
        height=180,
    )


def _add_peak(run: View, column: str, data: list[Trace], legend: list[Entry]) -> None:
    """Add a thin line of peaks if the bins hide peaks of the mean."""
    if run.fine.bins.exact:
        return
    line = step_line(run.fine.x, held(run.fine.bins.high[column]), "peak", "Most within a bin")
    line["line"]["width"] = 1
    legend.append(Entry("Most within a bin", "var(--peak)", (len(data),), "line"))
    data.append(line)


def _queues(run: View) -> Figure:
    data: list[Trace] = []
    legend = []
    for name in ("running", "waiting", "swapped"):
        if name == "swapped" and not run.fine.bins.high[name].any():
            continue
        first = len(data)
        if not run.fine.bins.exact:
            data += band(
                run.fine.x, held(run.fine.bins.low[name]), held(run.fine.bins.high[name]), name
            )
        data.append(step_line(run.fine.x, held(run.fine.bins.mean[name]), name, name.capitalize()))
        traces = tuple(range(first, len(data)))
        legend.append(Entry(name.capitalize(), f"var(--{name})", traces, "line"))
    shade = "" if run.fine.bins.exact else " Shading: lowest and highest within each bin."
    return Figure(
        "queues",
        "Queue lengths",
        f"At most {count(run.summary['waiting_max'])} requests waiting and"
        f" {count(run.summary['running_max'])} running.{shade}",
        data,
        over_time(run.axis, titled("requests")),
        legend,
        time=True,
    )


def _blocked(run: View) -> Figure | None:
    causes = [c for c in BLOCKED[1:] if run.coarse.bins.high[f"blocked_{c}"].any()]
    if not causes:
        return None
    data = [
        area(
            step_line(
                run.coarse.x,
                held(100 * run.coarse.bins.mean[f"blocked_{c}"]),
                f"cause-{c}",
                BLOCKED_BY[c],
            )
        )
        for c in causes
    ]
    waits = run.summary["head_blocked_s"]
    parts = [f"{BLOCKED_BY[c]} {seconds(waits[c])}" for c in causes]
    return Figure(
        "blocked",
        "Why the head of the queue waited",
        "Share of the time that it was refused. In total: " + ", ".join(parts) + ".",
        data,
        over_time(run.axis, titled("time (%)", range=[0, 101])),
        [Entry(BLOCKED_BY[c], f"var(--cause-{c})", (i,)) for i, c in enumerate(causes)],
        time=True,
        height=200,
    )


def _batch(run: View) -> Figure:
    mean = run.coarse.bins.mean
    prompt = area(step_line(run.coarse.x, held(mean["prefill_tokens"]), "prefill", "Prompt tokens"))
    decode = area(
        step_line(run.coarse.x, held(mean["decode_seqs"]), "decode", "Decoding sequences"), "two"
    )
    decode["yaxis"] = "y2"
    look = over_time(run.axis, titled("tokens", domain=[0.55, 1], tickformat="~s"))
    look["yaxis2"] = {**look["yaxis"], **titled("sequences", domain=[0, 0.45])}
    look["yaxis2"]["title"] = {"text": "sequences", "standoff": 8}
    look["xaxis"]["anchor"] = "y2"
    return Figure(
        "batch",
        "Batch composition",
        f"What the running step computes, averaged over time; {count(run.summary['steps'])} steps.",
        [prompt, decode],
        look,
        [
            Entry("Prompt tokens computed", "var(--prefill)", (0,)),
            Entry("Decoding sequences", "var(--decode)", (1,)),
        ],
        time=True,
        height=280,
    )


def _fragmentation(run: View) -> Figure | None:
    meta, mean = run.summary["meta"], run.coarse.bins.mean
    slots = mean["used_blocks"] * int(meta.get("block_size") or 0)
    pool = np.full(len(slots), float(meta.get("num_gpu_blocks") or 0))
    lines = (
        ("empty_slots", slots, "internal", "Internal: empty slots of used blocks"),
        ("stranded_blocks", pool, "external", "External: free blocks that no admission can use"),
    )
    data: list[Trace] = []
    legend = []
    for column, whole, colour, label in lines:
        if mean[column].any():
            legend.append(Entry(label, f"var(--{colour})", (len(data),), "line"))
            data.append(
                step_line(run.coarse.x, held(percentages(mean[column], whole)), colour, label)
            )
    if not data:
        return None
    return Figure(
        "fragmentation",
        "Fragmentation",
        "Memory that is allocated or free, but cannot be used.",
        data,
        over_time(run.axis, titled("share (%)")),
        legend,
        time=True,
        height=180,
    )
