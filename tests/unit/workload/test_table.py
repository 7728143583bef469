"""Any CSV or Parquet file becomes a trace by a map of its columns; nothing is guessed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import ConfigError, TraceError
from kvsim.workload import open_trace
from kvsim.workload.formats.table import UNITS_NS, parse_columns

TABLE = "when,n_in,n_out,who\n1.5,10,2,a\n1.25,12,3,b\n1.75,14,4,a\n"


def table(folder: Path, text: str = TABLE) -> str:
    path = folder / "data"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("unit", UNITS_NS)
def test_units_are_those_that_are_stated(unit: str, tmp_path: Path) -> None:
    trace = open_trace(table(tmp_path), columns=f"arrival_{unit}=when,input=n_in,output=n_out")
    scale = UNITS_NS[unit]
    expected = sorted(round(time * scale) - round(1.25 * scale) for time in (1.25, 1.5, 1.75))
    assert [row.arrival_ns for row in trace.rows] == expected
    assert [row.input_length for row in trace.rows][1:] == [10, 14]


def test_ids_sessions_and_models(tmp_path: Path) -> None:
    columns = "input=n_in,output=n_out,id=when,session=who,model=who"
    rows = open_trace(table(tmp_path), columns=columns).rows
    assert [(row.id, row.session, row.turn, row.model) for row in rows] == [
        ("1.5", "a", 0, "a"),
        ("1.25", "b", 0, "b"),
        ("1.75", "a", 1, "a"),
    ]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_numbers_may_have_decimal_commas(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    rows = [["arrival_s", "input", "output"], ["0,5", "10", "5"], ["1,75", "20", "6"]]
    path.write_text("\n".join(separator.join(row) for row in rows))
    trace = open_trace(str(path), columns="arrival_s=arrival_s,input=input,output=output")
    assert [row.arrival_ns for row in trace.rows] == [0, 1_250_000_000]
    path.write_text(separator.join(rows[0]) + "\n" + separator.join(["0,5", "1,234", "5"]))
    with pytest.raises(TraceError, match=r"input: .* is not an integer >= 0"):
        open_trace(str(path), columns="arrival_s=arrival_s,input=input,output=output")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_and_quotes(separator: str, tmp_path: Path) -> None:
    lines = ('"arrival_s",input_tokens,output_tokens', '"1","5",6')
    text = "\n".join(lines).replace(",", separator)
    (row,) = open_trace(table(tmp_path, text)).rows
    assert (row.input_length, row.output_length) == (5, 6)


def parquet(folder: Path, **columns: object) -> str:
    path = folder / "data"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path, ts=[2000, 1000], prompt_tokens=[5, 6], output_tokens=[7.0, 8.0])
    trace = open_trace(path, columns="arrival_ms=ts,input=prompt_tokens,output=output_tokens")
    assert [(row.input_length, row.arrival_ns) for row in trace.rows] == [(6, 0), (5, 10**9)]
    assert len(trace.sha256) == 64
    with pytest.raises(TraceError, match=r'"ts" has no unit; say which|2000 has no unit; say'):
        open_trace(path)
    with pytest.raises(TraceError, match="nope: no such column; columns found: ts,prompt_tokens"):
        open_trace(path, columns="input=nope,output=output_tokens")


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_parquet_times_need_no_unit(unit: str, tmp_path: Path) -> None:
    times = [datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC) for second in (1, 4)]
    stored = pyarrow.array(times, pyarrow.timestamp(unit, "UTC"))
    trace = open_trace(
        parquet(tmp_path, timestamp=stored, input_tokens=[5, 6], output_tokens=[7, 8])
    )
    assert [row.arrival_ns for row in trace.rows] == [0, 3 * 10**9]
    assert trace.origin == "2026-01-01T00:00:01+00:00"


@given(cut=st.integers(4, 600), byte=st.binary(max_size=3))
def test_a_damaged_parquet_file_is_refused(
    tmp_path_factory: pytest.TempPathFactory, cut: int, byte: bytes
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    path = Path(parquet(folder, arrival_s=[1, 2], input_tokens=[5, 6], output_tokens=[7, 8]))
    stored = path.read_bytes()
    path.write_bytes(stored[:cut] + byte + stored[cut + len(byte) :])
    try:
        open_trace(str(path))
    except TraceError as error:
        assert "\n" not in str(error)
    path.write_bytes(stored[:cut])
    with pytest.raises(TraceError, match="not a Parquet file that can be read"):
        open_trace(str(path))


AMBIGUOUS = {
    "no unit": (
        "ts,input_tokens,output_tokens\n1,2,3\n",
        '"ts" has no unit; say which column is what: --columns arrival_s=ts,input=input_tokens,',
    ),
    "two inputs": (
        "arrival_s,input_tokens,prompt_tokens,output\n1,2,3,4\n",
        "--columns arrival_s=arrival_s,input=COLUMN,output=output",
    ),
    "a time by another name": (
        "startTime,prompt_tokens,completion_tokens\n2026-01-01T00:00:02Z,5,6\n",
        'when requests came may be in "startTime"; say which column is what: --columns'
        " arrival=startTime,input=prompt_tokens,output=completion_tokens (or arrival_ms, arrival",
    ),
    "several that may be": (
        "id,begin,end,input,output,ttft_ms\na,1,2,5,6,7\n",
        'may be in "begin", "end"; say which column is what: --columns arrival_s=COLUMN,input=inp',
    ),
    "no output": ("arrival_s,input_tokens\n1,2\n", "input=input_tokens,output=COLUMN"),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_what_could_mean_several_things_is_refused(case: str, tmp_path: Path) -> None:
    text, says = AMBIGUOUS[case]
    with pytest.raises(TraceError) as refusal:
        open_trace(table(tmp_path, text))
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_time_by_another_name_in_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path, startTime=[1.5, 2.5], input_tokens=[5, 6], output_tokens=[7, 8])
    with pytest.raises(TraceError, match=r'may be in "startTime"; .* arrival_s=startTime,input='):
        open_trace(path)
    assert len(open_trace(path, columns="input=input_tokens,output=output_tokens").rows) == 2


def test_a_table_without_arrivals_needs_no_map(tmp_path: Path) -> None:
    text = "id,input_tokens,output_tokens,model,ttft_ms,e2e_latency\na,5,6,m,7,8\n"
    (row,) = open_trace(table(tmp_path, text)).rows
    assert row.arrival_ns is None and row.observed == {"ttft_s": 0.007}


def test_a_number_given_as_a_date_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"data:2: when: .* has no unit; say --columns arrival_s=when"
    ):
        open_trace(table(tmp_path), columns="arrival=when,input=n_in,output=n_out")


def test_dates_need_no_unit(tmp_path: Path) -> None:
    text = "created_at,prompt,completion\n2026-01-01T00:00:02Z,5,6\n2026-01-01T00:00:01.5Z,7,8\n"
    trace = open_trace(table(tmp_path, text))
    assert [row.arrival_ns for row in trace.rows] == [0, 500_000_000]
    assert trace.origin == "2026-01-01T00:00:01.5Z"


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("input=a", "no output; add output=COLUMN"),
        ("inptu=a,output=b", "'inptu' is not a role; did you mean 'input'?"),
        ("input=a,output", "'output' is not ROLE=COLUMN"),
        ("input=a,input=b,output=c", "input is given twice"),
        ("input=a,output=c,arrival_s=t,arrival_ms=t", "arrival is given twice"),
        ("", "'' is not ROLE=COLUMN"),
    ],
)
def test_a_wrong_map_is_refused(columns: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_columns(columns)
    assert says in str(refusal.value)


def test_a_map_is_for_tables(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--columns: only for tables, not for --trace-format azure"
    ):
        open_trace(table(tmp_path), "azure", "input=a,output=b")
