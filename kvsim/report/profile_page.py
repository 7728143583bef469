"""Draws the tables of a profile: the times of a step's parts, by the counts that decide them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvsim.cost.profile import Curve, Fit, Grid, MixedGrid, Profile
from kvsim.report.document import document, figure_place, masthead
from kvsim.report.figures import Entry, Figure, Trace, compact
from kvsim.report.html import Html, join, table
from kvsim.report.log_figures import line, log_layout
from kvsim.report.numerals import plural
from kvsim.report.provenance import facts, flat

COLOURS = 6
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
ERRORS = ("points", "median_percent", "p95_percent", "max_percent", "bias_percent")


def build_profile(profile: Profile) -> str:
    """The page of a profile; it needs no other file, and equal profiles give equal bytes."""
    made = profile.model
    fits = {profile.engine.block_size: profile.fit}
    fits |= {int(size): fit for size, fit in profile.others.items()}
    figures = {size: list(_figures(fit, size)) for size, fit in fits.items()}
    sections = {
        f"Blocks of {size} tokens": join(figure_place(figure) for figure in drawn)
        for size, drawn in figures.items()
    }
    sections["Errors"] = _errors(profile.error)
    sections["Origin"] = facts(flat(_origin(profile)))
    title = f"{made.name} on {profile.device.get('name', 'an unnamed device')}"
    everything = [figure for drawn in figures.values() for figure in drawn]
    return document(title, _header(title, profile), sections, everything)


def _header(title: str, profile: Profile) -> Html:
    made = profile.model
    facts_of_model = f"{made.layers} layers, {made.dtype}, KV {made.kv_dtype}, tp {made.tp}"
    subject = f"{profile.source} · {profile.created} · {facts_of_model}"
    return masthead("kvsim profile", title, subject=subject)


def _figures(fit: Fit, size: int) -> Iterator[Figure]:
    for name, (title, x_title) in TITLES.items():
        found = getattr(fit, name)
        drawn: list[tuple[str, Sequence[float], Sequence[float]]] = []
        if isinstance(found, Curve):
            drawn = [("", found.x, found.us)]
        elif isinstance(found, Grid):
            drawn = _slices(name, found)
        elif isinstance(found, MixedGrid):
            drawn = _mixed_slices(found)
        if drawn:
            yield _figure(f"{name}-{size}", title, x_title, drawn)


def _slices(name: str, grid: Grid) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    """Decode by length for some numbers of sequences; prefill by tokens for some contexts."""
    if name != "prefill":
        places = _some(len(grid.x))
        return [(plural(int(grid.x[i]), "sequence"), grid.ctx, grid.us[i]) for i in places]
    return [
        (f"context {grid.ctx[j]:,g}", *_column(grid.x, grid.us, j)) for j in _some(len(grid.ctx))
    ]


def _column(
    x: Sequence[float], us: Sequence[Sequence[float]], j: int
) -> tuple[list[float], list[float]]:
    """Column `j` of the grid, over the rows that are long enough to have it."""
    reached = [(at, row[j]) for at, row in zip(x, us, strict=True) if len(row) > j]
    return [at for at, _ in reached], [value for _, value in reached]


def _mixed_slices(grid: MixedGrid) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    """By the chunk's tokens, without context, for some numbers of decodes of the middle length."""
    middle = len(grid.kv) // 2
    return [
        (
            f"{grid.n[k]:,g} decodes of {grid.kv[middle]:,g}",
            grid.q,
            [rows[0][k][middle] for rows in grid.us],
        )
        for k in _some(len(grid.n))
    ]


def _some(number: int) -> list[int]:
    """Up to `LINES` places, evenly, the first and the last among them."""
    if number <= LINES:
        return list(range(number))
    return sorted({round(i * (number - 1) / (LINES - 1)) for i in range(LINES)})


def _figure(
    name: str,
    title: str,
    x_title: str,
    drawn: Sequence[tuple[str, Sequence[float], Sequence[float]]],
) -> Figure:
    data: list[Trace] = []
    legend = []
    for i, (label, x, us) in enumerate(drawn):
        colour = f"run-{(1 + i) % COLOURS}"
        data.append(line(x, compact(us), colour, label or title))
        if label:
            legend.append(Entry(label, f"var(--{colour})", (i,), "line"))
    look = log_layout(x_title, "us", data)
    return Figure(name, title, "", data, look, legend, height=300)


def _errors(error: Mapping[str, Any]) -> Html:
    """Errors of the fit on rows that it was not fitted to, and the profile's other statements."""
    judged = {key: value for key, value in error.items() if _judged(value)}
    others = {key: value for key, value in error.items() if key not in judged}
    rows = []
    for name, figures in judged.items():
        regions = {f"{name}, {key}": value for key, value in figures.items() if _judged(value)}
        for label, found in {name: figures, **regions}.items():
            rows.append([label, *(_cell(found.get(key)) for key in ERRORS)])
    head = ("table", "points", "median %", "p95 %", "max %", "bias %")
    return join((table(head, rows) if rows else None, facts(flat(others))))


def _judged(value: Any) -> bool:
    return isinstance(value, Mapping) and "points" in value


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:,g}"


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
