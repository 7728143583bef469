"""The file of rows: resumable, strict, and not harmed by a kill."""

from pathlib import Path
from typing import Any

import pytest
from kvsim_kernels.rows import RowsError, RowSet, RowStore, identity, read_rows

HEADER: dict[str, Any] = {
    "created": "2026-01-01", "git": "a", "device": {"name": "x", "sms": 2}, "model": {"layers": 1},
}  # fmt: skip


def row(us: float = 1.0, **changes: Any) -> dict[str, Any]:
    made = {"kernel": "dense", "method": "warm", "split": "fit", "shape": {"tokens": 4}, "round": 0}
    return {**made, "us": us, **changes}


def test_rows_come_back_and_are_known(tmp_path: Path) -> None:
    path = tmp_path / "a.rows.jsonl"
    store = RowStore(path, HEADER)
    store.append(row())
    again = RowStore(path, HEADER)
    assert again.rows == [row()]
    assert row(us=7.0) in again
    assert row(shape={"tokens": 5}) not in again
    assert row(round=1) not in again


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.rows.jsonl"
    store = RowStore(path, HEADER)
    store.append(row())
    store.append(row(split="held_out"))
    path.write_bytes(path.read_bytes()[:-cut])
    again = RowStore(path, HEADER)
    assert again.rows == [row()]
    again.append(row(split="held_out"))
    assert read_rows(path)[1] == [row(), row(split="held_out")]


def test_a_first_line_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.rows.jsonl"
    RowStore(path, HEADER)
    path.write_bytes(path.read_bytes()[:20])
    assert RowStore(path, HEADER).rows == []
    assert read_rows(path)[0]["device"] == HEADER["device"]


def test_date_and_commit_may_differ_between_sessions(tmp_path: Path) -> None:
    path = tmp_path / "a.rows.jsonl"
    RowStore(path, HEADER)
    assert RowStore(path, {**HEADER, "created": "2027-01-01", "git": "b"}).header["git"] == "a"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("device", {"name": "x", "sms": 4}, r"another device \(sms: there 2, now 4\)"),
        ("model", {"layers": 1, "heads": 2}, r"another model \(heads: there None, now 2\)"),
    ],
)
def test_rows_of_something_else_are_not_continued(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    path = tmp_path / "a.rows.jsonl"
    RowStore(path, HEADER)
    with pytest.raises(RowsError, match=rf"a\.rows\.jsonl: holds rows .*{words}; give another"):
        RowStore(path, {**HEADER, key: value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ":1: not the rows"),
        ('{"schema": "other"}\n', ":1: not the rows"),
        ('{"schema": "kvsim.rows/1"}\nnonsense\n', ":2: not JSON"),
        ('{"schema": "kvsim.rows/1"}\n[1]\n', ":2: expected an object"),
        ('{"schema": "kvsim.rows/1"}\n{"kernel": "dense"}\n', ":2: method: missing"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.rows.jsonl"
    path.write_text(text)
    with pytest.raises(RowsError, match=words) as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RowsError, match="cannot be read: No such file"):
        read_rows(tmp_path / "none.jsonl")


def test_rounds_are_merged_differences_by_their_median() -> None:
    times = (5.0, 2.0, 9.0)
    rounds = [row(us, round=i) for i, us in enumerate(times)]
    inside = [row(us, round=i, method="insitu") for i, us in enumerate(times)]
    found = RowSet([*rounds, *inside]).of("dense")
    assert {r["method"]: r["us"] for r in found} == {"warm": 2.0, "insitu": 5.0}
    assert all(r["rounds_us"] == [2.0, 5.0, 9.0] and "round" not in r for r in found)


def test_anchors_of_two_sessions_are_two_rows(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "a.rows.jsonl", HEADER)
    assert store.sessions == 0
    store.append(row(split="start", session=0))
    assert store.sessions == 1
    assert identity(row(split="start", session=0)) != identity(row(split="start", session=1))
