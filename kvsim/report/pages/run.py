"""Writes the report of one run, with its origin, how to repeat it, and where its memory went; and
every request: maps of their lengths, and a table to search, filter and open.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsim.core.vectors import added
from kvsim.report import wording
from kvsim.report.pages.block_map import block_map_section, tier_use
from kvsim.report.pages.figures import (
    Axis,
    Figure,
    chart,
    compact,
    log_ticks,
    ratios,
    time_unit,
    titled,
)
from kvsim.report.pages.html import (
    Html,
    card,
    cards,
    columns,
    document,
    element,
    facts,
    id_of,
    join,
    key_of,
    lead,
    panel,
    placed,
    shares,
    strip,
    tags,
    text_of,
    written,
)
from kvsim.report.pages.html import table as table_of
from kvsim.report.pages.latencies import cause_figures, distribution_figures
from kvsim.report.pages.over_time import limits_words, one_axis, step_figures, time_figures
from kvsim.report.pages.view import View, look_at
from kvsim.report.wording import time_source
from kvsim.results.blockmap import BlockMap
from kvsim.results.ledger import KERNEL_LABELS, PROMPT_LABELS, TIME_LABELS, TIME_PARTS
from kvsim.results.metrics import LATENCIES
from kvsim.results.numerals import MISSING, count, milliseconds, plural, seconds, show, size
from kvsim.results.plain import flat, to_toml
from kvsim.results.statistics import LISTED, completed, ints, ratio
from kvsim.results.summary import SHOWN, bare, good_requests

MOST_BYTES = 400_000
"""Most bytes of packed requests; of a longer run, the page holds the slowest."""

_MOST = 25_000
"""More requests than `MOST_BYTES` can hold."""

_INSTANTS = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
_COUNTS = ("input_length", "output_tokens", "num_cached_tokens", "num_preemptions")
_FILTERS = {
    "": "all requests",
    "completed": "completed",
    "missed": "completed beyond a limit",
    "preempted": "preempted",
    "failed": "not completed",
}

_TIME = {bare(name): label for name, label in TIME_LABELS.items()}

HIT_RATES = {
    "prefix_cache_hit_rate": (
        "Prompt tokens, first admissions",
        "vLLM V1: hits over queries; what a preempted request finds again does not count",
    ),
    "prefix_cache_hit_rate_with_preempted": (
        "Tokens, re-admissions included",
        "adds what preempted requests found again or had to compute again",
    ),
    "prefix_cache_block_hit_rate": (
        "Block look-ups",
        "vLLM 0.6.3: look-ups of full blocks that found one",
    ),
    "prefix_cache_request_hit_share": ("Requests with any hit", "share of admitted requests"),
}
"""Key of a summary → what the rate is of, and its definition."""


def explorer(run: View) -> Html:
    """A table of requests, the slowest first, and what its script needs to fill it."""
    e2el = run.durations["e2el"]
    order = np.argsort(-np.nan_to_num(e2el, nan=np.inf), kind="stable")[:_MOST]
    packed = _packed(run, order)
    while len(packed) > MOST_BYTES:
        # A little below proportion, as fewer requests compress worse: mostly one round will do.
        order = order[: int(0.95 * len(order) * MOST_BYTES / len(packed))]
        packed = _packed(run, order)
    words = "Every request: search by id, choose which, sort by a heading, click one for its story."
    if len(order) < len(e2el):
        words = f"The {plural(len(order), 'slowest request')} of {count(len(e2el))}."
        words += " `kvsim why` tells the story of any other."
    good = good_requests(run.durations, run.summary["meta"].get("goodput"))
    options = (
        element("option", label, value=value)
        for value, label in _FILTERS.items()
        if value != "missed" or good is not None
    )
    controls = element(
        "div",
        element("input", type="search", placeholder="Search by id", aria_label="Search by id"),
        element("select", *options, aria_label="Which requests"),
        element("span", class_="muted", id="requests-shown"),
        class_="controls",
    )
    data = Html(f'{{"packed":"{b64encode(packed).decode()}"}}')
    return join(
        (
            lead(words),
            element(
                "div", controls, element("div", class_="scroll"), id="explorer", class_="panel"
            ),
            element("script", data, type="application/json", id="requests-data"),
            element("script", Html(text_of("requests.js"))),
        )
    )


def length_figures(run: View) -> list[Figure]:
    """How many requests have which lengths, and how long they take; nothing for few requests."""
    prompts, outputs = (np.asarray(run.requests[name], float) for name in _COUNTS[:2])
    e2el = run.durations["e2el"]
    done = completed(run.requests) & (prompts > 0) & (outputs > 0)
    if done.sum() < 2:
        return []
    x, y = _edges(prompts[done]), _edges(outputs[done])
    number, *_ = np.histogram2d(outputs[done], prompts[done], (y, x))
    total, *_ = np.histogram2d(outputs[done], prompts[done], (y, x), weights=e2el[done])
    mean = ratios(total, number)
    unit, ns = time_unit([float(np.nanmax(mean))])
    number[number == 0] = np.nan
    maps = (
        ("lengths-number", "How many", "requests", number, ":,.0f"),
        ("lengths-e2el", "How long they take", f"E2EL, mean ({unit})", mean / ns, ":.3~g"),
    )
    return [_map(id, title, unit, x, y, z, form) for id, title, unit, z, form in maps]


def _edges(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Powers of two around all lengths."""
    first, last = np.floor(np.log2(lengths.min())), np.floor(np.log2(lengths.max())) + 1
    return np.asarray(2.0 ** np.arange(first, last + 1))


def _map(
    id: str,
    title: str,
    unit: str,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    z: NDArray[np.float64],
    form: str,
) -> Figure:
    texts = [
        [f"prompt {_span(x, j)}, output {_span(y, i)}" for j in range(len(x) - 1)]
        for i in range(len(y) - 1)
    ]
    data = {
        "type": "heatmap",
        "x": x.tolist(),
        "y": y.tolist(),
        "z": [compact(row) for row in z],
        "text": texts,
        "hovertemplate": f"%{{text}}: <b>%{{z{form}}}</b><extra></extra>",
        "colorscale": [[0, "var(--least)"], [1, "var(--most)"]],
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": unit, "side": "right"}},
    }
    across, up = (
        titled(f"{name} tokens", **_within(edges)) for name, edges in (("prompt", x), ("output", y))
    )
    margin = {"r": 10}
    return chart(id, title, "", [data], across, up, height=320, hovermode="closest", margin=margin)


def _within(edges: NDArray[np.float64]) -> Axis:
    """A logarithmic axis from the first to the last edge; every second power of two is written."""
    powers = edges[:: max(1, len(edges) // 5)]
    return {
        **log_ticks(edges[0], edges[-1]),
        "tickvals": powers.tolist(),
        "ticktext": [f"{power:,.0f}" for power in powers],
        "range": [float(np.log10(edges[0])), float(np.log10(edges[-1]))],
    }


def _span(edges: NDArray[np.float64], i: int) -> str:
    return f"{count(edges[i])} to {count(edges[i + 1] - 1)} tokens"


def _packed(run: View, order: NDArray[np.intp]) -> bytes:
    """The requests in this order as compressed JSON: a list for each column."""
    # Level 6 makes it a tenth smaller, and takes longer than the rest of the page.
    return zlib.compress(msgspec.json.encode(dict(_columns(run, order))), level=1)


def _columns(run: View, order: NDArray[np.intp]) -> Iterator[tuple[str, Any]]:
    """Instants and parts in microseconds, -1 for what never happened."""
    requests = run.requests
    places = order.tolist()
    yield "index", places
    for name in ("id", "status", "reason"):
        texts = requests[name]
        yield name, [str(texts[i]) for i in places]
    for name in _INSTANTS:
        times = np.asarray(requests[name])[order]
        yield bare(name), np.where(times < 0, -1, times // 1000).tolist()
    for name in _COUNTS:
        yield name, np.asarray(requests[name])[order].tolist()
    good = good_requests(run.durations, run.summary["meta"].get("goodput"))
    yield "good", None if good is None else good[order].astype(int).tolist()
    parts_us = {n: ints(requests[n])[order] // 1000 for n in TIME_PARTS}
    yield "parts", {bare(name): us.tolist() for name, us in parts_us.items() if us.any()}
    yield "labels", {bare(name): label for name, label in TIME_LABELS.items()}


def build_page(
    summary: Mapping[str, Any],
    requests: Mapping[str, Any],
    steps: Mapping[str, Any],
    block_map: BlockMap | None = None,
) -> str:
    """The report of a run, for `report.html`: the result and the arguments of `summarise`."""
    run, meta = look_at(summary, requests, steps), summary["meta"]
    timed, lengths, sized = time_figures(run), length_figures(run), step_figures(run)
    held = placed(one_axis([*tier_use(block_map, run)]))
    spread = distribution_figures(
        [("requests", "used", run.durations)], goals=meta.get("goodput") or {}
    )
    rates = [[*words, show(summary[key], "share")] for key, words in HIT_RATES.items()]
    rates = rates if meta.get("prefix_caching") else []
    tiers = [[label, ", ".join(parts)] for label, parts in wording.tier_figures(summary)]
    sections = {
        "Key figures": cards(figure_cards(summary)),
        "Latency": _latency(summary, spread, cause_figures(run)),
        "Where time went": _ledger(summary),
        "Over time": join((lead(_OVER_TIME), placed(timed))) if timed else lead(_NO_STEP),
        "Steps": placed(sized, "duo"),
        "Block map": block_map_section(block_map, run),
        "Lengths": join((lead(_LENGTHS), placed(lengths, "duo"))) if lengths else None,
        "Requests": _requests(run),
        "Prefix cache": _words(rates, "Hit rate of", "Definition", ""),
        "Tiers": join((_words(tiers, "KV offload", ""), held)),
        "Memory": memory_panel(meta),
        "Provenance": provenance_panels(meta),
    }
    path = (meta.get("trace") or {}).get("path")
    return document(
        "kvsim run",
        PurePath(str(path)).name if path else "Run",
        sections,
        subject=wording.subject(meta),
        about=[labels(summary)],
        remarks=wording.verdict(summary),
    )


_OVER_TIME = (
    "Point at a chart to read all of them at that instant. Drag across one to zoom all,"
    " double-click to see the whole run again."
)
_NO_STEP = "No step was run, so there is nothing to draw."
_LENGTHS = "Requests by the tokens of their prompt and of their output."


def _words(rows: list[list[str]], *head: str) -> Html | None:
    """A table of words, with a figure at most at the end of a row; None without rows."""
    return panel(None, table_of(head, rows, text_columns=2)) if rows else None


def labels(summary: Mapping[str, Any]) -> Html:
    """Labels for how the run ended and where its step times come from."""
    return tags([ended_label(summary), source_label(summary["meta"])])


def ended_label(summary: Mapping[str, Any]) -> tuple[str, str]:
    """How the run ended, and the tone of that."""
    tones = [remark.tone for remark in wording.diagnosis(summary)]
    fine = "good" if tones in ([], ["plain"]) else tones[0]
    return wording.outcome_title(summary), fine if wording.finished(summary) else "bad"


def source_label(meta: Mapping[str, Any]) -> tuple[str, str]:
    """Where step times come from, and the tone of that."""
    return wording.time_source(meta), "good" if wording.measured(meta) else "warning"


def figure_cards(summary: Mapping[str, Any]) -> list[Html]:
    """The key figures at a glance."""

    def figure(key: str, unit: str) -> str:
        return show(summary[key], unit)

    by_mode, meta = summary["num_preemptions_by_mode"], summary["meta"]
    served = figure("request_throughput", "requests/s")
    tokens = figure("total_token_throughput", "tokens/s")
    shown = [
        card(
            "Output throughput",
            figure("output_throughput", "tokens/s"),
            f"{served}, {tokens} with prompts",
        )
    ]
    if summary["request_goodput"] is not None:
        kept = show(ratio(summary["request_goodput"], summary["request_throughput"]), "share")
        detail = f"{kept} of completed: {limits_words(meta['goodput'])}"
        shown.append(card("Goodput", figure("request_goodput", "requests/s"), detail))
    for kind in ("ttft", "tpot", "e2el"):
        p50, p99, mean = (figure(f"{name}_{kind}_ms", "ms") for name in ("p50", "p99", "mean"))
        shown.append(card(f"{LATENCIES[kind]} p50", p50, f"p99 {p99}, mean {mean}"))
    most, total = figure("kv_cache_usage_max", "share"), show(meta.get("num_gpu_blocks"), "blocks")
    mean = figure("kv_cache_usage_mean", "share")
    shown.append(card("KV cache in use", mean, f"mean; at most {most} of {total} blocks"))
    again = f"{count(summary['recomputed_tokens'])} tokens computed again"
    moved = f"{count(summary['swapped_out_blocks'])} blocks swapped out"
    costs = ", ".join([again] * bool(by_mode["recompute"]) + [moved] * bool(by_mode["swap"]))
    shown.append(card("Preemptions", count(summary["num_preemptions"]), costs or "none"))
    if meta.get("prefix_caching"):
        hit, asked = (count(summary[f"prefix_cache_{key}_tokens"]) for key in ("hit", "query"))
        rate = figure("prefix_cache_hit_rate", "share")
        shown.append(card("Prefix cache hit rate", rate, f"{hit} of {asked} prompt tokens"))
    longest = f"mean; at most {plural(summary['waiting_max'], 'request')}"
    return [*shown, card("Waiting in the queue", figure("mean_queue_ms", "ms"), longest)]


def _latency(summary: Mapping[str, Any], figures: list[Figure], causes: list[Figure]) -> Html:
    words = "Of completed requests, from the arrival at the engine. Each curve shows the share"
    words += " of requests whose latency is at most the value on the axis."
    if summary["meta"].get("goodput"):
        words += " Dotted: the limits of the goodput."
    table = panel(None, table_of(["", *LISTED], wording.latency_rows(summary)))
    return join((lead(words), placed(figures, "trio"), table, placed(causes, "duo")))


def _requests(run: View) -> Html:
    if not len(run.requests["id"]):
        return lead("The trace has no requests.")
    parts: list[object] = [explorer(run)]
    if run.summary["rejected"]:
        parts += [element("h3", "Rejected requests"), _rejected(run.summary, run.requests)]
    return join(parts)


def _rejected(summary: Mapping[str, Any], requests: Mapping[str, Any]) -> Html:
    """Rejected requests by reason, with the first few of each."""
    rows = []
    everyone = list(zip(requests["id"], requests["status"], requests["reason"], strict=True))
    for reason, number in summary["rejected_by_reason"].items():
        names = [
            str(id)
            for id, status, why in everyone
            if status == "rejected" and (str(why) or "unknown") == reason
        ]
        shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
        share = show(ratio(number, summary["num_requests"]), "share")
        rows.append(
            [reason, id_of(shown), wording.remedy_of(summary, reason), count(number), share]
        )
    columns = ["Reason", "Requests", "Remedy", "Number", "Share"]
    return panel(None, table_of(columns, rows, text_columns=3))


def _ledger(summary: Mapping[str, Any]) -> Html:
    """Where the time of requests and steps and the prompt tokens went."""
    parts: list[object] = []
    if summary["completed"]:
        parts += [element("h3", "Requests, from arrival to end"), _mean_and_slow(summary)]
    steps, tokens = summary["step_time_s"], summary.get("prompt_ledger_tokens", {})
    if any(steps.values()):
        kernels = _shares(steps, KERNEL_LABELS, "kernel", seconds)
        parts += [element("h3", "Steps, by kernel"), kernels]
    if any(tokens.values()):
        found, lost = summary["prefix_cache_preempted_hit_tokens"], summary["recomputed_tokens"]
        again = f"First admissions only. After preemptions, {count(found)} tokens were found again"
        prompts = _shares(tokens, PROMPT_LABELS, "prompt", count)
        parts += [element("h3", "Prompt tokens and the prefix cache"), prompts]
        parts.append(lead(f"{again} and {count(lost)} were computed again."))
    return join(parts or [lead("Nothing was completed and no step was run.")])


def _mean_and_slow(summary: Mapping[str, Any]) -> Html:
    """The mean request, the requests at p50 and p99 of E2EL, and every part over all requests."""
    bars = {"Mean request": summary["time_ledger_mean_ms"]}
    for name, one in summary["time_ledger_requests"].items():
        bars[f"{name} of E2EL: {one['id']}"] = one["parts_ms"]
    longest = max(added(parts.values()) for parts in bars.values())
    seen = [name for name in _TIME if any(parts[name] for parts in bars.values())]
    strips = [
        (title, _strip(parts, longest), milliseconds(added(parts.values())))
        for title, parts in bars.items()
    ]
    total = summary["time_ledger_total_s"]
    whole = added(total.values())
    figures = [summary[f"time_ledger_{each}_ms"] for each in SHOWN]
    rows = [
        [
            label,
            seconds(total[name]),
            show(ratio(total[name], whole), "share"),
            *(show(each[name], "ms") for each in figures),
        ]
        for name, label in _TIME.items()
        if total[name]
    ]
    return panel(
        None,
        lead(
            "Parts add up, to the nanosecond. Percentiles in the table are of each part by itself."
        ),
        table_of(["", "Where its time went", "E2EL"], strips, text_columns=2),
        key_of((f"part-{name}", _TIME[name]) for name in seen),
        table_of(["Completed requests", "Total", "Share", *SHOWN], rows),
    )


def _strip(parts: Mapping[str, float], longest: float) -> Html:
    """A bar whose parts have the lengths of a request's parts, in milliseconds."""
    return strip(
        (f"part-{name}", (parts[name] or 0.0) / longest, f"{label}: {milliseconds(parts[name])}")
        for name, label in _TIME.items()
        if longest and parts[name]
    )


def _shares(
    values: Mapping[str, float],
    labels: Mapping[str, str],
    family: str,
    write: Callable[[float], str],
) -> Html:
    """A bar of the parts of a whole, in the colours of a family."""
    parts = ((bare(name), label) for name, label in labels.items())
    colours = ((f"{family}-{name}", values.get(name, 0), label) for name, label in parts)
    return panel(None, shares(colours, write))


MEMORY = {
    "weight_bytes": ("weights", "memory-weights"),
    "drafter_bytes": ("drafter", "memory-drafter"),
    "adapter_bytes": ("slots for adapters", "memory-adapters"),
    "activation_bytes": ("activations, estimated", "memory-activations"),
    "sampler_bytes": ("sampler, estimated", "memory-sampler"),
    "overhead_bytes": ("overhead, estimated", "memory-overhead"),
    "communication_bytes": ("communication, estimated", "memory-communication"),
    "cudagraph_bytes": ("CUDA graphs, estimated", "memory-cudagraphs"),
    "kv_bytes": ("KV blocks", "used"),
}
"""Terms of a budget, `kvsim.machine.memory.Budget`, that add up to the memory the engine may
use."""


def provenance_panels(meta: Mapping[str, Any]) -> Html:
    """Command, trace, versions, time source and the full configuration."""
    trace, config, router, assumed, server, cost, link = (
        meta.get(key) or {}
        for key in ("trace", "config", "router", "assumed", "server", "cost", "link")
    )
    origin = {
        "Trace": trace.get("path"),
        "Trace format": trace.get("format"),
        "Trace SHA-256": trace.get("sha256"),
        "Requests in the trace": trace.get("requests"),
        "Seed": meta.get("seed"),
        "kvsim": meta.get("kvsim_version"),
        "Engine": meta.get("engine"),
        "Replicas": f"{meta['replicas']} behind {router['name']}" if router else None,
        **{f"Router, {key}": value for key, value in (router.get("args") or {}).items()},
        "Scheduler": meta.get("scheduler"),
        "Block manager": meta.get("block_manager"),
        "Step times": time_source(meta),
        "Oracles": ", ".join(meta.get("oracles") or ()) or None,
    }
    notes = _notes("Notes of the trace reader", trace), _notes("Notes", meta)
    defaults = {
        key: f"{written(key, each['value'])} ({each['source']})" for key, each in assumed.items()
    }
    served = {key: f"{written(key, config.get(key))} ({place})" for key, place in server.items()}
    panels = (
        panel("Origin", facts(origin), *notes),
        _listed("Assumed settings", defaults),
        _listed("From the server", served),
        panel("Configuration", element("pre", to_toml(config))),
        _listed("Cost model", flat(cost)),
        _listed("Link between GPU and CPU", flat(link)),
    )
    repeat = panel("To repeat it", element("pre", meta.get("command") or MISSING))
    return join((repeat, columns(panels)))


def memory_panel(meta: Mapping[str, Any]) -> Html:
    """The budget of one GPU term by term, and the resulting blocks."""
    budget = flat(meta.get("memory") or {})
    blocks = panel("Blocks", facts(_blocks(budget, meta)))
    whole = budget.get("memory_bytes")
    if not whole:
        return blocks
    terms = dict(budget)
    if budget.get("num_gpu_blocks_overridden"):
        terms["kv_bytes"] = (budget.get("num_gpu_blocks") or 0) * (budget.get("block_bytes") or 0)
    parts = [
        (colour, max(terms.get(key) or 0, 0), label) for key, (label, colour) in MEMORY.items()
    ]
    rest = whole - sum(amount for _, amount, _ in parts)
    bar = shares([*parts, ("free", max(rest, 0), "left to others")], size)
    beyond = f"; num_gpu_blocks_override takes {size(-rest)} more" if rest < 0 else ""
    return join((panel(f"Budget of one GPU, {size(whole)}{beyond}", bar), blocks))


def _listed(title: str, named: Mapping[str, Any]) -> Html | None:
    return panel(title, facts(named)) if named else None


def _blocks(budget: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of blocks and how they were computed; the other terms unchanged."""
    total = meta.get("num_gpu_blocks")
    slots = (total or 0) * (meta.get("block_size") or 0)
    told = {*MEMORY, "memory_bytes", "num_gpu_blocks", "num_cpu_blocks"}
    return {
        "GPU blocks of the run": total and f"{count(total)}, room for {count(slots)} tokens",
        "Kept free at admission": meta.get("watermark_blocks") or None,
        "CPU blocks of the run": meta.get("num_cpu_blocks") or None,
        "Tokens per block": meta.get("block_size"),
        **{key: value for key, value in budget.items() if value and key not in told},
    }


def _notes(title: str, table: Mapping[str, Any]) -> Html | None:
    """The `notes` of a table as a list under a title; none if there are none."""
    notes = [element("li", note) for note in table.get("notes") or ()]
    return join((element("h3", title), element("ul", *notes))) if notes else None
