"""Draws prices: the tables of a profile, and where swapping beats recomputing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from kvsim.cost.crossover import ModelCrossings
from kvsim.cost.profile import Curve, Fit, Grid, MixedGrid, Profile, distrust
from kvsim.report.pages.figures import Figure, chart, compact, line, log_axes, rule, thinned
from kvsim.report.pages.html import Html, document, facts, id_of, join, lead, panel, placed, table
from kvsim.report.wording import time_source
from kvsim.results.numerals import MISSING, plural
from kvsim.results.plain import flat

FIT_COLOURS = 6
LINES = 6
"""Most rows of a grid that are drawn."""
TITLES = {
    "dense": ("All layers without attention", "tokens in the step"),
    "head": ("Logits and sampler", "rows of logits"),
    "prefill": ("Attention of a prompt chunk, one layer", "tokens of the chunk"),
    "decode_v1": ("Decode attention in one pass, one layer", "mean length"),
    "decode_v2": ("Decode attention in partitions, one layer", "mean length"),
    "mixed": ("Attention of a chunk and decodes in one launch, one layer", "tokens of the chunk"),
}
"""Table of the fit → its title, and the count on its x axis."""
ERRORS = ("median_percent", "p95_percent", "max_percent", "bias_percent")

Drawn = tuple[str, Sequence[float], Sequence[float]]
"""A line: label, x, microseconds."""


def build_profile(profile: Profile) -> str:
    """The page of a profile."""
    made = profile.model
    fits = {profile.engine.block_size: profile.fit}
    fits |= {int(size): fit for size, fit in profile.others.items()}
    sections = {
        f"Blocks of {size} tokens": placed(list(_figures(fit, size)), "duo")
        for size, fit in fits.items()
    }
    sections["Errors"] = _errors(profile.error)
    sections["Origin"] = panel(None, facts(flat(_origin(profile))))
    model = f"{made.layers} layers, {made.dtype}, KV {made.kv_dtype}, tp {made.tp}"
    return document(
        "kvsim profile",
        f"{made.name} on {profile.device.get('name', 'an unnamed device')}",
        sections,
        subject=f"{profile.source} · {profile.created} · {model}",
        remarks=_verdict(profile.error),
    )


def error_rows(error: Mapping[str, Any]) -> list[tuple[str, int, list[float | None]]]:
    """Label, number of points and `ERRORS` of each table, as a whole and by region.

    These are errors of the fit on rows that it was not fitted to. Profiles with several block sizes
    keep those of the other sizes under `others`.
    """
    found = {name: each for name, each in error.items() if _judged(each)}
    for size, others in (error.get("others") or {}).items():
        found |= {f"{name}, block_size {size}": e for name, e in others.items() if _judged(e)}
    rows = []
    for name, whole in found.items():
        regions = {f"{name}, {key}": each for key, each in whole.items() if _judged(each)}
        for label, each in {name: whole, **regions}.items():
            rows.append((label, int(each["points"]), [each.get(key) for key in ERRORS]))
    return rows


def other_statements(error: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile says about its error besides `error_rows`."""
    return {key: each for key, each in error.items() if key != "others" and not _judged(each)}


def _verdict(error: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How well the fit predicts rows that it was not fitted to, at its worst table."""
    remarks = []
    known = [(each[0], label) for label, _, each in error_rows(error) if each[0] is not None]
    if known:
        worst, label = max(known)
        text = f"On rows held out, the median error is at most {worst:.3g} % ({label})."
        remarks.append((text, "plain"))
    else:
        remarks.append(("The profile states no error on rows held out.", "warning"))
    if why := distrust(error):
        remarks.append((f"Not trusted: {why}.", "bad"))
    return remarks


def _figures(fit: Fit, size: int) -> Iterator[Figure]:
    for name, (title, x_title) in TITLES.items():
        found = getattr(fit, name)
        drawn: list[Drawn] = []
        if isinstance(found, Curve):
            drawn = [("", found.x, found.us)]
        elif isinstance(found, Grid):
            drawn = _slices(name, found)
        elif isinstance(found, MixedGrid):
            drawn = _mixed_slices(found)
        if drawn:
            yield _figure(f"{name}-{size}", title, x_title, drawn)


def _slices(name: str, grid: Grid) -> list[Drawn]:
    """Decode by length for some numbers of sequences; prefill by tokens for some contexts, over the
    rows that are long enough to have them."""
    if name != "prefill":
        places = thinned(len(grid.x), LINES).tolist()
        return [(plural(int(grid.x[i]), "sequence"), grid.ctx, grid.us[i]) for i in places]
    drawn: list[Drawn] = []
    for j in thinned(len(grid.ctx), LINES).tolist():
        column = [(x, row[j]) for x, row in zip(grid.x, grid.us, strict=True) if len(row) > j]
        label, (x, us) = f"context {grid.ctx[j]:,g}", zip(*column, strict=True)
        drawn.append((label, x, us))
    return drawn


def _mixed_slices(grid: MixedGrid) -> list[Drawn]:
    """By the chunk's tokens, without context, for some numbers of decodes of the middle length."""
    middle = len(grid.kv) // 2
    drawn: list[Drawn] = []
    for k in thinned(len(grid.n), LINES).tolist():
        label = f"{grid.n[k]:,g} decodes of {grid.kv[middle]:,g}"
        drawn.append((label, grid.q, [rows[0][k][middle] for rows in grid.us]))
    return drawn


def _figure(name: str, title: str, x_title: str, drawn: Sequence[Drawn]) -> Figure:
    data = [
        line(x, compact(us), f"run-{(1 + i) % FIT_COLOURS}", label or title)
        for i, (label, x, us) in enumerate(drawn)
    ]
    axes, keyed = log_axes(x_title, "time (µs)", data), bool(drawn[0][0])
    return chart(name, title, "", data, *axes, keyed=keyed, height=300)


def _errors(error: Mapping[str, Any]) -> Html:
    """Errors on rows held out, and the profile's other statements."""
    rows = []
    for label, number, values in error_rows(error):
        cells = (MISSING if x is None else f"{x:,.2f}".replace("-", "−") for x in values)
        rows.append([label, f"{number:,}", *cells])
    head = ("table", "points", "median %", "p95 %", "max %", "bias %")
    others = facts(flat(other_statements(error)))
    return panel(None, join((table(head, rows) if rows else None, others)))


def _judged(value: Any) -> bool:
    return isinstance(value, Mapping) and "points" in value


def _origin(profile: Profile) -> dict[str, Any]:
    return {
        "device": profile.device,
        "software": profile.software,
        "block_size": profile.engine.block_size,
        "step": list(profile.fit.step),
        "launch_floor_us": profile.fit.launch_floor_us,
        "copied_block_us": profile.fit.copied_block_us,
        "ceilings": profile.ceilings,
        "rows measured": len(profile.rows),
    }


DASHES = {"layer": "solid", "cross": "dash"}
TOKENS = "tokens of the request"
MODEL_COLOURS = 5
"""Colours of models: those of compared runs, without the first, which is grey."""


def crossing_head(model: ModelCrossings) -> list[str]:
    """Names of the columns of `crossing_rows`."""
    layouts = ((layout, "equal") for layout in model.link)
    return ["tokens", "recompute", *chain.from_iterable(layouts), "cheapest"]


def crossing_rows(model: ModelCrossings) -> list[list[str]]:
    """One row per length: the time of recomputing, and the times of swapping by layout."""
    rows = []
    for crossing in model.crossings:
        times = {"recompute": crossing.recompute_ns, **crossing.swap_ns}
        written = {name: f"{ns / 1e3 / crossing.tokens:,.1f}" for name, ns in times.items()}
        cells = [f"{crossing.tokens:,}", written["recompute"]]
        for layout in crossing.swap_ns:
            even = crossing.break_even_gb_s[layout]
            cells += [written[layout], "never" if even is None else f"{even:,.1f}"]
        rows.append([*cells, min(times, key=times.__getitem__)])
    return rows


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
    tables = (
        panel(caption(each), table(crossing_head(each), crossing_rows(each))) for each in listed
    )
    sections = {
        "Where swapping wins": join((lead(_LEAD), placed([_even(models)]))),
        "Times": placed([_times(i, model) for i, model in enumerate(models)]),
        "Table": join((lead(UNITS), *tables)),
        "Sources": panel(
            None, table(("model", "recompute", "link"), map(_sources, models), text_columns=3)
        ),
    }
    return document(
        "kvsim crossover",
        f"Swap or recompute on {hardware}",
        sections,
        subject="Both prices are of one request alone: a prompt step, and copies out and in.",
        remarks=[(_fate(model, layout), "plain") for model in models for layout in model.link],
    )


_LEAD = (
    "A request that is preempted can be moved to the CPU and back, or computed again. Above a curve"
    " moving takes less time, below it computing does. Where there is no curve, the copies alone"
    " take longer than computing at any bandwidth. The grey line is the hardware's link. Layer: a"
    " block is copied layer by layer, keys and values apart; cross: all layers in one copy."
)


def _sources(model: ModelCrossings) -> list[object]:
    links = [
        f"{layout}: {_copies(link)} a block of {link['block_bytes']:,} bytes,"
        f" {link['bandwidth_gb_s']:g} GB/s, at least {link['copy_overhead_us']:g} µs each"
        for layout, link in model.link.items()
    ]
    return [id_of(model.name), priced(model), "; ".join(links)]


def _fate(model: ModelCrossings, layout: str) -> str:
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
            f"run-{1 + i % MODEL_COLOURS}",
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
