"""The block map on the page and in its file."""

import json
import re
import zlib
from base64 import b64decode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_engines import engine, make_trace

import kvsim
from kvsim.core.schema import BLOCK_MAP
from kvsim.errors import OutputError
from kvsim.report import read_block_map, write_results
from kvsim.report.pages import block_map as block_map_panel
from kvsim.report.pages.block_map import paint
from kvsim.report.pages.run import build_page
from kvsim.results import tables
from kvsim.results.blockmap import (
    CACHED,
    CPU,
    FREE,
    KEPT,
    OWNED,
    SHARED,
    STATES,
    BlockMap,
    BlockMapWatcher,
    make_groups,
)

CROWD = [(7 * (i % 3), 1 + 5 * i % 40, 1 + 3 * i % 19, i % 4) for i in range(25)]


def watched(name="0.6.3 swap", **limits):
    watcher = BlockMapWatcher(**limits)
    return kvsim.simulate(make_trace(CROWD), engine(name), watcher=watcher), watcher.block_map()


def by_hand():
    """Two samples of four blocks in two groups, and of one block of the CPU."""
    counts = np.zeros((2, 3, len(STATES)), dtype=np.int32)
    counts[0, 0, [FREE, OWNED]] = 1, 1
    counts[0, 1, CACHED] = 2
    counts[0, 2, FREE] = 1
    counts[1, 0, SHARED] = 2
    counts[1, 1, [OWNED, KEPT]] = 1, 1
    counts[1, 2, OWNED] = 1
    owner = np.array([[7, -1, -1], [-1, 9, 3]], dtype=np.int32)
    times = np.array([100, 300], dtype=np.int64)
    return BlockMap(make_groups(4, 1, 2, 1), times, counts, owner, (owner >= 0).astype(np.int32))


def data_in(page):
    [data] = re.findall(r'<script type="application/json" id="block-map-data">(.*?)</script>', page)
    return json.loads(data)


def test_a_cell_shows_what_most_of_its_blocks_are_at_its_time():
    """Columns of 100 ns, from 0 on: before the first sample all blocks are free."""
    picture = paint(by_hand(), 400, 4)
    free, cached, shared = range(3)
    assert picture.owners.tolist() == [3, 7, 9]
    three, seven, nine = (6 + place for place in range(3))
    assert picture.cells.tolist() == [
        [free, seven, seven, shared],
        [free, cached, cached, nine],
        [free, free, free, three],
    ]


def test_the_page_carries_the_picture():
    result, block_map = watched()
    page = build_page(result.summary, result.requests, result.steps, block_map)
    data = data_in(page)
    cells = np.frombuffer(zlib.decompress(b64decode(data["cells"])), "<u2")
    picture = paint(block_map, int(result.steps["end_ns"].max()), data["columns"])
    assert (cells.reshape(data["rows"], data["columns"]) == picture.cells).all()
    names = [result.requests["id"][i] for i in picture.owners]
    assert [owner[0] for owner in data["owners"]] == names
    assert [device["name"] for device in data["devices"]] == ["GPU", "CPU"]
    used = np.flatnonzero(block_map.counts[:, block_map.groups.device == CPU, OWNED].any(axis=0))
    assert data["devices"][1]["blocks"] == block_map.groups.blocks[20 : 21 + used.max()].sum()
    assert page == build_page(result.summary, result.requests, result.steps, block_map)


def test_requests_of_a_session_share_a_colour():
    requests = {"id": ["a", "b", "c"], "session": ["s", "s", ""]}
    one, other, alone = (block_map_panel._owner(requests, i)[2:] for i in range(3))
    assert one == other != alone


def test_a_page_without_a_map_has_no_such_section():
    result, _ = watched()
    page = build_page(result.summary, result.requests, result.steps)
    assert "block-map" not in page.replace("block-map.", "")


def test_a_picture_that_is_too_large_becomes_coarser(monkeypatch):
    result, block_map = watched()

    def carried():
        page = build_page(result.summary, result.requests, result.steps, block_map)
        return data_in(page)["columns"], len(b64decode(data_in(page)["cells"]))

    columns, size = carried()
    assert columns == block_map_panel.COLUMNS
    monkeypatch.setattr(block_map_panel, "MOST_BYTES", size - 1)
    fewer, less = carried()
    assert fewer < columns
    assert less < size


@pytest.mark.parametrize("limits", [{}, {"samples": 5, "gpu_rows": 3, "cpu_rows": 2}])
def test_a_map_comes_back_from_its_file(tmp_path, limits):
    result, block_map = watched(**limits)
    meta = {"block_map": {"samples": len(block_map.time_ns)}}
    summary = {**result.summary, "meta": meta}
    for folder in ("a", "b"):
        write_results(
            tmp_path / folder, result.summary, result.requests, result.steps, block_map=block_map
        )
    back = read_block_map(tmp_path / "a", summary)
    for one, other in zip(back[1:], block_map[1:], strict=True):
        assert one.dtype == other.dtype and (one == other).all()
    assert all((a == b).all() for a, b in zip(back.groups, block_map.groups, strict=True))
    first, second = (tmp_path / name / "block_map.parquet" for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_map_of_nothing_comes_back():
    nothing = BlockMapWatcher().block_map()
    written = tables.arrow_table(BLOCK_MAP, tables.block_map_columns(nothing))
    back = tables.block_map_of(tables.columns_of(written))
    assert len(back.time_ns) == len(back.counts) == 0


def test_a_map_that_is_not_this_runs_is_not_shown(tmp_path):
    result, block_map = watched()
    write_results(tmp_path, result.summary, result.requests, result.steps, block_map=block_map)
    assert read_block_map(tmp_path, {"meta": {}}) is None
    other = {"num_requests": 9, "meta": {"block_map": {"samples": 1}}}
    with pytest.raises(OutputError, match="block map of another run"):
        read_block_map(tmp_path, other)
    pq.write_table(pa.table({"time_ns": [1]}), tmp_path / "block_map.parquet")
    with pytest.raises(OutputError, match=r"column on_cpu is missing, expected int64; run it"):
        read_block_map(tmp_path, other)
