"""Draws a run over simulated time, from what was sent to what memory held; all share one axis. What
steps took, and what for, is drawn against their size, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.core.records import part_of, rows_in
from kvsim.core.schema import BLOCKED
from kvsim.core.vectors import added
from kvsim.cost.bounds import Bounds
from kvsim.errors import ConfigError
from kvsim.machine.hardware import load_hardware
from kvsim.machine.models import model_of
from kvsim.report.pages.figures import (
    Axis,
    Figure,
    Trace,
    band,
    chart,
    compact,
    held,
    limit_line,
    line,
    merge,
    points,
    ratios,
    rows_axis,
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
    durations_of,
    event_bars,
    lined,
)
from kvsim.results.ledger import KERNEL_LABELS, TIME_LABELS, TIME_PARTS
from kvsim.results.metrics import BLOCKED_BY, LATENCIES
from kvsim.results.numerals import count, milliseconds, percent, seconds
from kvsim.results.plain import numeric
from kvsim.results.statistics import Ints, completed, ints, percentiles
from kvsim.results.summary import bare, good_requests
from kvsim.settings.config import make_config

LANE_STEPS = 32
"""Steps whose way through a pipeline is drawn."""

LATENCY_KINDS = ("ttft", "tpot", "e2el")


_AT_ONCE = 1 << 16
"""Steps that are looked at at once, to bound the memory."""


def _pieces(run: View, *names: str, beyond: int = 0) -> Iterator[list[Ints]]:
    """Columns of steps, some rows at a time; each piece also has the first rows `beyond` it."""
    number = rows_in(run.steps)
    for first in range(0, number, _AT_ONCE):
        last = min(first + _AT_ONCE + beyond, number)
        yield [part_of(run.steps, name, first, last) for name in names]


def _whole(run: View, of: Callable[..., Ints], *names: str) -> Ints:
    """What `of` makes of these columns of steps, of all of them."""
    made, first = np.empty(rows_in(run.steps), dtype=np.int64), 0
    for columns in _pieces(run, *names):
        last = first + len(columns[0])
        made[first:last] = of(*columns)
        first = last
    return made


def _tokens_of_steps(run: View) -> Ints:
    """What each step computes: prompt tokens, a token per decode, and drafts."""
    names = ("prefill_tokens", "decode_seqs", "draft_tokens")
    return _whole(run, lambda *counts: added(counts), *(n for n in names if n in run.steps))


def _step_time(run: View) -> Iterator[Figure]:
    steps = _pieces(run, "start_ns", "end_ns")
    found = durations_of(run, ((end, end - start, np.ones_like(end)) for start, end in steps))
    unit, ns = time_unit(found.ends_ns)
    drawn = found.lines(ns, "used", "Mean over steps")
    note, y = f"{count(rows_in(run.steps))} steps.", scale(found.ends_ns / ns, 50)
    yield run.figure("step-time", "Step time", note, drawn, titled(f"step ({unit})", **y))


def _kernels(run: View) -> Iterator[Figure]:
    bins = run.sums(run.steps["start_ns"], RATES)
    sums = {name: bins.of(run.steps[name]) for name in KERNEL_LABELS if name in run.steps}
    busy = added(sums.values())
    if not busy.any():
        return
    # A step counts where it begins, so the steps of a bin may take longer than the bin.
    whole = np.maximum(busy, np.diff(bins.edges_ns))
    shown = (
        (100 * each / whole, f"kernel-{bare(name)}", KERNEL_LABELS[name].capitalize())
        for name, each in sums.items()
        if each.sum() > LEAST_SHARE * busy.sum()
    )
    note = f"Steps take {percent(min(1.0, busy.sum() / run.end_ns))} of the time; above: idle."
    drawn, y = lined(bins.x, shown, "one"), titled("time (%)", range=[0, 101])
    title = "Where the time of steps went"
    yield run.figure("kernels", title, note, drawn, y, height=240)


def _utilisation(run: View) -> Iterator[Figure]:
    """Arithmetic and traffic over the peaks of the data sheet, idle time included."""
    bounds = _peaks(run.summary["meta"])
    if bounds is None:
        return
    bins, tokens = run.sums(run.steps["start_ns"], RATES), _tokens_of_steps(run)
    columns = tokens, run.steps["decode_seqs"], run.steps["context_tokens"], tokens > 0
    sums = [bins.of(column).astype(np.int64).tolist() for column in columns]
    spent = [_spent_ns(bounds, *each) for each in zip(*sums, strict=True)]
    width = np.diff(bins.edges_ns) * float(_stages(run))  # An edited number of stages may be huge.
    flops, traffic = (100 * np.array(each) / width for each in zip(*spent, strict=True))
    named = [(flops, "prefill", "FLOPs (MFU)"), (traffic, "used", "Bandwidth (MBU)")]
    mean = (float((each * width).sum() / width.sum() / 100) for each in (flops, traffic))
    note = "Share of the data sheet's peaks, idle time included: {} and {} in the mean. Counted are"
    note += " matrix products, and weights and the KV of decodes; not the attention of prompts."
    note, y = note.format(*map(percent, mean)), titled("of the peak (%)")
    title = "FLOPs and bandwidth used"
    yield run.figure("utilisation", title, note, lined(bins.x, named), y)


def _peaks(meta: Mapping[str, Any]) -> Bounds | None:
    """The least times of kernels; None where times are made up, or the hardware is not at hand."""
    if (meta.get("cost") or {}).get("kind") not in ("measured", "scaled", "estimated", "roofline"):
        return None
    try:
        config = make_config(numeric(meta["config"]))
        return Bounds(
            *(model_of(config), load_hardware(str(config.hardware)), config),
            compute_efficiency=1,
            bandwidth_efficiency=1,
            layer_overhead_us=0,
            step_overhead_us=0,
        )
    except ConfigError:
        return None


def _spent_ns(
    bounds: Bounds, tokens: int, decodes: int, context: int, steps: int
) -> tuple[float, float]:
    """Nanoseconds of arithmetic and of traffic of some steps at the peaks."""
    flops = tokens * (bounds.token_ns + bounds.experts_token_ns) + decodes * bounds.sample_ns
    each = bounds.weights_ns + bounds.head_ns
    if steps and bounds.experts_read_ns:
        each += bounds.experts_read_ns * bounds.routing.active(tokens / steps)
    return flops, steps * each + bounds.attention.decodes_ns(decodes, context)


def _drafts(run: View) -> Iterator[Figure]:
    if "draft_tokens" not in run.steps or not run.steps["draft_tokens"].any():
        return
    bins = run.sums(run.steps["start_ns"], BARS)
    made, taken = (bins.of(run.steps[name]) for name in ("draft_tokens", "accepted_tokens"))
    drawn = [
        bins.bars(taken, "part-accepted_drafts", "Accepted"),
        bins.bars(made - taken, "part-rejected_drafts", "Rejected"),
        step_line(bins.x, 100 * ratios(taken, made), "ink", "Accepted share") | {"yaxis": "y2"},
    ]
    whole = percent(run.summary["spec_decode_accepted_share"] or 0.0)
    note = f"Drafts verified, per bar; {whole} of all were accepted."
    y, below = (
        titled("tokens", domain=[0.48, 1]),
        titled("accepted (%)", domain=[0, 0.36], range=[0, 101]),
    )
    further: dict[str, Any] = {"yaxis2": below, "height": 280, "barmode": "stack", "bargap": 0}
    yield run.figure("drafts", "Drafts", note, drawn, y, **further)


def _stages(run: View) -> int:
    return run.summary["meta"]["config"].get("pipeline_parallel_size") or 1


def _bubbles(run: View) -> Iterator[Figure]:
    """What the stages of a pipeline do while any step is under way."""
    if "stage_wait_ns" not in run.steps:
        return
    start, end = run.steps["start_ns"], run.steps["end_ns"]
    bins = run.sums(start, RATES)
    moved, waits, host = (
        run.steps[name].astype(np.int64) for name in ("send_ns", "stage_wait_ns", "host_ns")
    )
    # Steps overlap on the stages: each counts from the end of the one before.
    under_way = np.maximum(end - np.maximum(start, np.append(0, end[:-1])), 0)
    whole = bins.of(under_way) * _stages(run)
    busy = bins.of(end - start - moved - waits - host)
    idle = 100 * (1 - np.minimum(ratios(busy, whole), 1))
    share = percent(run.summary["pipeline_bubble_share"] or 0.0)
    note = f"Share of the stages' time in which they compute nothing; {share} over the whole run."
    drawn = [step_line(bins.x, idle, "part-stage_wait", "Idle")]
    y = titled("time (%)", range=[0, 101])
    yield run.figure("bubbles", "Pipeline bubbles", note, drawn, y, keyed=False)


def step_figures(run: View) -> list[Figure]:
    """Steps against their size, and on the stages of a pipeline."""
    return [*_against_tokens(run), *_lanes(run)] if rows_in(run.steps) > 1 else []


def _against_tokens(run: View) -> Iterator[Figure]:
    lasts, tokens = _whole(run, np.subtract, "end_ns", "start_ns"), _tokens_of_steps(run)
    prompts = run.steps["prefill_tokens"] > 0
    unit, ns = time_unit(lasts)
    drawn = []
    for those, colour, label in _kinds(prompts & (tokens > 0), ~prompts & (tokens > 0)):
        places = np.flatnonzero(those)
        shown = places[thinned(len(places), DOTS // 2)]
        x, y = compact(tokens[shown]), compact(lasts[shown] / ns)
        drawn.append(points(x, y, colour, size=4, opacity=0.5) | {"name": label})
    x_axis = titled("tokens in the step", showgrid=True, **scale(_positive_ends(tokens)))
    y_axis = titled(f"step ({unit})", **scale(_positive_ends(lasts) / ns))
    note = "A dot for each step, of many a sample. A flat floor is memory-bound, a slope is"
    note += " compute-bound."
    title = "Step time by tokens"
    yield chart("step-tokens", title, note, drawn, x_axis, y_axis, hovermode="closest", height=280)


def _positive_ends(values: Ints) -> Ints:
    """The least and the greatest of those above 0; none if there are none."""
    some = values[values > 0]
    return np.array((some.min(), some.max())) if len(some) else some


def _kinds(prompts: Any, decodes: Any) -> list[tuple[Any, str, str]]:
    """Which steps have prompts, and which have none; those of which there is any."""
    kinds = (prompts, "prefill", "With prompts"), (decodes, "decode", "Decodes only")
    return [kind for kind in kinds if kind[0].any()]


def _lanes(run: View) -> Iterator[Figure]:
    """Some steps on their way through the stages, from the middle of the run."""
    stages = (run.summary["meta"].get("cost") or {}).get("stages")
    layers = (stages or {}).get("layers")
    if "stage_wait_ns" not in run.steps or not layers:
        return
    first = max(0, (rows_in(run.steps) - LANE_STEPS) // 2)
    rows = {
        name: run.steps[name][first : first + LANE_STEPS].astype(np.int64)
        for name in ("start_ns", "end_ns", "host_ns", "head_ns", "send_ns", "stage_wait_ns")
    }
    begin, took = passages(rows, layers)
    axis_ns = time_unit([float(rows["end_ns"][-1] - rows["start_ns"][0])])
    prompts = run.steps["prefill_tokens"][first : first + LANE_STEPS] > 0
    drawn = [
        _lane_bars(begin[those], took[those], axis_ns[1], colour, label)
        for those, colour, label in _kinds(prompts, ~prompts)
    ]
    names = [f"stage {stage}" for stage in range(len(layers))]
    note = f"{count(len(begin))} steps from the middle of the run; gaps are bubbles."
    x = titled(f"since the first of them ({axis_ns[0]})")
    further: dict[str, Any] = {"hovermode": "closest", "barmode": "overlay", "height": 280}
    id, title = "lanes", "Stages of the pipeline"
    yield chart(id, title, note, drawn, x, rows_axis(names), **further)


def passages(rows: Mapping[str, Ints], layers: list[int]) -> tuple[Ints, Ints]:
    """When each of these steps begins on each stage, counted from the first, and how long it
    computes there: as `kvsim.run.replica.time` places them, but for waits for tokens."""
    whole = rows["end_ns"] - rows["start_ns"] - rows["send_ns"] - rows["stage_wait_ns"]
    whole = whole - rows["host_ns"] - rows["head_ns"]
    ends = whole[:, None] * np.cumsum(layers) // sum(layers)
    took = np.diff(ends, axis=1, prepend=0)
    took[:, -1] += rows["head_ns"]
    send = rows["send_ns"] // max(len(layers) - 1, 1)
    begin, free = np.zeros_like(took), np.zeros(len(layers), np.int64)
    for step in range(len(took)):
        ready = rows["start_ns"][step] - rows["start_ns"][0] + rows["host_ns"][step]
        for stage in range(len(layers)):
            begin[step, stage] = max(ready, free[stage])
            ready = begin[step, stage] + took[step, stage] + send[step]
            free[stage] = ready if stage < len(layers) - 1 else ready - send[step]
        # The last stage is known to the nanosecond.
        last = rows["end_ns"][step] - rows["start_ns"][0]
        begin[step, -1], free[-1] = last - took[step, -1], last
    return begin, took


def _lane_bars(begin: Ints, took: Ints, ns: float, colour: str, label: str) -> dict[str, Any]:
    """Bars of steps, in a row for each stage."""
    stages = np.tile(np.arange(begin.shape[1]), len(begin))
    return {
        "type": "bar",
        "orientation": "h",
        "base": compact(begin.ravel() / ns),
        "x": compact(took.ravel() / ns),
        "y": stages.tolist(),
        "width": 0.7,
        "name": label,
        "marker": {"color": f"var(--{colour})", "line": {"width": 1, "color": "var(--card)"}},
        "hovertemplate": "%{x:.3~g}<extra></extra>",
    }


def time_figures(run: View) -> list[Figure]:
    """Every figure over time that has something to show, from cause to effect."""
    if not run.end_ns or not rows_in(run.steps):
        return []
    makers = (
        *(_rates, _tokens, _latencies, _itl, _waits, _queues, waiting_by_adapter, _blocked),
        *(_gpu_blocks, _cpu_blocks, _preemptions, _swaps, _new_token_ratio, _batch, _step_time),
        *(_kernels, _utilisation, _drafts, _bubbles, _hit_rate, _tiers, _fragmentation),
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
    done, good = completed(run.requests), good_requests(run.durations, goals)
    arrival, finish = (ints(run.requests[name]) for name in ("arrival_ns", "finish_ns"))
    note = f"{_number(summary['request_throughput'])} completed per second over the whole run"
    drawn = [
        run.sums(arrival[arrival >= 0], RATES).per_second("waiting", "Offered"),
        run.sums(finish[done], RATES).per_second("running", "Completed"),
    ]
    if good is not None:
        kept = run.sums(finish[good & done], RATES)
        drawn.append(kept.per_second("good", "Completed within all limits"))
        note += f", {_number(summary['request_goodput'])} within {limits_words(goals)}"
    yield run.figure("rates", "Offered and served", f"{note}.", drawn, titled("requests/s"))


def _tokens(run: View) -> Iterator[Figure]:
    bins = run.sums(run.steps["start_ns"], RATES)
    drawn = [
        bins.per_second(colour, label, run.steps[column])
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
        cuts = _cuts(bins.ordered(values / ns), bins.ends)
        named = zip(cuts.T, ("running", "peak"), ("p50", "p99"), strict=True)
        drawn = lined(bins.x, named)
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


def _cuts(ordered: Any, ends: Any) -> Any:
    """p50 and p99 of the values in each bin; NaN where there are none."""
    cuts = np.full((len(ends) - 1, 2), np.nan)
    for i in np.flatnonzero(np.diff(ends)):
        cuts[i] = percentiles(ordered[ends[i] : ends[i + 1]], (50, 99))
    return cuts


def _itl(run: View) -> Iterator[Figure]:
    """The gaps between the ends of steps that decode, as running requests see them."""

    def gaps() -> Iterator[tuple[Ints, Ints, Ints]]:
        for ends, decodes, running in _pieces(run, "end_ns", "decode_seqs", "running", beyond=1):
            later = (decodes[1:] > 0) & (running[:-1] > 0)
            yield ends[1:][later], np.diff(ends)[later], decodes[1:][later]

    found = durations_of(run, gaps())
    if not len(found.ends_ns):
        return
    unit, ns = time_unit(found.ends_ns)
    drawn = found.lines(ns, "decode", "Mean over tokens")
    note, shapes = _limit(run, "tpot", ns)
    note = (
        f"Gaps between the tokens of running requests; waits after a preemption do not count.{note}"
    )
    y = titled(f"ITL ({unit})", **scale(found.ends_ns / ns, 50))
    yield run.figure("itl", "ITL", note, drawn, y, shapes=shapes)


def _waits(run: View) -> Iterator[Figure]:
    """The ledger of those that arrived together."""
    done = np.flatnonzero(completed(run.requests))
    bins = run.sums(ints(run.requests["arrival_ns"])[done], RATES)
    parts_ns = {name: ints(run.requests[name])[done] for name in TIME_PARTS}
    number, sums = bins.of(), {name: bins.of(ns) for name, ns in parts_ns.items() if ns.any()}
    if not sums:
        return
    unit, ns = time_unit([float(np.nanmax(ratios(added(sums.values()), number)))])
    whole = added(each.sum() for each in sums.values())
    # What no one would see in the stack is left to the table of the ledger.
    parts = (
        (np.nan_to_num(ratios(each, number) / ns), f"part-{bare(name)}", TIME_LABELS[name])
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
        (np.nan_to_num(100 * ratios(bins.of(part[there]), asked)), c, label)
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
    bins, x, data = run.fine, run.fine_x, list[Trace]()
    for name in ("running", "waiting", "swapped"):
        if name == "swapped" and not bins.high[name].any():
            continue
        label = name.capitalize()
        if not bins.exact:
            data += band(x, held(bins.low[name]), held(bins.high[name]), name, label)
        data.append(step_line(x, bins.mean[name], name, label))
    shade = "" if bins.exact else " Shading: lowest and highest within each bin."
    note = f"At most {count(run.summary['waiting_max'])} requests waiting and"
    note += f" {count(run.summary['running_max'])} running.{shade}"
    yield run.figure("queues", "Queue lengths", note, data, titled("requests"), height=240)


def _blocked(run: View) -> Iterator[Figure]:
    causes = [c for c in BLOCKED[1:] if run.coarse.high[f"blocked_{c}"].any()]
    if not causes:
        return
    shares = ((100 * run.coarse.mean[f"blocked_{c}"], f"cause-{c}", BLOCKED_BY[c]) for c in causes)
    waits = run.summary["head_blocked_s"]
    parts = ", ".join(f"{BLOCKED_BY[c]}: {seconds(waits[c])}" for c in causes)
    note = f"Share of the time that it was refused. In total: {parts}."
    drawn, y = lined(run.coarse_x, shares, "one"), titled("time (%)", range=[0, 101])
    yield run.figure("blocked", "Why the head of the queue waited", note, drawn, y)


def _gpu_blocks(run: View) -> Iterator[Figure]:
    meta, mean = run.summary["meta"], run.fine.mean
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
    shown = (part for part in parts if part[1] in ("used", "free") or part[0].any())
    drawn = [*lined(run.fine_x, shown, "one"), *_peak(run, "used_blocks")]
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
    if not run.fine.high["cpu_used_blocks"].any():
        return
    mean = run.fine.mean["cpu_used_blocks"]
    swapped = lined(run.fine_x, [(mean, "swapped", "Swapped out")], "one")
    total = count(run.summary["meta"].get("num_cpu_blocks") or 0)
    note = f"Blocks of swapped requests, in a pool of {total}."
    drawn = [*swapped, *_peak(run, "cpu_used_blocks")]
    yield run.figure("cpu-blocks", "CPU block use", note, drawn, titled("CPU blocks"))


def _peak(run: View, column: str) -> list[Trace]:
    """A thin line of peaks if the bins hide peaks of the mean."""
    if run.fine.exact:
        return []
    high = held(run.fine.high[column])
    return [line(run.fine_x, high, "peak", "Most within a bin", shape="hv", width=1)]


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
    if "new_token_ratio_ppm" not in run.fine.mean:
        return
    ratio = run.fine.mean["new_token_ratio_ppm"] / 1e6
    note = "Share of the announced tokens for which SGLang reserves memory. It falls with every"
    note += " decode step; a retraction estimates it anew."
    drawn = [step_line(run.fine_x, ratio, "ink", "New-token ratio")]
    id, title, y = "new-token-ratio", "New-token ratio", titled("ratio")
    yield run.figure(id, title, note, drawn, y, keyed=False)


def _batch(run: View) -> Iterator[Figure]:
    mean, x = run.coarse.mean, run.coarse_x
    [prompts] = lined(x, [(mean["prefill_tokens"], "prefill", "Prompt tokens")], "one")
    [decodes] = lined(x, [(mean["decode_seqs"], "decode", "Decoding sequences")], "two")
    drawn = [prompts, {**decodes, "yaxis": "y2"}]
    note = "What the running step computes, averaged over time;"
    note += f" {count(run.summary['steps'])} steps."
    y = titled("tokens", domain=[0.55, 1], tickformat="~s")
    below = titled("sequences", domain=[0, 0.45])
    yield run.figure("batch", "Batch composition", note, drawn, y, yaxis2=below, height=280)


def _hit_rate(run: View) -> Iterator[Figure]:
    if not run.summary["meta"].get("prefix_caching"):
        return
    bins = run.sums(run.steps["start_ns"], BARS)
    hits, computed = (bins.of(run.steps[column]) for column in ("cached_tokens", "prefill_tokens"))
    so_far = 100 * ratios(np.cumsum(hits), np.cumsum(hits + computed))
    drawn = [
        bins.bars(100 * ratios(hits, hits + computed), "cached", "In each bar"),
        step_line(bins.x, so_far, "ink", "Since the start"),
    ]
    note = "Share of scheduled prompt tokens whose computation a hit saved, re-admissions included."
    y = titled("tokens (%)")
    yield run.figure("hit-rate", "Prefix cache hit rate", note, drawn, y, bargap=0)


def _fragmentation(run: View) -> Iterator[Figure]:
    meta, mean = run.summary["meta"], run.coarse.mean
    slots = mean["used_blocks"] * int(meta.get("block_size") or 0)
    pool = np.full(len(slots), float(meta.get("num_gpu_blocks") or 0))
    lines = (
        ("empty_slots", slots, "internal", "Internal: empty slots of used blocks"),
        ("stranded_blocks", pool, "external", "External: free blocks that no admission can use"),
    )
    shown = [
        (100 * ratios(mean[column], whole), colour, label)
        for column, whole, colour, label in lines
        if mean[column].any()
    ]
    if shown:
        note = "Memory that is allocated or free, but cannot be used."
        drawn, y = lined(run.coarse_x, shown), titled("share (%)")
        yield run.figure("fragmentation", "Fragmentation", note, drawn, y, height=180)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 100 else count(value)
