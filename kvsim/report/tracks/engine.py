"""The engine's tracks: its steps, the copies over the link, and counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core import schema
from kvsim.core.rows import PIECE_STEPS
from kvsim.core.schema import BLOCKED, Source
from kvsim.report.tracks.events import FIRST_TRACK, Track, Window, counter, process, span, thread
from kvsim.results.timeline import States

Ints = NDArray[np.int64]

ENGINE = 1
STEPS, LINK = Track(ENGINE, FIRST_TRACK), Track(ENGINE, FIRST_TRACK + 1)

COUNTERS = {
    "GPU blocks": {"used": "used_blocks", "cached": "cached_blocks", "free": "free_blocks"},
    "CPU blocks": {"used": "cpu_used_blocks"},
    "requests": {"running": "running", "waiting": "waiting", "swapped": "swapped"},
    "batched tokens": {"tokens": "batched_tokens"},
    "radix cache": {"protected": "protected_blocks", "evictable": "cached_blocks"},
    "new-token ratio (ppm)": {"ratio": "new_token_ratio_ppm"},
}
"""Name of a counter → series → column of `report.timeline.States`. Only SGLang has the last two."""

_LISTED = schema.STEPS.names(Source.STEP, Source.KERNEL)[2:]
"""Columns of a step that its slice lists where they are not 0: all but its start and end."""


def engine_names() -> list[str]:
    """Names of the engine's tracks."""
    return [
        *process(ENGINE, "engine", 1),
        *thread(STEPS, "steps"),
        *thread(LINK, "host link (swaps)"),
    ]


def step_events(steps: Mapping[str, Ints], window: Window) -> Iterator[str]:
    """A slice for each step, and slices for its copies on the link.

    Copies come first in a step, out before in. A step with both divides the copying time by blocks.
    """
    listed = [name for name in _LISTED if name in steps]
    for first in range(0, len(steps["start_ns"]), PIECE_STEPS):
        rows = slice(first, first + PIECE_STEPS)
        columns = {
            name: steps[name][rows].tolist() for name in ("start_ns", "end_ns", "blocked", *listed)
        }
        for number in range(len(columns["start_ns"])):
            row = {name: column[number] for name, column in columns.items()}
            yield from _step(first + number, row, listed, window)


def counter_events(
    steps: Mapping[str, Ints], meta: Mapping[str, Any], window: Window
) -> Iterator[str]:
    """The counters: values at the start of the window, and again at every change."""
    states = States(steps, window.end_ns, meta)
    starts = states["start_ns"]
    first = max(int(np.searchsorted(starts, window.begin_ns, side="right")) - 1, 0)
    last = int(np.searchsorted(starts, window.end_ns, side="left"))
    times = np.maximum(starts[first:last], window.begin_ns)
    for name, series in COUNTERS.items():
        if not states.keys() >= set(series.values()):
            continue
        values = np.stack([states[column][first:last] for column in series.values()], axis=1)
        if not values.any():
            continue
        # Of several states at one instant, only the last one lasts.
        lasting = np.flatnonzero(np.append(np.diff(times) > 0, True)[: len(times)])
        changed = (np.diff(values[lasting], axis=0, prepend=-1) != 0).any(axis=1)
        for row in lasting[changed]:
            held = dict(zip(series, values[row].tolist(), strict=True))
            yield counter(ENGINE, name, int(times[row]), held)


def _step(number: int, row: Mapping[str, int], listed: list[str], window: Window) -> Iterator[str]:
    start, end = row["start_ns"], row["end_ns"]
    shown = window.clip(start, end)
    if shown is None:
        return
    args: dict[str, Any] = {"step": number, **{name: row[name] for name in listed if row[name]}}
    if row["blocked"]:
        args["head_refused_for"] = BLOCKED[row["blocked"]]
    yield span(STEPS, _kind(row), *shown, args)
    time_ns = start
    for name, length, blocks in _copies(row):
        if length and (shown := window.clip(time_ns, time_ns + length)):
            yield span(LINK, name, *shown, {"step": number, "blocks": blocks})
        time_ns += length


def _kind(row: Mapping[str, int]) -> str:
    if row["prefill_seqs"]:
        return "prefill and decode" if row["decode_seqs"] else "prefill"
    return "decode" if row["decode_seqs"] else "nothing computed"


def _copies(row: Mapping[str, int]) -> tuple[tuple[str, int, int], ...]:
    """Name, nanoseconds and blocks of each copy of a step over the link, in order."""
    out, back = row["swap_out_blocks"], row["swap_in_blocks"]
    outward = row["transfer_ns"] * out // max(out + back, 1)
    return (
        ("wait for the link", row["link_wait_ns"], out + back),
        ("flush", row["flush_ns"], 0),
        ("swap out", outward, out),
        ("swap in", row["transfer_ns"] - outward, back),
    )
