"""Shows where swapping beats recomputing: rows of a table, and one HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from kvsim.cost.crossover import Crossing, ModelCrossings
from kvsim.report.pages.figures import Figure, chart, compact, line, log_axes, rule
from kvsim.report.pages.html import document, id_of, join, lead, panel, placed, table
from kvsim.report.wording import time_source

DASHES = {"layer": "solid", "cross": "dash"}
TOKENS = "tokens of the request"
COLOURS = 5
"""Colours of models: those of compared runs, without the first, which is grey."""


def head(model: ModelCrossings) -> list[str]:
    """Names of the columns of `rows`."""
    layouts = ((layout, "equal") for layout in model.link)
    return ["tokens", "recompute", *chain.from_iterable(layouts), "cheapest"]


def rows(model: ModelCrossings) -> list[list[str]]:
    """One row per length: the time of recomputing, and the times of swapping by layout."""
    return [_row(crossing) for crossing in model.crossings]


def caption(model: ModelCrossings) -> str:
    """The model and its KV cache."""
    return (
        f"{model.name}: {model.token_bytes / 1024:,.0f} KiB a token,"
        f" {model.block_bytes / 2**20:,.2f} MiB a block"
    )


def priced(model: ModelCrossings) -> str:
    """Where the times of recomputing come from, with their label."""
    return time_source({"cost": {"kind": model.kind, "source": model.source}})


UNITS = (
    "Microseconds per token, swapping out and in; equal: link speed at which both cost the same."
)


def build_crossover(models: Sequence[ModelCrossings], hardware: str, lengths: Sequence[int]) -> str:
    """The page; its table lists requests of `lengths` tokens, its curves show all lengths."""
    listed = [
        model._replace(crossings=[each for each in model.crossings if each.tokens in lengths])
        for model in models
    ]
    sections = {
        "Where swapping wins": join((lead(_LEAD), placed([_even(models)]))),
        "Times": placed([_times(i, model) for i, model in enumerate(models)]),
        "Table": join((lead(UNITS), *(panel(caption(m), table(head(m), rows(m))) for m in listed))),
        "Sources": panel(
            None, table(("model", "recompute", "link"), map(_sources, models), text_columns=3)
        ),
    }
    return document(
        "kvsim crossover",
        f"Swap or recompute on {hardware}",
        sections,
        subject="Both prices are of one request alone: a prompt step, and copies out and in.",
        remarks=[(_verdict(model, layout), "plain") for model in models for layout in model.link],
    )


_LEAD = (
    "A request that is preempted can be moved to the CPU and back, or computed again. Above a curve"
    " moving takes less time, below it computing does. Where there is no curve, the copies alone"
    " take longer than computing at any bandwidth. The grey line is the hardware's link. Layer: a"
    " block is copied layer by layer, keys and values apart; cross: all layers in one copy."
)


def _row(crossing: Crossing) -> list[str]:
    def each(ns: int) -> str:
        return f"{ns / 1e3 / crossing.tokens:,.1f}"

    cells = [f"{crossing.tokens:,}", each(crossing.recompute_ns)]
    for layout_name, swap_ns in crossing.swap_ns.items():
        even = crossing.break_even_gb_s[layout_name]
        cells += [each(swap_ns), "never" if even is None else f"{even:,.1f}"]
    times = {"recompute": crossing.recompute_ns, **crossing.swap_ns}
    return [*cells, min(times, key=times.__getitem__)]


def _sources(model: ModelCrossings) -> list[object]:
    links = [
        f"{layout}: {_copies(link)} a block of {link['block_bytes']:,} bytes,"
        f" {link['bandwidth_gb_s']:g} GB/s, at least {link['copy_overhead_us']:g} µs each"
        for layout, link in model.link.items()
    ]
    return [id_of(model.name), priced(model), "; ".join(links)]


def _verdict(model: ModelCrossings, layout: str) -> str:
    """The lengths at which swapping is cheaper, of all that are drawn."""
    found = groupby(model.crossings, key=lambda each: each.swap_ns[layout] < each.recompute_ns)
    spans = [[each.tokens for each in group] for cheaper, group in found if cheaper]
    whole = [each.tokens for each in model.crossings]
    winner = "swapping" if spans else "recomputing"
    every = "at every length, " if spans in ([], [whole]) else ""
    where = " and ".join(
        f"from {span[0]:,} to {span[-1]:,}" if span[1:] else f"at {span[0]:,}"
        for span in spans or [whole]
    )
    fate = f"{winner} is cheaper {every}{where} tokens"
    return f"{model.name}, {_copies(model.link[layout])} a block ({layout}): {fate}."


def _copies(link: Mapping[str, Any]) -> str:
    pieces = link["pieces_per_block"]
    return "1 copy" if pieces == 1 else f"{pieces} copies"


def _even(models: Sequence[ModelCrossings]) -> Figure:
    data = [
        line(
            [each.tokens for each in model.crossings],
            compact(each.break_even_gb_s[name] or math.nan for each in model.crossings),
            f"run-{1 + i % COLOURS}",
            f"{model.name}, {name}",
            dash=DASHES[name],
            legendgroup=model.name,
        )
        for i, model in enumerate(models)
        for name in model.link
    ]
    link = next(iter(models[0].link.values()))["bandwidth_gb_s"]
    title, note = "Bandwidth at which both cost the same", "Solid: layer; dashed: cross."
    axes, shapes = log_axes(TOKENS, "link (GB/s)", data), [rule("y", link, "muted", 1.5)]
    return chart("even", title, note, data, *axes, height=380, shapes=shapes)


def _times(i: int, model: ModelCrossings) -> Figure:
    x = [each.tokens for each in model.crossings]
    recompute = compact(each.recompute_ns / 1e6 for each in model.crossings)
    data = [line(x, recompute, "recompute", "recompute")]
    for name in model.link:
        swap = compact(each.swap_ns[name] / 1e6 for each in model.crossings)
        data.append(line(x, swap, "swap", f"swap, {name}", dash=DASHES[name]))
    axes = log_axes(TOKENS, "time (ms)", data)
    return chart(f"times-{i}", model.name, "", data, *axes, height=280)
