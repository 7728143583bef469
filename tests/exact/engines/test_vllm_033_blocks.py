"""Block tables of vLLM 0.3.3: exact ids, counts per table entry, and what goes wrong with them."""

from collections.abc import Sequence as Seq

import pytest

from kvsim.against.conform.step_log import RuleStream
from kvsim.core.request import RUNNING, SWAPPED, Request
from kvsim.engines.vllm_033 import Vllm033Tables
from kvsim.errors import ConfigError, EngineStopped


def admitted(
    tables: Vllm033Tables, prompt: Seq[int], *, n: int = 1, prefix_pos: int = 0
) -> Request:
    stream = RuleStream("r", prompt)
    request = Request(0, "r", len(prompt), stream, n=n, prefix_pos=prefix_pos)
    tables.allocate(request)
    request.state = RUNNING
    return request


def forked(tables: Vllm033Tables, parent: Request) -> Request:
    child = parent.child(0)
    parent.forked.append(child)
    tables.fork(parent, child)
    return child


def grow(tables: Vllm033Tables, each: Request, tokens: int = 1) -> list[tuple[int, int]]:
    copies = []
    for _ in range(tokens):
        each.length += 1
        copies += tables.append(each)
    return copies


def test_blocks_come_from_the_top_and_the_last_of_a_table_is_reused_first() -> None:
    tables = Vllm033Tables(4, 6, 0)
    a = admitted(tables, range(10))
    assert a.table == [6, 5, 4]
    tables.free(a)
    assert admitted(tables, range(10)).table == [4, 5, 6]


def test_samples_share_blocks_until_one_of_them_writes() -> None:
    tables = Vllm033Tables(4, 6, 0)
    parent = admitted(tables, range(6), n=2)
    child = forked(tables, parent)
    assert grow(tables, parent) == [(5, 4)]
    assert grow(tables, child) == []
    assert (parent.table, child.table) == ([6, 4], [6, 5])
    tables.audit([parent.request])


def test_a_swap_keeps_what_samples_share() -> None:
    tables = Vllm033Tables(4, 6, 6)
    parent = admitted(tables, range(8), n=2)
    both = [parent, forked(tables, parent)]
    for each in both:
        grow(tables, each)
        each.length += 1
    assert tables.swap_need(both, tables.cpu) == 4
    assert len(tables.swap_out(both)) == 4
    for each in both:
        each.state = SWAPPED
    assert (tables.gpu.free, tables.cpu.free, tables.empty_slots) == (6, 2, 0)
    assert tables.swap_need(both, tables.gpu) == 4 + 2
    assert len(tables.swap_in(both)) == 4
    assert both[0].table[:2] == both[1].table[:2]
    assert (tables.gpu.free, tables.cpu.free, tables.empty_slots) == (2, 6, 6)


def test_a_window_makes_a_table_repeat_its_blocks() -> None:
    tables = Vllm033Tables(2, 9, 0, sliding_window=4)
    a = admitted(tables, range(7))
    assert a.table == [9, 8, 9, 8]
    grow(tables, a, 2)
    assert a.table == [9, 8, 9, 8, 9]
    tables.free(a)
    assert tables.gpu.free == 9


def test_swapping_a_table_that_repeats_blocks_frees_them_twice() -> None:
    tables = Vllm033Tables(2, 9, 9, sliding_window=4)
    a = admitted(tables, range(7))
    with pytest.raises(EngineStopped, match="double-free"):
        tables.swap_out([a])


def test_a_window_is_a_whole_number_of_blocks() -> None:
    with pytest.raises(ConfigError, match="sliding_window"):
        Vllm033Tables(4, 9, 0, sliding_window=10)


def test_a_declared_prefix_is_shared_and_kept_for_ever() -> None:
    tables = Vllm033Tables(2, 9, 9)
    a = admitted(tables, range(7), prefix_pos=5)
    assert tables.scheduled(a, 0) == 0
    tables.publish(a, 4)
    b = admitted(tables, [*range(5), 8, 8], prefix_pos=4)
    assert a.table[:2] == b.table[:2]
    assert tables.scheduled(b, 1) == 4
    assert tables.lookups == (4, 2)
    b.length += 1
    tables.swap_out([b])
    assert (len(b.table), tables.cpu.used) == (2, 2)
    b.state = SWAPPED
    tables.audit([a.request, b.request])
    tables.swap_in([b])
    assert b.table[:2] == a.table[:2]
    for each in (a, b):
        tables.free(each)
    assert tables.gpu.used == 2


def test_a_request_down_to_one_sample_leaks_blocks_when_it_is_recomputed() -> None:
    tables = Vllm033Tables(4, 6, 0)
    parent = admitted(tables, range(6), n=2)
    child = forked(tables, parent)
    tables.free(parent)
    tables.free(child)
    tables.allocate(child)
    tables.free(child)
    assert tables.gpu.used == 2
