"""Draws a run over simulated time, from what was sent to what memory held; all share one axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.core.schema import BLOCKED
from kvsim.core.sums import added
from kvsim.report.pages.figures import (
    Axis,
    Figure,
    Trace,
    band,
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
    time_unit,
    titled,
)
from kvsim.report.pages.latencies import waiting_by_adapter
from kvsim.report.pages.view import (
    BARS,
    DOTS,
    LEAST_SHARE,
    RATES,
    View,
    event_bars,
    lined,
    mean_and_longest,
    per_second,
)
from kvsim.report.pages.work import WORK
from kvsim.results import phases
from kvsim.results.ledger import TIME_LABELS, TIME_PARTS
from kvsim.results.metrics import BLOCKED_BY, LATENCIES
from kvsim.results.numerals import count, milliseconds, percent, seconds
from kvsim.results.phases import ints
from kvsim.results.statistics import percentiles
from kvsim.results.summary import bare, good_requests

LATENCY_KINDS = ("ttft", "tpot", "e2el")


def time_figures(run: View) -> list[Figure]:
    """Every figure over time that has something to show, from cause to effect."""
    if not run.end_ns or not len(run.steps["start_ns"]):
        return []
    makers = (
        *(_rates, _tokens, _latencies, _itl, _waits, _queues, waiting_by_adapter, _blocked),
        *(
            _gpu_blocks,
            _cpu_blocks,
            _preemptions,
            _swaps,
            _new_token_ratio,
            _batch,
            *WORK,
            _hit_rate,
            _tiers,
            _fragmentation,
        ),
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


def _rates(run: View) -> Iterator[Figure]:
    summary, goals = run.summary, run.summary["meta"].get("goodput")
    done, good = phases.completed(run.requests), good_requests(run.durations, goals)
    finish = np.where(done, np.asarray(run.requests["finish_ns"]), -1)
    note = f"{_number(summary['request_throughput'])} completed per second over the whole run"
    drawn = [
        per_second(run, "waiting", "Offered", run.requests["arrival_ns"]),
        per_second(run, "running", "Completed", finish),
    ]
    if good is not None:
        kept = np.where(good, finish, -1)
        drawn.append(per_second(run, "good", "Completed within all limits", kept))
        note += f", {_number(summary['request_goodput'])} within {limits_words(goals)}"
    yield run.figure("rates", "Offered and served", f"{note}.", drawn, titled("requests/s"))


def _tokens(run: View) -> Iterator[Figure]:
    drawn = [
        per_second(run, colour, label, run.steps["start_ns"], run.steps[column])
        for colour, label, column in (
            ("prefill", "Prompt", "prefill_tokens"),
            ("decode", "Decode", "decode_seqs"),
        )
    ]
    note = f"Tokens computed per second; {_number(run.summary['output_throughput'])} of output"
    note += " per second over the whole run."
    yield run.figure("tokens", "Tokens", note, drawn, titled("tokens/s", tickformat="~s"))


def _latencies(run: View) -> Iterator[Figure]:
    """Percentiles of the requests that arrived together; of TTFT, each request, too."""
    for kind in LATENCY_KINDS:
        known = np.flatnonzero(~np.isnan(run.durations[kind]))
        if not len(known):
            continue
        values, arrival = run.durations[kind][known], ints(run.requests["arrival_ns"])[known]
        unit, ns = time_unit(values)
        bins = run.sums(arrival, RATES)
        cuts = _cuts(values / ns, bins.place, len(bins.x) - 1)
        named = zip(cuts.T, ("running", "peak"), ("p50", "p99"), strict=True)
        drawn = lined(bins.x, ((held(y), colour, label) for y, colour, label in named))
        limit, shapes = _limit(run, kind, ns)
        note = f"Of the requests that arrived at this time.{limit}"
        if kind == "ttft":
            note = note.replace(".", ". Click a request to see its story.", 1)
            shown = thinned(len(known), DOTS)
            dots = points(run.axis.of(arrival[shown]), compact(values[shown] / ns), "running")
            dots["marker"]["size"] = 4
            dots |= {"name": "Request", "opacity": 0.5, "customdata": known[shown].tolist()}
            drawn.insert(0, dots | {"hoverinfo": "skip"})
        name = LATENCIES[kind]
        y = titled(f"{name} ({unit})", **scale(values / ns, 50))
        height = 240 if kind == "ttft" else 200
        yield run.figure(kind, name, note, drawn, y, height=height, shapes=shapes)


def _cuts(values: Any, place: Any, bins: int) -> Any:
    """p50 and p99 of the values in each bin; NaN where there are none."""
    order = np.argsort(place, kind="stable")
    ordered, ends = values[order], np.searchsorted(place[order], np.arange(bins + 1))
    cuts = np.full((bins, 2), np.nan)
    for i in np.flatnonzero(np.diff(ends)):
        cuts[i] = percentiles(ordered[ends[i] : ends[i + 1]], (50, 99))
    return cuts


def _itl(run: View) -> Iterator[Figure]:
    """The gaps between the ends of steps that decode, as running requests see them."""
    ends, decodes = run.steps["end_ns"], run.steps["decode_seqs"]
    later = (decodes[1:] > 0) & (run.steps["running"][:-1] > 0)
    if not later.any():
        return
    weights, gaps, instants = decodes[1:][later], np.diff(ends)[later], ends[1:][later]
    del ends, decodes  # A long run has many steps.
    unit, ns = time_unit(gaps)
    drawn = mean_and_longest(run, instants, gaps, weights, ns, "decode", "Mean over tokens")
    note, shapes = _limit(run, "tpot", ns)
    note = (
        f"Gaps between the tokens of running requests; waits after a preemption do not count.{note}"
    )
    y = titled(f"ITL ({unit})", **scale(gaps / ns, 50))
    yield run.figure("itl", "ITL", note, drawn, y, shapes=shapes)


def _waits(run: View) -> Iterator[Figure]:
    """The ledger of those that arrived together."""
    if TIME_PARTS[0] not in run.requests:
        return
    done = np.flatnonzero(phases.completed(run.requests))
    bins = run.sums(ints(run.requests["arrival_ns"])[done], RATES)
    parts_ns = {name: ints(run.requests[name])[done] for name in TIME_PARTS}
    number, sums = bins.of(), {name: bins.of(ns) for name, ns in parts_ns.items() if ns.any()}
    if not sums:
        return
    unit, ns = time_unit([float(np.nanmax(ratios(added(sums.values()), number)))])
    whole = added(each.sum() for each in sums.values())
    # What no one would see in the stack is left to the table of the ledger.
    parts = (
        (held(np.nan_to_num(ratios(each, number) / ns)), f"part-{bare(name)}", TIME_LABELS[name])
        for name, each in sums.items()
        if each.sum() > LEAST_SHARE * whole
    )
    note = "Mean E2EL of the requests that arrived at this time, by where it went; parts below"
    note += f" {percent(LEAST_SHARE)} of the whole are left out."
    drawn, y = lined(bins.x, parts, "one"), titled(f"E2EL ({unit})")
    yield run.figure("waits", "Where the time went", note, drawn, y, height=260)


def _tiers(run: View) -> Iterator[Figure]:
    """Where the prompt tokens of those that were admitted together came from."""
    hits, cpu, below, whole = (
        ints(run.requests[name])
        for name in ("num_cached_tokens", "tier1_hit_tokens", "tier2_hit_tokens", "input_length")
    )
    if not (cpu.any() or below.any()):
        return
    begun = ints(run.requests["first_scheduled_ns"])
    there = begun >= 0
    bins = run.sums(begun[there], RATES)
    asked = bins.of(whole[there])
    parts = (
        (hits - cpu - below, "cached", "Found on the GPU"),
        (cpu, "swapped", "Loaded from CPU memory or a prefill engine"),
        (below, "swap-in", "Loaded from the tier below"),
        (whole - hits, "prefill", "Computed"),
    )
    shown = (
        (held(np.nan_to_num(100 * ratios(bins.of(part[there]), asked))), c, label)
        for part, c, label in parts
        if part.any()
    )
    note = "Prompt tokens of the requests whose first step was at this time."
    drawn, y = lined(bins.x, shown, "one"), titled("prompt tokens (%)", range=[0, 101])
    yield run.figure("prompt-tiers", "Where prompts came from", note, drawn, y)


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
    yield run.figure("queues", "Queue lengths", note, data, titled("requests"), height=240)


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
    drawn, y = lined(run.coarse.x, shares, "one"), titled("time (%)", range=[0, 101])
    yield run.figure("blocked", "Why the head of the queue waited", note, drawn, y)


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
    drawn = [*lined(run.fine.x, shown, "one"), *_peak(run, "used_blocks")]
    used, most = run.summary["kv_cache_usage_mean"], run.summary["kv_cache_usage_max"]
    note, shapes = "", list[Axis]()
    if used is not None and most is not None:
        note = f"{percent(used)} of {count(total)} blocks in use on average, {percent(most)} at"
        note += " most."
    if kept_free:
        note += f" Dashed: the watermark, {count(kept_free)} blocks kept free at admission."
        shapes = [rule("y", total - kept_free, dash="dash")]
    y = titled("GPU blocks", range=[0, total * 1.02])
    yield run.figure("gpu-blocks", "GPU block use", note, drawn, y, height=300, shapes=shapes)


def _cpu_blocks(run: View) -> Iterator[Figure]:
    if not run.fine.bins.high["cpu_used_blocks"].any():
        return
    mean = held(run.fine.bins.mean["cpu_used_blocks"])
    swapped = lined(run.fine.x, [(mean, "swapped", "Swapped out")], "one")
    total = count(run.summary["meta"].get("num_cpu_blocks") or 0)
    note = f"Blocks of swapped requests, in a pool of {total}."
    drawn = [*swapped, *_peak(run, "cpu_used_blocks")]
    yield run.figure("cpu-blocks", "CPU block use", note, drawn, titled("CPU blocks"))


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
    yield from event_bars(run, "preemptions", "Preemptions", note, unit, kinds)


def _swaps(run: View) -> Iterator[Figure]:
    note, unit = "Blocks copied to the CPU (down) and back to the GPU (up), per bar.", "blocks"
    kinds = [
        ("swap_in_blocks", 1, "swap-in", "Swapped in"),
        ("swap_out_blocks", -1, "swap", "Swapped out"),
    ]
    yield from event_bars(run, "swaps", "Swapped blocks", note, unit, kinds)


def _new_token_ratio(run: View) -> Iterator[Figure]:
    if "new_token_ratio_ppm" not in run.fine.bins.mean:
        return
    ratio = held(run.fine.bins.mean["new_token_ratio_ppm"] / 1e6)
    note = "Share of the announced tokens for which SGLang reserves memory. It falls with every"
    note += " decode step; a retraction estimates it anew."
    drawn = lined(run.fine.x, [(ratio, "ink", "New-token ratio")])
    id, title, y = "new-token-ratio", "New-token ratio", titled("ratio")
    yield run.figure(id, title, note, drawn, y, keyed=False)


def _batch(run: View) -> Iterator[Figure]:
    mean, x = run.coarse.bins.mean, run.coarse.x
    prompts = lined(x, [(held(mean["prefill_tokens"]), "prefill", "Prompt tokens")], "one")
    decodes = lined(x, [(held(mean["decode_seqs"]), "decode", "Decoding sequences")], "two")
    drawn = [*prompts, {**decodes[0], "yaxis": "y2"}]
    note = "What the running step computes, averaged over time;"
    note += f" {count(run.summary['steps'])} steps."
    y = titled("tokens", domain=[0.55, 1], tickformat="~s")
    below = titled("sequences", domain=[0, 0.45])
    yield run.figure("batch", "Batch composition", note, drawn, y, below=below, height=280)


def _hit_rate(run: View) -> Iterator[Figure]:
    if not run.summary["meta"].get("prefix_caching"):
        return
    bins = run.sums(run.steps["start_ns"], BARS)
    hits, computed = (bins.of(run.steps[column]) for column in ("cached_tokens", "prefill_tokens"))
    so_far = 100 * ratios(np.cumsum(hits), np.cumsum(hits + computed))
    drawn = [
        bins.bars(100 * ratios(hits, hits + computed), "cached", "In each bar"),
        step_line(bins.x, held(so_far), "ink", "Since the start"),
    ]
    note = "Share of scheduled prompt tokens whose computation a hit saved, re-admissions included."
    y = titled("tokens (%)")
    yield run.figure("hit-rate", "Prefix cache hit rate", note, drawn, y, bargap=0)


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
        drawn, y = lined(run.coarse.x, shown), titled("share (%)")
        yield run.figure("fragmentation", "Fragmentation", note, drawn, y, height=180)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 100 else count(value)
