"""Rows of steps hold what plans hold, under the names of the schema."""

import numpy as np
import pytest

from kvsim.core import rows
from kvsim.core.plan import RECOMPUTE, SWAP, Moved, Plan
from kvsim.core.records import PackedColumns
from kvsim.core.request import Request
from kvsim.core.rows import PIECE_ROWS, WIDE_ROWS, StepRows
from kvsim.core.schema import STEP_COLUMNS

ALWAYS_ZERO = (
    "swapped_in",
    "swap_out_blocks",
    "swap_in_blocks",
    "copied_blocks",
    "swapped",
    "cpu_used_blocks",
    "stranded_blocks",
)
"""What no engine of the core does."""
FIELDS = {
    "start_ns": "start_ns",
    "end_ns": "end_ns",
    "prefill_seqs": "num_chunks",
    "blocked": "blocked",
    **{
        name: name
        for name in (
            "prefill_tokens",
            "cached_tokens",
            "decode_seqs",
            "context_tokens",
            "batched_tokens",
            "waiting",
            "running",
            "used_blocks",
            "cached_blocks",
            "free_blocks",
            "empty_slots",
        )
    },
}
"""Column → attribute of a plan."""


def made() -> tuple[Plan, dict[str, int]]:
    """A plan whose figures are all different, and the row expected of it."""
    plan = Plan(4)
    expected = dict.fromkeys(ALWAYS_ZERO, 0)
    for value, (column, attribute) in enumerate(FIELDS.items(), 100):
        setattr(plan, attribute, value)
        expected[column] = value
    plan.moved = Moved(11, 12, 13, 14)
    expected |= {"transfer_ns": 11, "link_wait_ns": 12, "flush_ns": 13, "rank_wait_ns": 14}
    one = Request(0, "r0", 1)
    plan.preempted = [(one, RECOMPUTE), (one, SWAP), (one, RECOMPUTE), (one, RECOMPUTE)]
    plan.ignored = [one] * 5
    expected |= {"preempted_recompute": 3, "preempted_swap": 1, "ignored": 5, "finished": 7}
    return plan, expected


def test_the_order_of_cells_is_that_of_the_columns() -> None:
    plan, expected = made()
    table = StepRows()
    table.add(plan, 7)
    columns = table.columns()
    assert tuple(columns) == STEP_COLUMNS
    assert {name: int(column[0]) for name, column in columns.items()} == expected


def test_gauges_follow_the_columns() -> None:
    plan, expected = made()
    plan.gauges = (55, 56)
    table = StepRows(("one", "other"))
    table.add(plan, 7)
    columns = table.columns()
    assert tuple(columns) == (*STEP_COLUMNS, "one", "other")
    assert (columns["one"].tolist(), columns["other"].tolist()) == ([55], [56])
    assert columns["finished"].tolist() == [expected["finished"]]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(2 * PIECE_ROWS + 3, dict), (WIDE_ROWS, dict), (WIDE_ROWS + 1, PackedColumns)],
)
def test_pieces_are_joined(number: int, kind: type) -> None:
    plan, _ = made()
    table = StepRows()
    for step in range(number):
        plan.start_ns, plan.end_ns = 3 * step, 3 * step + step % 5
        table.add(plan, step % 2)
    assert len(table) == table.num_rows == number
    columns = table.columns()
    assert type(columns) is kind
    assert np.array_equal(columns["start_ns"], 3 * np.arange(number))
    assert np.array_equal(columns["end_ns"], 3 * np.arange(number) + np.arange(number) % 5)
    assert np.array_equal(columns["finished"], np.arange(number) % 2)
    assert set(columns["waiting"]) == {plan.waiting}


def test_no_steps_are_columns_without_rows() -> None:
    columns = StepRows().columns()
    assert tuple(columns) == STEP_COLUMNS
    assert all(len(column) == 0 for column in columns.values())


def test_the_number_of_steps_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsim.errors import ConfigError
    from kvsim.settings import limits

    plan, _ = made()
    table = rows.StepRows()
    table.add(plan, 0)
    table.add(plan, 0)
    monkeypatch.setattr(limits, "STEPS", 1)
    with pytest.raises(ConfigError, match="steps"):
        table.columns()
