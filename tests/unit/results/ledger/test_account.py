"""The books of long runs, whose columns are packed and are gone through piece by piece."""

from collections.abc import Iterator

import numpy as np
import pytest
from small_engines import engine, make_trace

import kvsim
from kvsim.core.records import TRANSITION_COLUMNS, PackedColumns
from kvsim.core.schema import STEP_COLUMNS
from kvsim.results.ledger import KERNELS, TIME_PARTS, account
from kvsim.results.ledger.account import account_times, check_sums
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config

DRAWN = [(7 * (i % 3), 1 + 5 * i % 40, 1 + 3 * i % 19, i % 4) for i in range(25)]


def packed(result: kvsim.Result, most: int) -> PackedColumns:
    columns = PackedColumns(STEP_COLUMNS, most)
    rows = np.stack([result.steps[name] for name in STEP_COLUMNS], axis=1)
    for first in range(0, len(rows), 10):
        columns.add(rows[first : first + 10])
    return columns


@pytest.mark.parametrize("most", [1 << 20, 20])
@pytest.mark.parametrize("name", ["0.6.3 swap", "v1 async"])
def test_pieces_make_no_difference(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, and with most of the rows in a file."""
    table = engine(name)
    result = kvsim.simulate(make_trace(DRAWN), table)
    monkeypatch.setattr(account, "PIECE_ROWS", 7)
    assert len(result.steps["start_ns"]) > 35
    cost = assemble(make_config(table)).cost
    in_flight = result.meta["steps_in_flight"]
    steps, parts = account_times(
        cost, packed(result, most), result.requests, result.transitions, in_flight
    )
    for column in KERNELS:
        assert (steps[column] == result.steps[column]).all()
    for column in TIME_PARTS:
        assert (parts[column] == result.requests[column]).all()


def test_added_columns_must_have_a_row_for_each() -> None:
    columns = PackedColumns(("a",))
    columns.add(np.arange(3).reshape(-1, 1))

    def blocks() -> Iterator[np.ndarray]:
        yield np.arange(2).reshape(-1, 1)

    with pytest.raises(AssertionError, match="another length"):
        columns.widen(("b",), blocks())
    assert list(columns) == ["a"]
    columns.widen(("b",), iter([np.arange(5, 8).reshape(-1, 1)]))
    assert columns["b"].tolist() == [5, 6, 7]


def test_books_that_do_not_balance_are_an_error() -> None:
    columns = {"a": np.array([1, 2]), "b": np.array([3, 3])}
    check_sums("one", columns, ("a", "b"), np.array([4, 5]))
    with pytest.raises(AssertionError, match="number 1"):
        check_sums("one", columns, ("a", "b"), np.array([4, 6]))
    with pytest.raises(AssertionError, match="negative"):
        check_sums("one", {"a": np.array([-1])}, ("a",), np.array([-1]))


def test_a_run_without_a_step_has_waits_only() -> None:
    """One request that came and was never looked at, until another came."""
    nothing = {name: np.zeros(0, dtype=np.int64) for name in STEP_COLUMNS}
    never = np.full(2, -1)
    requests = {"arrival_ns": np.array([3, 10])}
    requests |= dict.fromkeys(("first_scheduled_ns", "first_token_ns", "finish_ns"), never)
    log = {name: np.zeros(0, dtype=np.int64) for name in TRANSITION_COLUMNS}
    steps, parts = account_times(object(), nothing, requests, log, 1)
    assert steps["host_ns"].tolist() == []
    assert parts["waiting_step_ns"].tolist() == [7, 0]
    assert not any(parts[name].any() for name in TIME_PARTS[1:])
