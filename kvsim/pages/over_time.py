"""Draws a run over simulated time, from what was sent to what memory held; all share one axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.pages.figures import (
    Axis,
    Entry,
    Figure,
    Points,
    TimeAxis,
    Trace,
    area,
    band,
    bars,
    compact,
    held,
    legend_of,
    line,
    merge,
    over_time,
    percentages,
    points,
    rule,
    scale,
    step_line,
    thinned,
    time_axis,
    time_unit,
    titled,
)
from kvsim.report import binning, phases, timeline
from kvsim.report.binning import Bins, Floats, Ints
from kvsim.report.metrics import BLOCKED_BY, LATENCIES
from kvsim.report.numerals import count, milliseconds, percent, seconds
from kvsim.report.statistics import percentiles
from kvsim.report.summary import good_requests
from kvsim.schema import BLOCKED, SGLANG_COLUMNS

FINE, COARSE, BARS = 1500, 240, 200
"""Numbers of bins: for levels, which are drawn as lines; for averages, which must not flicker; for
events, because a bar needs some pixels."""
RATES = 80
"""Number of bins of rates and percentiles, which need some requests each."""
DOTS = 1500
"""Most requests that are drawn one by one."""

LEVELS = (
    *("used_blocks", "cached_blocks", "free_blocks", "cpu_used_blocks"),
    *("waiting", "running", "swapped"),
)
AVERAGES = (
    *("prefill_tokens", "decode_seqs", "used_blocks", "empty_slots", "stranded_blocks"),
    *("waiting", "running"),
)
"""Columns of `timeline.States` for the fine and for the coarse bins."""


class Cut(NamedTuple):
    """A time line in bins."""

    x: Points
    """Edges in the unit of the time axis."""
    bins: Bins
    """Columns: `LEVELS` and those that SGLang alone has; or `AVERAGES` and `blocked_CAUSE`, the
    share of time with this cause."""


class View(NamedTuple):
    """A run, ready to be drawn."""

    summary: Mapping[str, Any]
    requests: Mapping[str, Any]
    steps: Mapping[str, Ints]
    durations: Mapping[str, phases.Floats]
    """Durations of each request in ns, as returned by `phases.durations_ns`."""
    end_ns: int
    axis: TimeAxis
    fine: Cut
    coarse: Cut


def look_at(
    summary: Mapping[str, Any], requests: Mapping[str, Any], steps: Mapping[str, Ints]
) -> View:
    """Cut a run into at most `FINE` and at most `COARSE` bins."""
    end_ns = timeline.run_end_ns(steps, requests)
    axis = time_axis(end_ns)
    rows = timeline.States(steps, end_ns, summary["meta"])
    causes = {f"blocked_{name}": i for i, name in enumerate(BLOCKED) if i}

    def part(name: str, first: int, last: int) -> Ints:
        if name not in causes:
            return rows.part(name, first, last)
        blocked = rows.part("blocked", first, last)
        return np.where(blocked == causes[name], 1, 0)

    def cut(names: Sequence[str], limit: int) -> Cut:
        bins = binning.bin_states(rows["start_ns"], end_ns, names, part, limit)
        return Cut(axis.of(bins.edges_ns), bins)

    own = [name for name in SGLANG_COLUMNS if name in steps]
    fine, coarse = cut((*LEVELS, *own), FINE), cut((*AVERAGES, *causes), COARSE)
    durations = phases.durations_ns(requests)
    return View(summary, requests, steps, durations, end_ns, axis, fine, coarse)


def time_figures(run: View) -> list[Figure]:
    """Every figure over time that has something to show, from cause to effect."""
    if not run.end_ns or not len(run.steps["start_ns"]):
        return []
    makers = (
        *(_rates, _tokens, _ttft, _itl, _queues, _blocked, _gpu_blocks, _cpu_blocks),
        *(_preemptions, _new_token_ratio, _swaps, _batch, _hit_rate, _fragmentation),
    )
    return one_axis([figure for make in makers for figure in make(run)])


def one_axis(figures: Sequence[Figure]) -> list[Figure]:
    """Figures below each other whose one time axis has its name below the last one."""
    bare = {"xaxis": {"title": {"text": ""}}, "margin": {"b": 26}}
    return [
        *(f._replace(layout=merge(f.layout, bare), height=f.height - 14) for f in figures[:-1]),
        *figures[-1:],
    ]


def _figure(
    run: View,
    id: str,
    title: str,
    note: str,
    y: Axis,
    data: list[Trace],
    height: int = 200,
    **further: Any,
) -> Figure:
    """A figure over time, with all its traces in the legend."""
    look = over_time(run.axis, y, **further)
    return Figure(id, title, note, data, look, legend_of(data), time=True, height=height)


def _lined(x: Points, named: Iterable[tuple[Points, str, str]], stack: str = "") -> list[Trace]:
    """Lines of (heights, colour, label), or stacked areas."""
    lines = (step_line(x, y, colour, label) for y, colour, label in named)
    return [area(trace, stack) if stack else trace for trace in lines]


def _per_second(run: View, instants_ns: Any, amounts: Any = None) -> Points:
    """Events per second in `RATES` bins."""
    edges = binning.even_edges(run.end_ns, RATES)
    instants = np.asarray(instants_ns, dtype=np.int64)
    weights = np.ones(len(instants), np.int64) if amounts is None else amounts
    happened = instants >= 0
    sums = binning.bin_events(instants[happened], weights[happened], edges)
    return held(sums / np.diff(edges) * 1e9)


def _rate_edges(run: View) -> Points:
    return run.axis.of(binning.even_edges(run.end_ns, RATES))


def _rates(run: View) -> Iterator[Figure]:
    done = phases.completed(run.requests)
    finish = np.where(done, np.asarray(run.requests["finish_ns"]), -1)
    lines = [
        (_per_second(run, run.requests["arrival_ns"]), "waiting", "Offered"),
        (_per_second(run, finish), "running", "Completed"),
    ]
    goals = run.summary["meta"].get("goodput")
    note = f"{_number(run.summary['request_throughput'])} completed per second over the whole run"
    good = good_requests(run.durations, goals)
    if good is not None:
        kept = _per_second(run, np.where(good, finish, -1))
        lines.append((kept, "good", "Completed within all limits"))
        note += f", {_number(run.summary['request_goodput'])} within {limits_words(goals)}"
    drawn = _lined(_rate_edges(run), lines)
    yield _figure(run, "rates", "Offered and served", f"{note}.", titled("requests/s"), drawn)


def limits_words(goals: Mapping[str, float]) -> str:
    """`TTFT ≤ 2.00 s, TPOT ≤ 60.0 ms`."""
    return ", ".join(f"{LATENCIES[kind]} ≤ {milliseconds(ms)}" for kind, ms in goals.items())


def _tokens(run: View) -> Iterator[Figure]:
    starts = run.steps["start_ns"]
    lines = [
        (_per_second(run, starts, run.steps[column]), colour, label)
        for column, colour, label in (
            ("prefill_tokens", "prefill", "Prompt"),
            ("decode_seqs", "decode", "Decode"),
        )
    ]
    note = f"Tokens computed per second; {_number(run.summary['output_throughput'])} of output"
    note += " per second over the whole run."
    y = titled("tokens/s", tickformat="~s")
    yield _figure(run, "tokens", "Tokens", note, y, _lined(_rate_edges(run), lines))


def _ttft(run: View) -> Iterator[Figure]:
    """Each request where it arrived, and the percentiles of those that arrived together."""
    ttft, arrival = run.durations["ttft"], np.asarray(run.requests["arrival_ns"])
    (known,) = np.nonzero(~np.isnan(ttft))
    if not len(known):
        return
    unit, ns = time_unit(ttft[known])
    edges = binning.even_edges(run.end_ns, RATES)
    place = np.clip(np.searchsorted(edges, arrival[known], side="right") - 1, 0, len(edges) - 2)
    cuts = np.full((2, len(edges) - 1), np.nan)
    together = ttft[known][np.argsort(place, kind="stable")]
    ends = np.cumsum(np.bincount(place, minlength=len(edges) - 1))
    for i, some in enumerate(np.split(together, ends[:-1])):
        if len(some):
            cuts[:, i] = np.array(percentiles(some, (50, 99))) / ns
    shown = known[thinned(len(known), DOTS)]
    dots = points(run.axis.of(arrival[shown]), compact(ttft[shown] / ns), "running", size=4)
    dots |= {"name": "Request", "opacity": 0.5, "customdata": shown.tolist()}
    dots["hoverinfo"] = "skip"
    lines = [(held(cuts[0]), "running", "p50"), (held(cuts[1]), "peak", "p99")]
    drawn = [dots, *_lined(run.axis.of(edges), lines)]
    note = "Of the requests that arrived at this time. Click a request to see its story."
    note += _limit_words(run, "ttft")
    y, shapes = (
        titled(f"TTFT ({unit})", **scale(ttft[known] / ns, 50)),
        _limit_lines(run, "ttft", ns),
    )
    yield _figure(run, "ttft", "TTFT", note, y, drawn, 240, shapes=shapes)


def _itl(run: View) -> Iterator[Figure]:
    """The gaps between the ends of steps that decode, as running requests see them."""
    ends, decodes = run.steps["end_ns"], run.steps["decode_seqs"]
    (later,) = np.nonzero((decodes[1:] > 0) & (run.steps["running"][:-1] > 0))
    if not len(later):
        return
    gaps, weights = (ends[later + 1] - ends[later]).astype(float), decodes[later + 1]
    unit, ns = time_unit(gaps)
    edges = binning.even_edges(run.end_ns, RATES)
    place = np.clip(np.searchsorted(edges, ends[later + 1], side="right") - 1, 0, len(edges) - 2)
    sums, whole, most = np.zeros((3, len(edges) - 1))
    np.add.at(sums, place, gaps * weights)
    np.add.at(whole, place, weights)
    np.maximum.at(most, place, gaps)
    mean = np.divide(sums, whole, out=np.full(len(sums), np.nan), where=whole > 0) / ns
    lines = [
        (held(mean), "decode", "Mean over tokens"),
        (held(np.where(whole > 0, most / ns, np.nan)), "peak", "Longest"),
    ]
    y, shapes = titled(f"ITL ({unit})", **scale(gaps / ns, 50)), _limit_lines(run, "tpot", ns)
    note = "Gaps between the tokens of running requests; waits after a preemption do not count."
    note += _limit_words(run, "tpot")
    drawn = _lined(run.axis.of(edges), lines)
    yield _figure(run, "itl", "ITL", note, y, drawn, shapes=shapes)


def _limit_lines(run: View, kind: str, ns: float) -> list[Axis]:
    """The limit of a latency as a line, on an axis whose unit has `ns` nanoseconds."""
    goals = run.summary["meta"].get("goodput") or {}
    return [rule("y", goals[kind] * 1e6 / ns, "bad", 1.2, "dot")] if kind in goals else []


def _limit_words(run: View, kind: str) -> str:
    goals = run.summary["meta"].get("goodput") or {}
    return f" Dotted: the limit, {limits_words({kind: goals[kind]})}." if kind in goals else ""


def _queues(run: View) -> Iterator[Figure]:
    data: list[Trace] = []
    legend = []
    bins = run.fine.bins
    for name in ("running", "waiting", "swapped"):
        if name == "swapped" and not bins.high[name].any():
            continue
        first = len(data)
        if not bins.exact:
            data += band(run.fine.x, held(bins.low[name]), held(bins.high[name]), name)
        data.append(step_line(run.fine.x, held(bins.mean[name]), name, name.capitalize()))
        traces = tuple(range(first, len(data)))
        legend.append(Entry(name.capitalize(), name, traces, "line"))
    shade = "" if bins.exact else " Shading: lowest and highest within each bin."
    note = f"At most {count(run.summary['waiting_max'])} requests waiting and"
    note += f" {count(run.summary['running_max'])} running.{shade}"
    look = over_time(run.axis, titled("requests"))
    yield Figure("queues", "Queue lengths", note, data, look, legend, time=True)


def _blocked(run: View) -> Iterator[Figure]:
    causes = [c for c in BLOCKED[1:] if run.coarse.bins.high[f"blocked_{c}"].any()]
    if not causes:
        return
    shares = (
        (held(100 * run.coarse.bins.mean[f"blocked_{c}"]), f"cause-{c}", BLOCKED_BY[c])
        for c in causes
    )
    waits = run.summary["head_blocked_s"]
    parts = ", ".join(f"{BLOCKED_BY[c]} {seconds(waits[c])}" for c in causes)
    note = f"Share of the time that it was refused. In total: {parts}."
    drawn, y = _lined(run.coarse.x, shares, "one"), titled("time (%)", range=[0, 101])
    yield _figure(run, "blocked", "Why the head of the queue waited", note, y, drawn)


def _gpu_blocks(run: View) -> Iterator[Figure]:
    meta, mean = run.summary["meta"], run.fine.bins.mean
    total, kept_free = (int(meta.get(k) or 0) for k in ("num_gpu_blocks", "watermark_blocks"))
    parts = [
        (mean["used_blocks"], "used", "In use"),
        (mean["cached_blocks"], "cached", "Cached, free to reuse"),
        (mean["free_blocks"], "free", "Free"),
    ]
    if "protected_blocks" in mean:
        protected = mean["protected_blocks"]
        parts[:2] = [
            (protected, "used", "Protected: in the radix tree, in use"),
            (mean["used_blocks"] - protected, "internal", "Private to a request"),
            (mean["cached_blocks"], "cached", "Evictable: in the radix tree, free to reuse"),
        ]
    shown = (
        (held(heights), colour, label)
        for heights, colour, label in parts
        if colour in ("used", "free") or heights.any()
    )
    drawn = [*_lined(run.fine.x, shown, "one"), *_peak(run, "used_blocks")]
    used, most = run.summary["kv_cache_usage_mean"], run.summary["kv_cache_usage_max"]
    note = ""
    if used is not None and most is not None:
        note = f"{percent(used)} of {count(total)} blocks in use on average, {percent(most)} at"
        note += " most."
    further: dict[str, Any] = {}
    if kept_free:
        note += f" Dashed: the watermark, {count(kept_free)} blocks kept free at admission."
        further["shapes"] = [rule("y", total - kept_free, dash="dash")]
    y = titled("GPU blocks", range=[0, total * 1.02])
    yield _figure(run, "gpu-blocks", "GPU block use", note, y, drawn, 300, **further)


def _cpu_blocks(run: View) -> Iterator[Figure]:
    if not run.fine.bins.high["cpu_used_blocks"].any():
        return
    mean = held(run.fine.bins.mean["cpu_used_blocks"])
    swapped = _lined(run.fine.x, [(mean, "swapped", "Swapped out")], "one")
    total = count(run.summary["meta"].get("num_cpu_blocks") or 0)
    note = f"Blocks of swapped requests, in a pool of {total}."
    drawn = [*swapped, *_peak(run, "cpu_used_blocks")]
    yield _figure(run, "cpu-blocks", "CPU block use", note, titled("CPU blocks"), drawn)


def _peak(run: View, column: str) -> list[Trace]:
    """A thin line of peaks if the bins hide peaks of the mean."""
    if run.fine.bins.exact:
        return []
    high = held(run.fine.bins.high[column])
    return [line(run.fine.x, high, "peak", "Most within a bin", shape="hv", width=1)]


def _preemptions(run: View) -> Iterator[Figure]:
    kinds = [
        ("preempted_recompute", 1, "recompute", "Recompute"),
        ("preempted_swap", 1, "swap", "Swap"),
    ]
    note = "Requests that lost their blocks, per bar."
    yield from _event_bars(run, "preemptions", "Preemptions", note, "requests", kinds)


def _new_token_ratio(run: View) -> Iterator[Figure]:
    if "new_token_ratio_ppm" not in run.fine.bins.mean:
        return
    ratio = held(run.fine.bins.mean["new_token_ratio_ppm"] / 1e6)
    note = "Share of the announced tokens for which SGLang reserves memory. It falls with every"
    note += " decode step; a retraction estimates it anew."
    drawn = _lined(run.fine.x, [(ratio, "ink", "New-token ratio")])
    y = titled("ratio", rangemode="tozero")
    yield _figure(run, "new-token-ratio", "New-token ratio", note, y, drawn)


def _swaps(run: View) -> Iterator[Figure]:
    kinds = [
        ("swap_in_blocks", 1, "swap-in", "Swapped in"),
        ("swap_out_blocks", -1, "swap", "Swapped out"),
    ]
    note = "Blocks copied to the CPU (down) and back to the GPU (up), per bar."
    yield from _event_bars(run, "swaps", "Swapped blocks", note, "blocks", kinds)


def _event_bars(
    run: View, id: str, title: str, note: str, unit: str, kinds: Sequence[tuple[str, int, str, str]]
) -> Iterator[Figure]:
    """Sums of columns of steps over short times, if there is anything to sum."""
    edges, x, width = _bar_edges(run)
    starts = run.steps["start_ns"]
    sums = [
        (sign * binning.bin_events(starts, run.steps[column], edges), colour, label)
        for column, sign, colour, label in kinds
        if run.steps[column].any()
    ]
    if not sums:
        return
    drawn = [bars(x[:-1], compact(each), width, colour, label) for each, colour, label in sums]
    whole = {"dtick": 1} if max(np.abs(each).max() for each, *_ in sums) < 5 else {}
    note = f"{note} A bar is {seconds(width * run.axis.ns / 1e9)} wide."
    stacked = {"barmode": "relative", "bargap": 0}
    yield _figure(run, id, title, note, titled(unit, **whole), drawn, 180, **stacked)


def _bar_edges(run: View) -> tuple[Ints, Points, float]:
    """Edges in ns and in the unit of the axis, and the width of a bar in that unit."""
    edges = binning.even_edges(run.end_ns, BARS)
    return edges, run.axis.of(edges), float((edges[1] - edges[0]) / run.axis.ns)


def _batch(run: View) -> Iterator[Figure]:
    mean, x = run.coarse.bins.mean, run.coarse.x
    prompts = _lined(x, [(held(mean["prefill_tokens"]), "prefill", "Prompt tokens")], "one")
    decodes = _lined(x, [(held(mean["decode_seqs"]), "decode", "Decoding sequences")], "two")
    drawn = [*prompts, {**decodes[0], "yaxis": "y2"}]
    number = count(run.summary["steps"])
    note = f"What the running step computes, averaged over time; {number} steps."
    y = titled("tokens", domain=[0.55, 1], tickformat="~s")
    figure = _figure(run, "batch", "Batch composition", note, y, drawn, 280)
    below_the_first(figure.layout, "sequences", [0, 0.45])
    yield figure


def below_the_first(look: dict[str, Any], title: str, domain: list[float], **further: Any) -> None:
    """Give a layout a second y axis below its first one."""
    second = {"title": {"text": title, "standoff": 8}, "domain": domain, **further}
    look["yaxis2"] = {**look["yaxis"], **second}
    look["xaxis"]["anchor"] = "y2"


def _hit_rate(run: View) -> Iterator[Figure]:
    if not run.summary["meta"].get("prefix_caching"):
        return
    edges, x, width = _bar_edges(run)
    starts = run.steps["start_ns"]
    hits = binning.bin_events(starts, run.steps["cached_tokens"], edges)
    asked = hits + binning.bin_events(starts, run.steps["prefill_tokens"], edges)
    so_far = percentages(np.cumsum(hits), np.cumsum(asked))
    drawn = [
        bars(x[:-1], compact(percentages(hits, asked)), width, "cached", "In each bar"),
        *_lined(x, [(held(so_far), "ink", "Since the start")]),
    ]
    note = "Share of scheduled prompt tokens whose computation a hit saved, re-admissions included."
    y = titled("tokens (%)")
    yield _figure(run, "hit-rate", "Prefix cache hit rate", note, y, drawn, bargap=0)


def _fragmentation(run: View) -> Iterator[Figure]:
    meta, mean = run.summary["meta"], run.coarse.bins.mean
    slots: NDArray[Any] | Floats = mean["used_blocks"] * int(meta.get("block_size") or 0)
    pool = np.full(len(slots), float(meta.get("num_gpu_blocks") or 0))
    lines = (
        ("empty_slots", slots, "internal", "Internal: empty slots of used blocks"),
        ("stranded_blocks", pool, "external", "External: free blocks that no admission can use"),
    )
    shown = [
        (held(percentages(mean[column], whole)), colour, label)
        for column, whole, colour, label in lines
        if mean[column].any()
    ]
    if shown:
        note = "Memory that is allocated or free, but cannot be used."
        drawn = _lined(run.coarse.x, shown)
        yield _figure(run, "fragmentation", "Fragmentation", note, titled("share (%)"), drawn, 180)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 100 else count(value)
