"""Every column is declared once, and what is made of the declarations agrees with them."""

import pytest

from kvsim.core.schema import BLOCK_MAP, BLOCKED, REQUESTS, TABLES, Table
from kvsim.results.blockmap import STATES
from kvsim.results.ledger import KERNEL_LABELS, PROMPT_LABELS, PROMPT_PARTS, TIME_PARTS, WAITING_FOR
from kvsim.run.serving import Archive


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
    held = {column.name for column in REQUESTS.held(())}
    assert set(Archive([]).columns()) == held - set(TIME_PARTS)


def test_a_result_has_all_parts_of_prompts_or_none() -> None:
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
