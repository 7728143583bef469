"""`kvsim trace check` enforces the schema of the native format, and names every fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made import jsonl, traces
from marks import examples, long
from places import ROOT
from shared import SHARED, needs_shared

from kvsim.errors import TraceError
from kvsim.workload import check_trace, native, open_trace
from kvsim.workload.formats import MOST_FAULTS

SCHEMA = json.loads((ROOT / "docs/reference/trace-format.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
REQUEST = VALIDATOR.evolve(schema={**SCHEMA["$defs"]["request"], "$defs": SCHEMA["$defs"]})
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    2**70,
    "x",
    "",
    [],
    {},
    [[1, 0]],
    [["a", 0]],
    [-1],
)
ROW = {"input_length": 5, "output_length": 2}
FEW = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_schema_the_page_and_the_reader_know_the_same_keys() -> None:
    definitions = SCHEMA["$defs"]
    assert set(definitions["header"]["properties"]) == native._HEADER_KEYS
    assert set(definitions["request"]["properties"]) == native._ROW_KEYS
    page = (ROOT / "docs/reference/trace-format.md").read_text()
    for key in native._HEADER_KEYS | native._ROW_KEYS:
        assert f"`{key}`" in page, key


@pytest.mark.parametrize(
    "name", ["agents", "burst", *(pytest.param(name, marks=long) for name in ("chat", "api"))]
)
def test_shipped_traces_fit_the_schema(name: str) -> None:
    for line in (ROOT / f"traces/{name}.jsonl").read_text().splitlines():
        VALIDATOR.validate(json.loads(line))


@FEW
@given(trace=traces())
def test_what_is_written_fits_the_schema(trace: Any) -> None:
    for line in native.lines(trace):
        VALIDATOR.validate(json.loads(line))


@FEW
@given(data=st.data(), trace=traces())
def test_the_reader_refuses_what_the_schema_refuses(
    tmp_path: Path, data: st.DataObject, trace: Any
) -> None:
    """Keys are dropped or get strange values; what the schema refuses, the reader refuses."""
    tables = [json.loads(line) for line in native.lines(trace)]
    for _ in range(data.draw(st.integers(1, 3))):
        table = data.draw(st.sampled_from(tables))
        keys = sorted(native._HEADER_KEYS if table is tables[0] else native._ROW_KEYS)
        key = data.draw(st.sampled_from([*keys, "x_mine", "unknown"]))
        if key in table and data.draw(st.booleans()):
            del table[key]
        else:
            table[key] = data.draw(st.sampled_from(STRANGE))
    sound = all(VALIDATOR.is_valid(table) for table in tables)
    read, faults = check_trace(jsonl(tmp_path, *tables), "native")
    assert (read is None) == bool(faults)
    if not sound:
        assert read is None, tables
    for fault in faults:
        assert "\n" not in fault


def test_every_faulty_row_is_named(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"input_length": 0}, "{", ROW | {"outptu": 3}, ROW, ROW | {"arrival_s": 1}]
    path = jsonl(tmp_path, {"kvsim_trace": 1}, *rows)
    trace, faults = check_trace(path)
    assert trace is None
    assert [fault.removeprefix(path).split(": ")[:2] for fault in faults] == [
        [":3", "input_length"],
        [":4", "not JSON"],
        [":5", "outptu"],
        [":7", "arrival_s"],
    ]
    with pytest.raises(TraceError, match=faults[0].replace("(", r"\(")):
        open_trace(path)


def test_the_list_of_faults_ends(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"kvsim_trace": 1}, *["{"] * 50)
    assert len(check_trace(path)[1]) == MOST_FAULTS


def test_faults_of_the_whole_file_are_found(tmp_path: Path) -> None:
    header = {"kvsim_trace": 1, "block_size": 2, "hash_kind": "prefix", "partial_hash": False}
    rows = [{"input_length": 4, "output_length": 1, "hash_ids": ids} for ids in ([1, 2], [3, 2])]
    (fault,) = check_trace(jsonl(tmp_path, header, *rows))[1]
    assert ":3: hash_ids: id 2 follows 3 and elsewhere 1" in fault
    (fault,) = check_trace(jsonl(tmp_path, header))[1]
    assert "no requests after the header" in fault


def test_other_formats_name_their_first_fault(tmp_path: Path) -> None:
    bad = {"timestamp": 1, "input_length": 0, "output_length": 1}
    trace, faults = check_trace(jsonl(tmp_path, bad, bad))
    assert trace is None and len(faults) == 1 and ":1: input_length" in faults[0]
    assert check_trace(str(tmp_path / "none"))[1][0].startswith(
        f"{tmp_path}/none: no such file; give the path"
    )


@needs_shared("traces/native-samples")
@pytest.mark.parametrize("name", ["mooncake_synthetic", "azure2023_code"])
def test_public_samples_are_sound(name: str) -> None:
    trace, faults = check_trace(str(SHARED / f"traces/native-samples/{name}.jsonl.gz"))
    assert trace is not None and not faults


def test_a_request_needs_its_lengths() -> None:
    assert REQUEST.is_valid(ROW) and not REQUEST.is_valid({"input_length": 5})
