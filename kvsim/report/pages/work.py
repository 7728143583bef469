"""Draws what steps took, and what for, over simulated time and against their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvsim.core.sums import added
from kvsim.cost.bounds import Bounds
from kvsim.errors import ConfigError
from kvsim.machine.hardware import load_hardware
from kvsim.machine.models import model_of
from kvsim.report.pages.figures import (
    Figure,
    chart,
    compact,
    held,
    points,
    ratios,
    rows_axis,
    scale,
    step_line,
    thinned,
    time_unit,
    titled,
)
from kvsim.report.pages.view import BARS, DOTS, LEAST_SHARE, RATES, View, lined, mean_and_longest
from kvsim.results.ledger import KERNEL_LABELS
from kvsim.results.numerals import count, percent
from kvsim.results.phases import Ints
from kvsim.results.summary import bare
from kvsim.settings.config import make_config

LANE_STEPS = 32
"""Steps whose way through a pipeline is drawn."""


def _lasts(run: View) -> Ints:
    return np.asarray(run.steps["end_ns"] - run.steps["start_ns"])


def _tokens(run: View) -> Ints:
    """What each step computes: prompt tokens, a token per decode, and drafts."""
    names = ("prefill_tokens", "decode_seqs", "draft_tokens")
    return added(run.steps[name] for name in names if name in run.steps)


def _step_time(run: View) -> Iterator[Figure]:
    lasts = _lasts(run)
    unit, ns = time_unit(lasts)
    ones = np.ones(len(lasts), np.int64)
    drawn = mean_and_longest(run, run.steps["end_ns"], lasts, ones, ns, "used", "Mean over steps")
    note, y = f"{count(len(lasts))} steps.", titled(f"step ({unit})", **scale(lasts / ns, 50))
    yield run.figure("step-time", "Step time", note, drawn, y)


def _kernels(run: View) -> Iterator[Figure]:
    bins = run.sums(run.steps["start_ns"], RATES)
    sums = {name: bins.of(run.steps[name]) for name in KERNEL_LABELS if name in run.steps}
    busy = added(sums.values())
    if not busy.any():
        return
    whole = np.maximum(busy, np.diff(bins.edges_ns))
    shown = (
        (held(100 * each / whole), f"kernel-{bare(name)}", KERNEL_LABELS[name].capitalize())
        for name, each in sums.items()
        if each.sum() > LEAST_SHARE * busy.sum()
    )
    note = f"Steps take {percent(min(1.0, busy.sum() / run.end_ns))} of the time; above: idle."
    drawn, y = lined(bins.x, shown, "one"), titled("time (%)", range=[0, 101])
    title = "Where the time of steps went"
    yield run.figure("kernels", title, note, drawn, y, height=240)


def _utilisation(run: View) -> Iterator[Figure]:
    """Arithmetic and traffic over the peaks of the data sheet, idle time included."""
    meta = run.summary["meta"]
    bounds = _peaks(meta)
    if bounds is None:
        return
    bins, tokens = run.sums(run.steps["start_ns"], RATES), _tokens(run)
    columns = tokens, run.steps["decode_seqs"], run.steps["context_tokens"], tokens > 0
    sums = [bins.of(column).astype(np.int64).tolist() for column in columns]
    spent = [_spent_ns(bounds, *each) for each in zip(*sums, strict=True)]
    width = np.diff(bins.edges_ns) * meta["config"]["pipeline_parallel_size"]
    flops, traffic = (100 * np.array(each) / width for each in zip(*spent, strict=True))
    named = [(held(flops), "prefill", "FLOPs (MFU)"), (held(traffic), "used", "Bandwidth (MBU)")]
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
        config = make_config(meta["config"])
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
        step_line(bins.x, held(100 * ratios(taken, made)), "ink", "Accepted share")
        | {"yaxis": "y2"},
    ]
    whole = percent(run.summary["spec_decode_accepted_share"] or 0.0)
    note = f"Drafts verified, per bar; {whole} of all were accepted."
    y, below = (
        titled("tokens", domain=[0.48, 1]),
        titled("accepted (%)", domain=[0, 0.36], range=[0, 101]),
    )
    further: dict[str, Any] = {"yaxis2": below, "height": 280, "barmode": "stack", "bargap": 0}
    yield run.figure("drafts", "Drafts", note, drawn, y, **further)


def _bubbles(run: View) -> Iterator[Figure]:
    """What the stages of a pipeline do while any step is under way."""
    if "stage_wait_ns" not in run.steps:
        return
    start, end = run.steps["start_ns"], run.steps["end_ns"]
    bins = run.sums(start, RATES)
    moved, waits, host = (
        run.steps[name].astype(np.int64) for name in ("send_ns", "stage_wait_ns", "host_ns")
    )
    under_way = np.maximum(end - np.maximum(start, np.append(0, end[:-1])), 0)
    whole = bins.of(under_way) * run.summary["meta"]["config"][_STAGES]
    busy = bins.of(end - start - moved - waits - host)
    idle = held(100 * (1 - np.minimum(ratios(busy, whole), 1)))
    share = percent(run.summary["pipeline_bubble_share"] or 0.0)
    note = f"Share of the stages' time in which they compute nothing; {share} over the whole run."
    drawn, y = (
        lined(bins.x, [(idle, "part-stage_wait", "Idle")]),
        titled("time (%)", range=[0, 101]),
    )
    yield run.figure("bubbles", "Pipeline bubbles", note, drawn, y, keyed=False)


_STAGES = "pipeline_parallel_size"

WORK = (_step_time, _kernels, _utilisation, _drafts, _bubbles)
"""Makers of figures over time."""


def step_figures(run: View) -> list[Figure]:
    """Steps against their size, and on the stages of a pipeline."""
    return [*_against_tokens(run), *_lanes(run)] if len(run.steps["start_ns"]) > 1 else []


def _against_tokens(run: View) -> Iterator[Figure]:
    lasts, tokens, prompts = _lasts(run), _tokens(run), run.steps["prefill_tokens"] > 0
    unit, ns = time_unit(lasts)
    drawn = []
    for those, colour, label in _kinds(prompts & (tokens > 0), ~prompts & (tokens > 0)):
        places = np.flatnonzero(those)
        shown = places[thinned(len(places), DOTS // 2)]
        x, y = compact(tokens[shown]), compact(lasts[shown] / ns)
        drawn.append(points(x, y, colour, size=4, opacity=0.5) | {"name": label})
    x_axis = titled("tokens in the step", showgrid=True, **scale(tokens[tokens > 0]))
    y_axis = titled(f"step ({unit})", **scale(lasts[lasts > 0] / ns))
    note = "A dot for each step, of many a sample. A flat floor is memory-bound, a slope is"
    note += " compute-bound."
    title = "Step time by tokens"
    yield chart("step-tokens", title, note, drawn, x_axis, y_axis, hovermode="closest", height=280)


def _kinds(prompts: Any, decodes: Any) -> list[tuple[Any, str, str]]:
    """Which steps have prompts, and which have none; those of which there is any."""
    kinds = (prompts, "prefill", "With prompts"), (decodes, "decode", "Decodes only")
    return [kind for kind in kinds if kind[0].any()]


def _lanes(run: View) -> Iterator[Figure]:
    """Some steps on their way through the stages, from the middle of the run."""
    stages = run.summary["meta"].get("cost", {}).get("stages")
    layers = (stages or {}).get("layers")
    if "stage_wait_ns" not in run.steps or not layers:
        return
    first = max(0, (len(run.steps["start_ns"]) - LANE_STEPS) // 2)
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
    computes there: as `kvsim.run.replica.pipeline` places them, but for waits for tokens."""
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
