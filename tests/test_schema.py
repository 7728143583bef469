"""Every column is declared once, and what is made of the declarations agrees with them."""

import inspect
from pathlib import Path

import numpy as np
import pytest

from kvsim.archive import Archive
from kvsim.blockmap.blockmap import STATES
from kvsim.ledger.parts import KERNEL_LABELS, PROMPT_LABELS, PROMPT_PARTS, WAITING_FOR
from kvsim.schema import BLOCK_MAP, BLOCKED, REQUESTS, STEP_COLUMNS, TABLES, Table, step_row
from kvsim.schema.reference import reference

DOCS = Path(__file__).resolve().parents[1] / "docs" / "reference" / "columns.md"


def test_the_reference_is_up_to_date() -> None:
    remedy = f"python -m kvsim.schema > {DOCS.relative_to(DOCS.parents[2])}"
    assert DOCS.read_text(encoding="utf-8") == reference(), remedy


def test_a_step_row_has_the_declared_columns_in_order() -> None:
    parameters = inspect.signature(step_row).parameters
    names = list(parameters)
    place = names.index("census")
    names[place : place + 1] = STEP_COLUMNS[place : place + 6]
    assert tuple(names) == STEP_COLUMNS
    assert all(each.kind == each.KEYWORD_ONLY for each in parameters.values())
    values = {name: STEP_COLUMNS.index(name) for name in parameters if name != "census"}
    row = step_row(**values, census=tuple(range(place, place + 6)))
    assert np.frombuffer(row, np.int64).tolist() == list(range(len(STEP_COLUMNS)))
    few = np.frombuffer(step_row(start_ns=3, end_ns=5, blocked=2), np.int64)
    assert {n: v for n, v in zip(STEP_COLUMNS, few.tolist(), strict=True) if v} == {
        "start_ns": 3,
        "end_ns": 5,
        "blocked": 2,
    }


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_columns_are_named_once_and_after_their_units(table: Table) -> None:
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    for column in table.columns:
        assert column.meaning, column.name
        ending = column.name.rpartition("_")[2]
        if ending in ("ns", "s", "tokens", "blocks", "steps"):
            assert column.unit == ending, column.name
        if column.unit == "s":
            assert column.derived, column.name


def test_an_archive_has_the_columns_of_requests_but_those_of_files_and_ledger() -> None:
    expected = {column.name for column in REQUESTS.held()}
    assert set(Archive([]).columns()) == expected


def test_a_result_has_a_ledger_or_none() -> None:
    own = [column.name for column in REQUESTS.expected(())]
    grown = [column.name for column in REQUESTS.expected((*own, "cold_tokens"))]
    assert grown == [*own, *PROMPT_PARTS[1:]]


def test_parts_have_labels() -> None:
    assert tuple(PROMPT_LABELS) == PROMPT_PARTS
    assert list(KERNEL_LABELS)[-2:] == ["transfer_ns", "link_wait_ns"]
    assert [name for name in WAITING_FOR if name not in BLOCKED] == []
    assert WAITING_FOR["watermark"] == "waiting_watermark_ns"


def test_a_block_map_counts_the_blocks_of_every_state() -> None:
    assert {f"{state}_blocks" for state in STATES} <= {c.name for c in BLOCK_MAP.columns}
