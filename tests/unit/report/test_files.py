import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from full_disk import full_disk
from tiny import MS, no_run, tiny_run

from kvsim.errors import OutputError
from kvsim.report import read_results, write_results
from kvsim.results.ledger import KERNELS, TIME_PARTS
from kvsim.results.summary import summarise


def results(run=tiny_run):
    steps, requests, gaps, meta = run()
    return summarise(steps, requests, gaps, meta), requests, steps


def retyped(path, name, type_):
    table = pq.read_table(path)
    place = table.column_names.index(name)
    pq.write_table(table.set_column(place, name, table[name].cast(type_)), path)


def added(path, name):
    table = pq.read_table(path)
    pq.write_table(table.append_column(name, table["start_ns"]), path)


def without(path, *names):
    pq.write_table(pq.read_table(path).drop_columns(list(names)), path)


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert list(one[name]) == list(other[name]), name


@pytest.mark.parametrize("run", [tiny_run, no_run])
def test_results_come_back_as_they_were(tmp_path, run):
    summary, requests, steps = results(run)
    write_results(tmp_path / "out", summary, requests, steps)
    read_summary, read_requests, read_steps = read_results(tmp_path / "out")
    assert read_summary == summary
    same(read_requests, requests)
    same(read_steps, steps)


def test_equal_results_give_equal_bytes(tmp_path):
    for name in "ab":
        write_results(tmp_path / name, *results(), csv=True, page="<p>")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_exactly_the_promised_files_are_written_and_returned(tmp_path):
    always = {"summary.json", "requests.parquet", "steps.parquet"}
    assert {p.name for p in write_results(tmp_path / "few", *results())} == always
    paths = write_results(tmp_path / "all", *results(), csv=True, page="<p>")
    assert {p.name for p in paths} == always | {"requests.csv", "steps.csv", "report.html"}
    assert set(paths) == set((tmp_path / "all").iterdir())


def test_request_columns_are_seconds_and_null_where_nothing_happened(tmp_path):
    write_results(tmp_path, *results())
    table = pq.read_table(tmp_path / "requests.parquet")
    rows = {row["id"]: row for row in table.to_pylist()}
    assert rows["A"]["arrival_s"] == 0.01
    assert rows["A"]["queue_s"] == 0.0
    assert (rows["A"]["ttft_s"], rows["A"]["tpot_s"], rows["A"]["e2el_s"]) == (0.02, 0.015, 0.05)
    assert rows["B"]["tpot_s"] is None
    assert rows["C"]["num_preemptions"] == 1
    assert rows["B"]["num_cached_tokens"] == 4
    assert {rows["D"][key] for key in ("queue_s", "ttft_s", "e2el_s", "finish_ns")} == {None}
    assert rows["D"]["reason"] == "too long"
    assert rows["A"]["arrival_ns"] == 10 * MS


def test_steps_have_seconds_beside_their_nanoseconds(tmp_path):
    write_results(tmp_path, *results())
    first = pq.read_table(tmp_path / "steps.parquet").to_pylist()[0]
    assert (first["start_s"], first["end_s"], first["start_ns"]) == (0.01, 0.03, 10 * MS)


def test_writing_again_replaces_results_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "requests.csv").write_text("a trace of mine")
    write_results(tmp_path, *results(no_run))
    write_results(tmp_path, *results())
    assert read_results(tmp_path)[0]["num_requests"] == 4
    assert (tmp_path / "requests.csv").read_text() == "a trace of mine"


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text("{}")
    for name in ("new", "old"):
        message = rf"{name}: cannot be written: .*; free some space"
        given = results()
        with pytest.raises(OutputError, match=message), full_disk():
            write_results(tmp_path / name, *given)
    assert not (tmp_path / "new").exists()
    assert [p.name for p in (tmp_path / "old").iterdir()] == ["summary.json"]
    assert (tmp_path / "old" / "summary.json").read_text() == "{}"


def test_a_file_in_the_place_of_the_folder_is_one_clear_error(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match=r"out: cannot be written: File exists"):
        write_results(tmp_path / "out", *results())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / "summary.json").unlink(), r"summary\.json: no such file; give"),
        (lambda out: (out / "steps.parquet").unlink(), r"steps\.parquet: no such file; give"),
        (
            lambda out: (out / "summary.json").write_text('{"duration": 1}'),
            r"summary\.json: not a kvsim summary; give",
        ),
        (lambda out: (out / "summary.json").write_text("{"), r"summary\.json: damaged or not"),
        (lambda out: (out / "summary.json").write_bytes(b"\xff"), r"summary\.json: damaged or not"),
        (
            lambda out: (out / "requests.parquet").write_text("no"),
            r"requests\.parquet: damaged or not",
        ),
        (
            lambda out: pq.write_table(pa.table({"id": ["A"]}), out / "requests.parquet"),
            r"requests\.parquet: column index is missing, expected int64; kvsim 0.1.0 wrote it",
        ),
        (
            lambda out: retyped(out / "steps.parquet", "waiting", pa.float64()),
            r"steps\.parquet: column waiting is double, expected int64; kvsim 0.1.0 wrote it",
        ),
        (
            lambda out: added(out / "steps.parquet", "draft_tokens"),
            r"steps\.parquet: column verified_seqs is missing, expected int64; kvsim 0.1.0 wrote",
        ),
        (
            lambda out: without(out / "steps.parquet", *KERNELS),
            r"steps\.parquet: column host_ns is missing, expected int64; kvsim 0.1.0 wrote it",
        ),
        (
            lambda out: without(out / "requests.parquet", *TIME_PARTS),
            r"requests\.parquet: column waiting_step_ns is missing, expected int64; kvsim 0.1.0",
        ),
        (
            lambda out: write_results(out / "other", *results(no_run))[0].replace(
                out / "requests.parquet"
            ),
            r"counts 4 requests and 7 steps, its tables hold 0 and 7: files of different runs",
        ),
    ],
)
def test_results_that_cannot_be_read_are_one_clear_error(tmp_path, damage, message):
    write_results(tmp_path, *results())
    damage(tmp_path)
    with pytest.raises(OutputError, match=message) as error:
        read_results(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(OutputError, match=r"nowhere: no such folder; give a folder that `kvsim"):
        read_results(tmp_path / "nowhere")


def test_the_summary_file_is_strict_json(tmp_path):
    write_results(tmp_path, *results())

    def refuse(constant):
        raise AssertionError(constant)

    json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)


def test_columns_may_be_arrays_of_text(tmp_path):
    summary, requests, steps = results()
    requests["id"] = np.array(requests["id"])
    write_results(tmp_path, summary, requests, steps)
    assert read_results(tmp_path)[1]["id"] == ["A", "B", "C", "D"]
