"""Arrow tables made of buffers are those that Arrow itself would make."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from places import ROOT
from runs import real_run
from tiny import tiny_run

from kvsim.core.records import PackedColumns
from kvsim.core.schema import STEP_COLUMNS
from kvsim.report import files
from kvsim.results import tables
from kvsim.results.ledger import KERNELS
from kvsim.results.summary import summarise

INTS = arrays(np.int64, st.integers(0, 40), elements=st.integers(-3, 2**62))


def packed(steps: dict[str, np.ndarray], piece: int) -> PackedColumns:
    columns = PackedColumns(STEP_COLUMNS)
    block = np.stack([steps[name] for name in STEP_COLUMNS], axis=1)
    for first in range(0, len(block), piece):
        columns.add(block[first : first + piece])
    columns.widen(KERNELS, [np.stack([steps[name] for name in KERNELS], axis=1)])
    return columns


@given(INTS)
def test_numbers_are_what_arrow_makes_of_them(values: np.ndarray) -> None:
    assert tables.numbers(values).equals(pa.array(values))
    assert tables.numbers(values, values < 0).equals(pa.array(values, mask=values < 0))
    seconds = tables._seconds(values)
    assert seconds.equals(pa.array(values / 1e9, mask=values < 0))
    assert seconds.null_count == int((values < 0).sum())


@given(st.lists(st.none() | st.integers(-(2**53), 2**53)), st.booleans())
def test_optional_numbers_and_truths_are_what_arrow_makes_of_them(
    values: list[int | None], whole: bool
) -> None:
    kind = pa.int64() if whole else pa.float64()
    assert tables.optional(values, whole=whole).equals(pa.array(values, kind))
    known = [value is None for value in values]
    assert tables.truths(known).equals(pa.array(known, pa.bool_()))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_texts_are_what_arrow_makes_of_them(texts: list[str]) -> None:
    made = tables.texts(texts)
    made.validate(full=True)
    assert made.equals(pa.array(texts, pa.string()))


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_requests_come_in_pieces_that_make_up_the_whole(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(tables, "PIECE", piece)
    requests = {name: column[:20] for name, column in real_run()[1].items()}
    pieces = list(tables.requests_tables(requests))
    assert all(0 < len(each) <= piece for each in pieces)
    assert pa.concat_tables(pieces).combine_chunks().equals(tables.requests_table(requests))
    (empty,) = tables.requests_tables({name: column[:0] for name, column in requests.items()})
    assert len(empty) == 0 and empty.schema == pieces[0].schema


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_steps_come_in_pieces_that_make_up_the_whole(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(tables, "PIECE", piece)
    steps = {name: column[:50] for name, column in real_run()[0].items()}
    whole = tables.steps_table(steps)
    for given_steps in (steps, packed(steps, 5)):
        pieces = list(tables.steps_tables(given_steps))
        assert all(0 < len(each) <= piece for each in pieces)
        assert pa.concat_tables(pieces).equals(whole)
    none = {name: column[:0] for name, column in steps.items()}
    (empty,) = tables.steps_tables(none)
    assert empty.schema == whole.schema and len(empty) == 0


def test_a_long_run_is_written_as_a_short_one_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps, requests, gaps, meta = real_run()
    summary = summarise(steps, requests, gaps, meta)
    assert summarise(packed(steps, 4), requests, gaps, meta) == summary
    files.write_results(tmp_path / "whole", summary, requests, steps, csv=True)
    monkeypatch.setattr(tables, "PIECE", 101)
    files.write_results(tmp_path / "pieces", summary, requests, packed(steps, 4), csv=True)
    for name in ("summary.json", "requests.csv", "steps.csv"):
        one, other = (tmp_path / each / name for each in ("whole", "pieces"))
        assert one.read_bytes() == other.read_bytes(), name
    for name in ("requests.parquet", "steps.parquet"):  # in other row groups
        one, other = (pq.read_table(tmp_path / each / name) for each in ("whole", "pieces"))
        assert one.equals(other), name


def test_writing_results_does_not_import_pandas(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]; from tiny import tiny_run;"
        " from kvsim.report.files import write_results;"
        " from kvsim.results.summary import summarise; run = tiny_run();"
        " write_results(sys.argv[1], summarise(*run), run[1], run[0], csv=True);"
        " assert 'pyarrow' in sys.modules; assert 'pandas' not in sys.modules"
    )
    paths = [str(ROOT / "tests" / "support"), str(ROOT / "tests")]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out"), *paths], check=True)
    assert tiny_run()[1]["id"] == files.read_results(tmp_path / "out")[1]["id"]
