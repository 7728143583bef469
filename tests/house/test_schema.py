"""Every column is declared once, and what is made of the declarations agrees with them."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from places import ROOT

from kvsim.archive import Archive
from kvsim.blockmap.blockmap import STATES
from kvsim.engine.loop import composed_row
from kvsim.engine.plan import RECOMPUTE, SWAP, Plan, Prefill
from kvsim.engine.request import Request
from kvsim.ledger.parts import KERNEL_LABELS, PROMPT_LABELS, PROMPT_PARTS, WAITING_FOR
from kvsim.schema import BLOCK_MAP, BLOCKED, REQUESTS, STEP_COLUMNS, TABLES, Table, step_row
from kvsim.schema.reference import reference

DOCS = ROOT / "docs" / "reference" / "columns.md"


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


def test_a_composed_row_has_each_number_in_its_column() -> None:
    """As many things of each kind as the place of its column says; times and ends are 0 yet."""
    expected = {name: place for place, name in enumerate(STEP_COLUMNS)}
    for name in STEP_COLUMNS[:6] + STEP_COLUMNS[-1:]:
        expected[name] = 0
    request = Request(0, "r0", 1)
    plan = Plan()
    for name in ("swapped_in", "ignored"):
        setattr(plan, name, [request] * expected[name])
    for name, column in (("swaps_out", "swap_out"), ("swaps_in", "swap_in"), ("copies", "copied")):
        setattr(plan, name, [(0, 0)] * expected[f"{column}_blocks"])
    for name in ("decode_seqs", "context_tokens", "batched_tokens", "blocked"):
        setattr(plan, name, expected[name])
    plan.chunks = [(expected["prefill_tokens"] - 1, 0), (1, 0)]
    plan.prefills = [Prefill(request, 2, 2, 0, False, 2)] * expected["prefill_seqs"]
    expected["cached_tokens"] = 2 * len(plan.prefills)
    plan.preempted = [(request, RECOMPUTE)] * expected["preempted_recompute"]
    plan.preempted += [(request, SWAP)] * expected["preempted_swap"]
    first = STEP_COLUMNS.index("used_blocks")
    blocks = SimpleNamespace(census=lambda: tuple(range(first, first + 6)))
    batch: Any = SimpleNamespace(
        waiting=[request] * expected["waiting"],
        num_running=expected["running"],
        swapped=[request] * expected["swapped"],
        blocks=blocks,
    )
    row = np.frombuffer(composed_row(batch, plan), np.int64).tolist()
    assert dict(zip(STEP_COLUMNS, row, strict=True)) == expected


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
    waits = ["transfer_ns", "link_wait_ns", "flush_ns", "rank_wait_ns"]
    assert list(KERNEL_LABELS)[-len(waits) :] == waits
    assert [name for name in WAITING_FOR if name not in BLOCKED] == []
    assert WAITING_FOR["watermark"] == "waiting_watermark_ns"


def test_a_block_map_counts_the_blocks_of_every_state() -> None:
    assert {f"{state}_blocks" for state in STATES} <= {c.name for c in BLOCK_MAP.columns}
