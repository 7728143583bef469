"""Damaged run and sweep folders: refused in one line that names the file, or read; no traceback."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile.damage import outcome, try_one
from marks import mostly_long
from places import ROOT

from kvsim.errors import OutputError
from kvsim.report import read_block_map, read_results, read_transitions
from kvsim.search.store import Store
from kvsim.search.sweep import read_plan

TRACE = ["--trace", str(ROOT / "traces" / "chat.jsonl"), "--num-prompts"]
SMALL = ["--num-gpu-blocks-override", "150", "--max-model-len", "2048"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with preemptions and a block map."""
    folder = tmp_path_factory.mktemp("run") / "run"
    out = ["--out", str(folder), "--block-map", "--no-report"]
    assert outcome(["run", *TRACE, "25", *SMALL, *out])[0] == 0
    return folder


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two points."""
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    grid = ["--grid", "max_num_seqs=2,8", "--slo", "p99_ttft<2s", "--jobs", "1"]
    assert outcome(["sweep", *TRACE, "5", *grid, "--out", str(folder)])[0] == 0
    return folder


@pytest.mark.parametrize("seed", mostly_long(12, quick=2))
def test_damaged_runs(run: Path, seed: int) -> None:
    assert try_one(run, seed) == ""


@pytest.mark.parametrize("seed", mostly_long(40, quick=8))
def test_damaged_sweeps(swept: Path, seed: int) -> None:
    assert try_one(swept, seed) == ""


def changed(folder: Path, into: Path, table: str, column: str, value: Any) -> Path:
    """A copy of a run whose `table` has `value` in the last row of `column`."""
    shutil.copytree(folder, into)
    path = into / f"{table}.parquet"
    read = pq.read_table(path)
    values = [*read[column].to_pylist()[:-1], value]
    place = read.column_names.index(column)
    pq.write_table(read.set_column(place, column, pa.array(values, read[column].type)), path)
    return into


@pytest.mark.parametrize(
    ("table", "column", "value", "message"),
    [
        ("requests", "n", None, "column n: a value is missing"),
        ("requests", "n", 0, "column n: a request of no sequence"),
        ("requests", "id", "0", "column id: one id is given twice"),
        ("requests", "id", None, "column id: a value is missing"),
        ("requests", "index", 7, "column index: not 0, 1, 2"),
        ("requests", "input_length", -5, "column input_length: -5 is not in 0"),
        ("requests", "finish_ns", 3, "column finish_ns: before first_token_ns"),
        ("requests", "output_tokens", 10**6, "total_output_tokens"),
        ("steps", "blocked", 99, r"column blocked: 99 is not in 0 \.\. 7"),
        ("steps", "start_ns", 0, "column start_ns: before that of the step before"),
        ("steps", "end_ns", 2**62 + 1, "column end_ns"),
        ("transitions", "kind", 99, r"column kind: 99 is not in 0 "),
        ("transitions", "request", 25, "column request: not one of the 25 requests"),
        ("transitions", "time_ns", 0, "column time_ns: before that of the row before"),
        ("block_map", "owner", 25, "column owner: not one of the 25 requests"),
        ("block_map", "first_block", 3, "column first_block: differs between samples"),
        ("block_map", "time_ns", 0, "samples of equal length"),
    ],
)
def test_a_value_that_cannot_be_is_named(
    run: Path, tmp_path: Path, table: str, column: str, value: Any, message: str
) -> None:
    folder = changed(run, tmp_path / "run", table, column, value)
    with pytest.raises(OutputError, match=message):
        summary, *_ = read_results(folder)
        read_transitions(folder, summary)
        read_block_map(folder, summary)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("completed", -1, r"completed: -1, but the tables give \d+;"),
        ("mean_ttft_ms", None, "mean_ttft_ms: None, but"),
        ("num_preemptions_by_mode", [], "num_preemptions_by_mode: "),
        ("p99_itl_ms", "fast", "p99_itl_ms: not a number"),
        ("meta", {"num_gpu_blocks": "many"}, r"meta\.num_gpu_blocks: expected `int"),
        ("meta", {"engine_errors": [{}]}, r"meta\.engine_errors\[0\]: .*`kind`"),
        ("meta", {"memory": {"sampler_bytes": "many"}}, r"meta\.memory\.sampler_bytes: expected"),
        (
            "meta",
            {"assumed": {"x": "\ud800"}},
            "meta: a text is not UTF-8",
        ),
        ("meta", {"memory": json.loads("[" * 50 + "]" * 50)}, "meta: nested too deeply"),
        ("meta", {"memory": {"block_bytes": "x"}}, r"meta\.memory\.block_bytes: expected `int"),
        ("meta", {"config": None}, r"meta\.config: expected `object`"),
        ("meta", {"config": {"max_loras": "x"}}, r"meta\.config\.max_loras: expected `int"),
        ("meta", {"cost": {"extrapolated_ns": "x"}}, r"meta\.cost\.extrapolated_ns: expected `int"),
        ("meta", {"cost": {"stages": {"layers": []}}}, r"meta\.cost\.stages\.layers: expected"),
        ("meta", {"kv_offload": {}}, r"meta\.kv_offload: .*`stored_blocks`"),
        (
            "meta",
            {"kvsim_version": "0.1.9", "seed": -1},
            r".*; kvsim 0\.1\.9 wrote it, this is .*run it",
        ),
    ],
)
def test_a_figure_that_is_not_that_of_the_tables_is_named(
    run: Path, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    summary[key] = {**summary[key], **value} if key == "meta" else value
    path.write_text(json.dumps(summary))
    with pytest.raises(OutputError, match=rf"summary\.json: {message}"):
        read_results(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("figures", {}),
        ("figures", {"failed": "none"}),
        ("outcome", "finished"),
        ("engine", {"num_gpu_blocks": 2.5}),
        ("time_source", None),
        ("key", "other"),
    ],
)
def test_a_damaged_point_counts_as_missing(
    swept: Path, tmp_path: Path, key: str, value: Any
) -> None:
    folder = Path(shutil.copytree(swept, tmp_path / "sweep"))
    path = next((folder / "points").glob("*.json"))
    assert Store(folder).load(path.stem) is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert Store(folder).load(path.stem) is None


@pytest.mark.parametrize(
    "change",
    [
        {"points": []},
        {"points": [{"settings": {}, "seed": 0, "key": "../../etc/passwd"}]},
        {"slo": "p99_ttft<fast"},
        {"base": 3},
        {"trace": {"name": 3}},
    ],
)
def test_a_damaged_plan_is_refused(swept: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    plan = json.loads((swept / "sweep.json").read_text())
    (tmp_path / "sweep.json").write_text(json.dumps({**plan, **change}))
    with pytest.raises(OutputError, match=r"sweep\.json: damaged or not written by kvsim"):
        read_plan(tmp_path)
