"""Draws a run over simulated time, from what was sent to what memory held; all share one axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvsim.core.schema import BLOCKED, SGLANG_COLUMNS
from kvsim.report import binning
from kvsim.report.binning import Bins, Ints
from kvsim.report.pages.figures import (
    Axis,
    Figure,
    Points,
    TimeAxis,
    Trace,
    area,
    band,
    bars,
    compact,
    held,
    limit_line,
    line,
    merge,
    points,
    ratios,
    rule,
    scale,
    step_line,
    thinned,
    time_axis,
    time_chart,
    time_unit,
    titled,
)
from kvsim.results import phases, timeline
from kvsim.results.metrics import BLOCKED_BY, LATENCIES
from kvsim.results.numerals import count, milliseconds, percent, seconds
from kvsim.results.statistics import percentiles
from kvsim.results.summary import good_requests

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

    def even(self, bins: int) -> tuple[Ints, Points]:
        """Edges of at most so many bins of equal width, in ns and in the unit of the axis."""
        edges_ns = binning.even_edges(self.end_ns, bins)
        return edges_ns, self.axis.of(edges_ns)


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
        *(_preemptions, _swaps, _new_token_ratio, _batch, _hit_rate, _fragmentation),
    )
    return one_axis([figure for make in makers for figure in make(run)])


def one_axis(figures: Sequence[Figure]) -> list[Figure]:
    """Figures below each other whose one time axis has its name below the last one."""
    bare = {"xaxis": {"title": {"text": ""}}, "margin": {"b": 26}}
    return [
        *(f._replace(layout=merge(f.layout, bare), height=f.height - 14) for f in figures[:-1]),
        *figures[-1:],
    ]


def limits_words(goals: Mapping[str, float]) -> str:
    """`TTFT ≤ 2.00 s, TPOT ≤ 60.0 ms`."""
    return ", ".join(f"{LATENCIES[kind]} ≤ {milliseconds(ms)}" for kind, ms in goals.items())


def _lined(x: Points, named: Iterable[tuple[Points, str, str]], stack: str = "") -> list[Trace]:
    """Lines of (heights, colour, label), or stacked areas."""
    lines = (step_line(x, y, colour, label) for y, colour, label in named)
    return [area(trace, stack) if stack else trace for trace in lines]


def _per_second(run: View, colour: str, label: str, instants_ns: Any, amounts: Any = None) -> Trace:
    """A line of events per second; instants below 0 are those of events that never happened."""
    edges, x = run.even(RATES)
    instants = np.asarray(instants_ns, dtype=np.int64)
    weights = np.ones(len(instants), np.int64) if amounts is None else amounts
    happened = instants >= 0
    sums = binning.bin_events(instants[happened], weights[happened], edges)
    return step_line(x, held(sums / np.diff(edges) * 1e9), colour, label)


def _rates(run: View) -> Iterator[Figure]:
    summary, goals = run.summary, run.summary["meta"].get("goodput")
    done, good = phases.completed(run.requests), good_requests(run.durations, goals)
    finish = np.where(done, np.asarray(run.requests["finish_ns"]), -1)
    note = f"{_number(summary['request_throughput'])} completed per second over the whole run"
    drawn = [
        _per_second(run, "waiting", "Offered", run.requests["arrival_ns"]),
        _per_second(run, "running", "Completed", finish),
    ]
    if good is not None:
        kept = np.where(good, finish, -1)
        drawn.append(_per_second(run, "good", "Completed within all limits", kept))
        note += f", {_number(summary['request_goodput'])} within {limits_words(goals)}"
    yield time_chart(
        run.axis, "rates", "Offered and served", f"{note}.", drawn, titled("requests/s")
    )


def _tokens(run: View) -> Iterator[Figure]:
    drawn = [
        _per_second(run, colour, label, run.steps["start_ns"], run.steps[column])
        for colour, label, column in (
            ("prefill", "Prompt", "prefill_tokens"),
            ("decode", "Decode", "decode_seqs"),
        )
    ]
    note = f"Tokens computed per second; {_number(run.summary['output_throughput'])} of output"
    note += " per second over the whole run."
    yield time_chart(run.axis, "tokens", "Tokens", note, drawn, titled("tokens/s", tickformat="~s"))


def _ttft(run: View) -> Iterator[Figure]:
    """Each request where it arrived, and the percentiles of those that arrived together."""
    known = np.flatnonzero(~np.isnan(run.durations["ttft"]))
    if not len(known):
        return
    ttft, arrival = run.durations["ttft"][known], np.asarray(run.requests["arrival_ns"])[known]
    unit, ns = time_unit(ttft)
    edges, x = run.even(RATES)
    place, cuts = binning.places(arrival, edges), np.full((len(edges) - 1, 2), np.nan)
    for i in set(place.tolist()):
        cuts[i] = percentiles(ttft[place == i], (50, 99))
    shown = thinned(len(known), DOTS)
    dots = points(run.axis.of(arrival[shown]), compact(ttft[shown] / ns), "running", size=4)
    dots |= {"name": "Request", "opacity": 0.5, "customdata": known[shown].tolist()}
    dots["hoverinfo"] = "skip"
    lines = [(held(cuts[:, 0] / ns), "running", "p50"), (held(cuts[:, 1] / ns), "peak", "p99")]
    note, shapes = _limit(run, "ttft", ns)
    note = f"Of the requests that arrived at this time. Click a request to see its story.{note}"
    y, drawn = titled(f"TTFT ({unit})", **scale(ttft / ns, 50)), [dots, *_lined(x, lines)]
    yield time_chart(run.axis, "ttft", "TTFT", note, drawn, y, height=240, shapes=shapes)


def _itl(run: View) -> Iterator[Figure]:
    """The gaps between the ends of steps that decode, as running requests see them."""
    ends, decodes = run.steps["end_ns"], run.steps["decode_seqs"]
    (later,) = np.nonzero((decodes[1:] > 0) & (run.steps["running"][:-1] > 0))
    if not len(later):
        return
    instants, gaps, weights = ends[later + 1], ends[later + 1] - ends[later], decodes[later + 1]
    unit, ns = time_unit(gaps)
    edges, x = run.even(RATES)
    whole, most = binning.bin_events(instants, weights, edges), np.zeros(len(edges) - 1)
    mean = ratios(binning.bin_events(instants, gaps * weights, edges), whole)
    np.maximum.at(most, binning.places(instants, edges), gaps)
    most[whole == 0] = np.nan
    lines = [(held(mean / ns), "decode", "Mean over tokens"), (held(most / ns), "peak", "Longest")]
    note, shapes = _limit(run, "tpot", ns)
    note = (
        f"Gaps between the tokens of running requests; waits after a preemption do not count.{note}"
    )
    y = titled(f"ITL ({unit})", **scale(gaps / ns, 50))
    yield time_chart(run.axis, "itl", "ITL", note, _lined(x, lines), y, shapes=shapes)


def _limit(run: View, kind: str, ns: float) -> tuple[str, list[Axis]]:
    """The limit of a latency in words, and as a line on an axis whose unit has `ns` nanoseconds."""
    goals = run.summary["meta"].get("goodput") or {}
    if kind not in goals:
        return "", []
    words = f" Dotted: the limit, {limits_words({kind: goals[kind]})}."
    return words, [limit_line("y", goals[kind] * 1e6 / ns)]


def _queues(run: View) -> Iterator[Figure]:
    bins, x, data = run.fine.bins, run.fine.x, list[Trace]()
    for name in ("running", "waiting", "swapped"):
        if name == "swapped" and not bins.high[name].any():
            continue
        label = name.capitalize()
        if not bins.exact:
            data += band(x, held(bins.low[name]), held(bins.high[name]), name, label)
        data.append(step_line(x, held(bins.mean[name]), name, label))
    shade = "" if bins.exact else " Shading: lowest and highest within each bin."
    note = f"At most {count(run.summary['waiting_max'])} requests waiting and"
    note += f" {count(run.summary['running_max'])} running.{shade}"
    yield time_chart(
        run.axis, "queues", "Queue lengths", note, data, titled("requests"), height=240
    )


def _blocked(run: View) -> Iterator[Figure]:
    causes = [c for c in BLOCKED[1:] if run.coarse.bins.high[f"blocked_{c}"].any()]
    if not causes:
        return
    shares = (
        (held(100 * run.coarse.bins.mean[f"blocked_{c}"]), f"cause-{c}", BLOCKED_BY[c])
        for c in causes
    )
    waits = run.summary["head_blocked_s"]
    parts = ", ".join(f"{BLOCKED_BY[c]}: {seconds(waits[c])}" for c in causes)
    note = f"Share of the time that it was refused. In total: {parts}."
    drawn, y = _lined(run.coarse.x, shares, "one"), titled("time (%)", range=[0, 101])
    yield time_chart(run.axis, "blocked", "Why the head of the queue waited", note, drawn, y)


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
    note, shapes = "", list[Axis]()
    if used is not None and most is not None:
        note = f"{percent(used)} of {count(total)} blocks in use on average, {percent(most)} at"
        note += " most."
    if kept_free:
        note += f" Dashed: the watermark, {count(kept_free)} blocks kept free at admission."
        shapes = [rule("y", total - kept_free, dash="dash")]
    y = titled("GPU blocks", range=[0, total * 1.02])
    yield time_chart(
        run.axis, "gpu-blocks", "GPU block use", note, drawn, y, height=300, shapes=shapes
    )


def _cpu_blocks(run: View) -> Iterator[Figure]:
    if not run.fine.bins.high["cpu_used_blocks"].any():
        return
    mean = held(run.fine.bins.mean["cpu_used_blocks"])
    swapped = _lined(run.fine.x, [(mean, "swapped", "Swapped out")], "one")
    total = count(run.summary["meta"].get("num_cpu_blocks") or 0)
    note = f"Blocks of swapped requests, in a pool of {total}."
    drawn = [*swapped, *_peak(run, "cpu_used_blocks")]
    yield time_chart(run.axis, "cpu-blocks", "CPU block use", note, drawn, titled("CPU blocks"))


def _peak(run: View, column: str) -> list[Trace]:
    """A thin line of peaks if the bins hide peaks of the mean."""
    if run.fine.bins.exact:
        return []
    high = held(run.fine.bins.high[column])
    return [line(run.fine.x, high, "peak", "Most within a bin", shape="hv", width=1)]


def _preemptions(run: View) -> Iterator[Figure]:
    note, unit = "Requests that lost their blocks, per bar.", "requests"
    kinds = [
        ("preempted_recompute", 1, "recompute", "Recompute"),
        ("preempted_swap", 1, "swap", "Swap"),
    ]
    yield from _event_bars(run, "preemptions", "Preemptions", note, unit, kinds)


def _swaps(run: View) -> Iterator[Figure]:
    note, unit = "Blocks copied to the CPU (down) and back to the GPU (up), per bar.", "blocks"
    kinds = [
        ("swap_in_blocks", 1, "swap-in", "Swapped in"),
        ("swap_out_blocks", -1, "swap", "Swapped out"),
    ]
    yield from _event_bars(run, "swaps", "Swapped blocks", note, unit, kinds)


def _event_bars(
    run: View, id: str, title: str, note: str, unit: str, kinds: Sequence[tuple[str, int, str, str]]
) -> Iterator[Figure]:
    """Sums of columns of steps over short times, if there is anything to sum."""
    edges, x = run.even(BARS)
    sums = [
        (sign * binning.bin_events(run.steps["start_ns"], run.steps[column], edges), colour, label)
        for column, sign, colour, label in kinds
        if run.steps[column].any()
    ]
    if not sums:
        return
    width_ns = int(edges[1] - edges[0])
    drawn = [
        bars(x[:-1], compact(each), width_ns / run.axis.ns, colour, label)
        for each, colour, label in sums
    ]
    y = titled(unit, dtick=1) if max(abs(each).max() for each, *_ in sums) < 5 else titled(unit)
    note = f"{note} A bar is {seconds(width_ns / 1e9)} wide."
    stacked = {"barmode": "relative", "bargap": 0}
    yield time_chart(run.axis, id, title, note, drawn, y, height=180, **stacked)


def _new_token_ratio(run: View) -> Iterator[Figure]:
    if "new_token_ratio_ppm" not in run.fine.bins.mean:
        return
    ratio = held(run.fine.bins.mean["new_token_ratio_ppm"] / 1e6)
    note = "Share of the announced tokens for which SGLang reserves memory. It falls with every"
    note += " decode step; a retraction estimates it anew."
    drawn = _lined(run.fine.x, [(ratio, "ink", "New-token ratio")])
    id, title, y = "new-token-ratio", "New-token ratio", titled("ratio")
    yield time_chart(run.axis, id, title, note, drawn, y, keyed=False)


def _batch(run: View) -> Iterator[Figure]:
    mean, x = run.coarse.bins.mean, run.coarse.x
    prompts = _lined(x, [(held(mean["prefill_tokens"]), "prefill", "Prompt tokens")], "one")
    decodes = _lined(x, [(held(mean["decode_seqs"]), "decode", "Decoding sequences")], "two")
    drawn = [*prompts, {**decodes[0], "yaxis": "y2"}]
    note = "What the running step computes, averaged over time;"
    note += f" {count(run.summary['steps'])} steps."
    y = titled("tokens", domain=[0.55, 1], tickformat="~s")
    below = titled("sequences", domain=[0, 0.45])
    yield time_chart(
        run.axis, "batch", "Batch composition", note, drawn, y, below=below, height=280
    )


def _hit_rate(run: View) -> Iterator[Figure]:
    if not run.summary["meta"].get("prefix_caching"):
        return
    edges, x = run.even(BARS)
    hits, computed = (
        binning.bin_events(run.steps["start_ns"], run.steps[column], edges)
        for column in ("cached_tokens", "prefill_tokens")
    )
    asked = hits + computed
    so_far = 100 * ratios(np.cumsum(hits), np.cumsum(asked))
    shares, width = compact(100 * ratios(hits, asked)), int(edges[1] - edges[0]) / run.axis.ns
    drawn = [
        bars(x[:-1], shares, width, "cached", "In each bar"),
        step_line(x, held(so_far), "ink", "Since the start"),
    ]
    note = "Share of scheduled prompt tokens whose computation a hit saved, re-admissions included."
    y = titled("tokens (%)")
    yield time_chart(run.axis, "hit-rate", "Prefix cache hit rate", note, drawn, y, bargap=0)


def _fragmentation(run: View) -> Iterator[Figure]:
    meta, mean = run.summary["meta"], run.coarse.bins.mean
    slots = mean["used_blocks"] * int(meta.get("block_size") or 0)
    pool = np.full(len(slots), float(meta.get("num_gpu_blocks") or 0))
    lines = (
        ("empty_slots", slots, "internal", "Internal: empty slots of used blocks"),
        ("stranded_blocks", pool, "external", "External: free blocks that no admission can use"),
    )
    shown = [
        (held(100 * ratios(mean[column], whole)), colour, label)
        for column, whole, colour, label in lines
        if mean[column].any()
    ]
    if shown:
        note = "Memory that is allocated or free, but cannot be used."
        drawn, y = _lined(run.coarse.x, shown), titled("share (%)")
        yield time_chart(run.axis, "fragmentation", "Fragmentation", note, drawn, y, height=180)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 100 else count(value)
