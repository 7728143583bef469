"""Draws which request held which block, over simulated time; the page's script paints the picture.

The page carries one packed number per cell of the picture: a state, or the position of an owner in
a list. So the colours follow the reader's colour scheme, and the page can name the owner of the
cell under the pointer.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvsim.report.pages.figures import Figure, TimeAxis, line, time_chart, titled
from kvsim.report.pages.html import Html, element, embedded, join, key_of, lead, placed, text_of
from kvsim.report.pages.view import View, lined
from kvsim.results.blockmap import (
    CACHED,
    CPU,
    FREE,
    GPU,
    KEPT,
    LOADING,
    OWNED,
    SHARED,
    STATES,
    STORING,
    BlockMap,
)
from kvsim.results.numerals import count

COLUMNS = 1500
"""Picture cells from left to right."""
MOST_BYTES = 700_000
"""Most bytes of packed cells; a larger picture is made coarser in time."""

_SHOWN = (FREE, CACHED, SHARED, KEPT, STORING, LOADING)
"""States with a colour of their own, by their number in the picture; owners have the numbers after
these."""
_KEY = {
    OWNED: (
        "In use: a colour for each request, for each session where there are any",
        "linear-gradient(90deg, #b9566b 33%, #4f9a63 33% 66%, #9a6cc0 66%)",
    ),
    SHARED: ("Shared by several requests", "peak"),
    CACHED: ("Cached: in no table, can be hit", "cached"),
    FREE: ("Free", "free"),
    KEPT: ("Held outside all block tables", "other"),
    STORING: ("Being stored in CPU memory", "swap"),
    LOADING: ("Being loaded from CPU memory", "waiting"),
}
_HUES, _TONES = 315, 3
"""Colours of owners; none is a blue, because blues stand for cached and shared blocks."""
_FIRST_HUE = 235


class Picture(NamedTuple):
    """The numbers of the cells, and the requests that they name."""

    cells: NDArray[np.int64]
    """Shape (groups, columns): index into `_SHOWN`, or `len(_SHOWN)` + place in `owners`."""
    owners: NDArray[np.int64]
    """Indexes of requests."""


def block_map_section(block_map: BlockMap | None, run: View) -> Html | None:
    """The map, what its colours mean, and what the script needs to paint it; None without a map."""
    if block_map is None or not len(block_map.time_ns) or not run.end_ns:
        return None
    found = [bool(block_map.counts[:, :, state].any()) for state in range(len(STATES))]
    key = key_of((colour, label) for state, (label, colour) in _KEY.items() if found[state])
    words = "Physical blocks from bottom to top. Point at the map to see whose blocks they are;"
    words += " click to see these alone, and again to see all; drag to zoom in time."
    figure = placed([_figure(block_map, run.axis)])
    data = element("script", _data(block_map, run), type="application/json", id="block-map-data")
    script = element("script", Html(text_of("block_map.js")))
    return join((lead(words), key, figure, data, script))


def paint(block_map: BlockMap, end_ns: int, columns: int) -> Picture:
    """The map in `columns` equal pieces of the run: each shows the sample at its middle."""
    middles = (np.arange(columns) + 0.5) * end_ns / columns
    sample = np.searchsorted(block_map.time_ns, middles, side="right") - 1
    first = sample < 0
    counts = np.array(block_map.counts)
    # Of equally frequent numbers, the one in use is shown, so that rare owners stay visible.
    order = np.array([OWNED, SHARED, KEPT, STORING, LOADING, CACHED, FREE])
    state = order[np.argmax(counts[:, :, order], axis=2)]
    owners = np.unique(block_map.owner[state == OWNED])
    number = np.zeros(state.shape, dtype=np.int64)
    for place, shown in enumerate(_SHOWN):
        number[state == shown] = place
    owned = state == OWNED
    number[owned] = len(_SHOWN) + np.searchsorted(owners, block_map.owner[owned])
    cells = number[sample].T
    cells[:, first] = _SHOWN.index(FREE)
    return Picture(cells, owners.astype(np.int64))


def tier_use(block_map: BlockMap | None, run: View) -> Iterator[Figure]:
    """What a tier in CPU memory holds over time, and what is copied; nothing without samples."""
    if block_map is None or not run.summary["meta"].get("kv_offload"):
        return
    totals, x = block_map.totals(CPU), run.axis.of(np.append(block_map.time_ns, run.end_ns))
    used = totals.sum(axis=1) - totals[:, FREE] - totals[:, STORING] - totals[:, LOADING]
    parts = (
        (used, "cached", "Stored"),
        (totals[:, STORING], "swap", "Being stored"),
        (totals[:, LOADING], "waiting", "Being loaded"),
    )
    if not any(each.any() for each, *_ in parts):
        return
    drawn = lined(x, (part for part in parts if part[0].any()), "one")
    note, y = "Places of the tier, at samples of the block map.", titled("places")
    yield time_chart(run.axis, "tier-use", "CPU memory in use", note, drawn, y)


def _figure(block_map: BlockMap, axis: TimeAxis) -> Figure:
    """Axes for the picture: time, and the blocks of both pools."""
    groups, swapped = block_map.groups, _swaps(block_map)
    each = int(groups.blocks[groups.device == GPU].max(initial=1))
    note = "A row for each block."
    if each > 1:
        note = f"{count(each)} blocks to a row, in the colour of what most of them are."
    up = titled("GPU blocks", range=[0, _blocks(block_map, GPU)], showgrid=False)
    # Axes need a trace; the script paints the picture between them.
    data, below = [line([0], [None], "ink")], None
    if swapped:
        up["domain"] = [0.27, 1]
        below = titled("CPU blocks", domain=[0, 0.21], range=[0, _blocks(block_map, CPU)])
        data.append(line([0], [None], "ink", yaxis="y2"))
    return time_chart(
        *(axis, "block-owners", "Which request holds which block", note, data, up),
        yaxis2=below,
        height=640 if swapped else 520,
        hovermode=False,
        margin={"t": 30},
    )


def _data(block_map: BlockMap, run: View) -> Html:
    """What the script needs."""
    columns, groups = COLUMNS, block_map.groups
    picture, packed, width = _packed(block_map, run.end_ns, columns)
    while len(packed) > MOST_BYTES:
        columns //= 2
        picture, packed, width = _packed(block_map, run.end_ns, columns)
    devices = []
    for device, name in ((GPU, "GPU"), (CPU, "CPU")):
        rows = np.flatnonzero(groups.device == device)
        if len(rows) and (device == GPU or _swaps(block_map)):
            devices.append(
                {
                    "name": name,
                    "rows": [int(rows[0]), len(rows)],
                    "each": int(groups.blocks[rows[0]]),
                    "blocks": _blocks(block_map, device),
                }
            )
    return embedded(
        {
            "columns": columns,
            "rows": len(groups.first),
            "width": width,
            "end": run.axis.end,
            "unit": run.axis.unit,
            "devices": devices,
            "states": [STATES[state] for state in _SHOWN],
            "owners": [_owner(run.requests, int(index)) for index in picture.owners],
            "cells": b64encode(packed).decode(),
        }
    )


def _packed(block_map: BlockMap, end_ns: int, columns: int) -> tuple[Picture, bytes, int]:
    """A picture, its numbers compressed row by row, and the bytes of a number."""
    picture = paint(block_map, end_ns, columns)
    width = 2 if len(picture.owners) + len(_SHOWN) <= 1 << 16 else 4
    return picture, zlib.compress(picture.cells.astype(f"<u{width}").tobytes(), 9), width


def _owner(requests: Mapping[str, Any], index: int) -> list[Any]:
    """Name, session, hue and tone of a request."""
    name, session = str(requests["id"][index]), str(requests["session"][index])
    drawn = xxhash.xxh64_intdigest((session or name).encode())
    return [name, session, (_FIRST_HUE + drawn % _HUES) % 360, drawn // _HUES % _TONES]


def _blocks(block_map: BlockMap, device: int) -> int:
    """Number of blocks to draw; of the CPU pool, only as many as were ever in use."""
    here = block_map.groups.device == device
    blocks = block_map.groups.blocks[here]
    if device == CPU:
        used = block_map.counts[:, here, FREE + 1 :].any(axis=(0, 2))
        blocks = blocks[: int(np.flatnonzero(used).max(initial=-1)) + 1]
    return int(blocks.sum())


def _swaps(block_map: BlockMap) -> bool:
    """Whether a block of the CPU was ever in use."""
    return _blocks(block_map, CPU) > 0
