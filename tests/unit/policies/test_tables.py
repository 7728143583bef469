"""Block tables: exact ids, copies on write, swaps, and books that always balance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

from kvsim.core.request import RUNNING, SWAPPED, Request
from kvsim.engines.vllm_063.blocks import Contiguous, Naive, PrefixCaching
from kvsim.errors import ConfigError, EngineStopped


class Words:
    """A stream whose tokens are the letters of a text, then those of a sample's own output."""

    def __init__(self, prompt: str, own: str = "*") -> None:
        self.prompt = prompt
        self.own = own

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        text = self.prompt + self.own * (last * block_size)
        return [hash(text[: (place + 1) * block_size]) for place in range(first, last)]

    def sample(self, index: int) -> "Words":
        return Words(self.prompt, chr(ord("A") + index))


def sequence(prompt: str, n: int = 1, index: int = 0) -> Request:
    return Request(index, str(index), len(prompt), Words(prompt, f"<{index}>"), n=n)


def token(tables: Naive, each: Request) -> list[tuple[int, int]]:
    each.state = RUNNING
    each.length += 1
    return tables.append(each)


def test_a_prompt_takes_the_lowest_blocks_and_gives_the_last_one_out_first() -> None:
    tables = Naive(block_size=4, num_gpu_blocks=6, num_cpu_blocks=0)
    a = sequence("0123456789")
    tables.allocate(a)
    assert a.table == [1, 2, 3]
    assert tables.empty_slots == 2
    tables.free(a)
    b = sequence("0123456789")
    tables.allocate(b)
    assert b.table == [3, 2, 1]


def test_a_token_opens_a_block_only_when_the_last_is_full() -> None:
    tables = Naive(4, 6, 0)
    a = sequence("012")
    tables.allocate(a)
    token(tables, a)
    assert a.table == [1]
    token(tables, a)
    assert a.table == [1, 2]


def test_growth_asks_for_a_block_even_where_the_last_has_room() -> None:
    tables = Naive(4, 6, 0)
    a = sequence("01")
    tables.allocate(a)
    a.length += 1
    assert tables.growth_need(a) == 1


def test_growth_can_ask_only_when_a_block_opens() -> None:
    tables = Naive(4, 6, 0, growth="when-needed")
    a = sequence("012")
    tables.allocate(a)
    a.length += 1
    assert tables.growth_need(a) == 0
    tables.append(a)
    a.length += 1
    assert tables.growth_need(a) == 1


def test_growth_asks_for_the_copy_of_a_shared_block() -> None:
    tables = Naive(4, 6, 0, growth="when-needed")
    parent = sequence("012345", n=2)
    tables.allocate(parent)
    tables.fork(parent, parent.child(0))
    parent.length += 1
    assert tables.growth_need(parent) == 1


def test_the_least_recently_used_content_goes_first_and_tails_before_heads() -> None:
    tables = PrefixCaching(4, 4, 0, eviction="lru")
    a, b = sequence("0123456701"), sequence("xxxxyyyyz", index=1)
    tables.allocate(a)
    tables.free(a)
    tables.allocate(b)
    tables.free(b)
    c = sequence("01234567z", index=2)
    tables.allocate(c)
    assert tables.lookups == (6, 1)  # of a, its first block is left; its second went first


def test_an_unknown_rule_names_the_rules() -> None:
    with pytest.raises(
        ConfigError, match="growth: unknown 'never'; choose from one-each, when-needed"
    ):
        Naive(4, 4, 0, growth="never")


def test_a_shared_last_block_is_copied_before_it_is_written() -> None:
    tables = Naive(4, 6, 0)
    parent = sequence("012345", n=2)
    tables.allocate(parent)
    child = parent.child(0)
    tables.fork(parent, child)
    parent.forked.append(child)
    assert child.table == [1, 2]
    assert token(tables, parent) == [(2, 3)]
    assert parent.table == [1, 3]
    assert token(tables, child) == []
    assert child.table == [1, 2]
    tables.audit([parent.request])


def test_equal_prompts_share_their_full_blocks() -> None:
    tables = PrefixCaching(4, 8, 0)
    a, b = sequence("0123456789"), sequence("0123456xyz", index=1)
    tables.allocate(a)
    tables.allocate(b)
    assert a.table == [1, 2, 3]
    assert b.table == [1, 4, 5]
    assert tables.lookups == (4, 1)


def test_sharing_in_the_same_step_saves_no_computation() -> None:
    tables = PrefixCaching(4, 8, 0)
    a, b, c = sequence("01234567z"), sequence("01234567z", index=1), sequence("01234567z", index=2)
    tables.allocate(a)
    tables.allocate(b)
    assert tables.scheduled(b, 0) == 0
    tables.composed()
    tables.allocate(c)
    assert tables.scheduled(c, 1) == 8


def test_the_last_block_never_counts_as_computed() -> None:
    tables = PrefixCaching(4, 8, 0)
    a, b = sequence("01234567"), sequence("01234567", index=1)
    tables.allocate(a)
    tables.composed()
    tables.allocate(b)
    assert b.table == a.table
    assert tables.scheduled(b, 1) == 4


def test_a_decoded_block_with_known_content_is_merged() -> None:
    tables = PrefixCaching(4, 8, 0)
    a = sequence("012")
    b = sequence("012")  # the same stream: its output is the same, too
    for each in (a, b):
        tables.allocate(each)
        token(tables, each)
    assert a.table == b.table == [1]
    assert tables.gpu.free == 7


def test_a_freed_prefix_can_be_hit_until_it_is_evicted() -> None:
    tables = PrefixCaching(4, 3, 0)
    a = sequence("0123456789")
    tables.allocate(a)
    tables.composed()
    tables.free(a)
    assert (tables.gpu.free, tables.gpu.cached) == (3, 2)
    b = sequence("0123456789", index=1)
    tables.allocate(b)
    assert tables.scheduled(b, 1) == 8
    tables.free(b)
    c = sequence("xxxxyyyyzzzz", index=2)
    tables.allocate(c)
    assert tables.gpu.cached == 0


def test_swapping_out_and_in_moves_every_block() -> None:
    tables = Naive(4, 4, 4)
    a = sequence("0123456789")
    tables.allocate(a)
    a.state = RUNNING
    assert tables.swap_out([a]) == [(1, 5), (2, 6), (3, 7)]
    a.state = SWAPPED
    assert (tables.gpu.free, tables.cpu.free) == (4, 1)
    assert tables.empty_slots == 0
    assert tables.swap_in([a]) == [(5, 3), (6, 2), (7, 1)]
    tables.audit([a.request])


def test_freeing_a_swapped_prefix_is_the_engines_own_fault() -> None:
    tables = PrefixCaching(4, 4, 4)
    a = sequence("01234")
    tables.allocate(a)
    tables.scheduled(a, 7)
    tables.swap_out([a])
    with pytest.raises(EngineStopped, match="freed-while-swapped"):
        tables.free(a)


def test_before_paging_a_request_reserves_the_longest_sequence() -> None:
    tables = Contiguous(block_size=4, num_gpu_blocks=11, num_cpu_blocks=0, max_model_len=16)
    a, b = sequence("0123456789"), sequence("01", index=1)
    tables.allocate(a)
    tables.allocate(b)
    assert (a.table, b.table) == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert tables.empty_slots == 6 + 14
    assert (tables.gpu.free, tables.admission_free, tables.stranded) == (3, 0, 3)
    tables.free(a)
    c = sequence("0", index=2)
    tables.allocate(c)
    assert c.table == [1, 2, 3, 4]
    tables.audit([b.request, c.request])


def test_before_paging_a_place_may_be_one_block() -> None:
    tables = Contiguous(block_size=16, num_gpu_blocks=2, num_cpu_blocks=0, max_model_len=16)
    for index in range(3):
        one = sequence("0123", index=index)
        tables.allocate(one)
        assert one.table == [1]
        tables.free(one)
    tables.audit([])


def test_an_admission_needs_no_block_that_others_hold() -> None:
    """As vLLM V1 counts, where vLLM 0.6.3 would ask for all of them."""
    tables = PrefixCaching(4, 9, 0, hits_save="admission")
    a, b = sequence("01234567ab"), sequence("01234567cd", index=1)
    assert tables.admission_need(a) == tables.admission_need(b) == 3
    tables.allocate(a)
    assert tables.admission_need(b) == 1
    assert PrefixCaching(4, 9, 0).admission_need(a) == 3


def test_before_paging_every_sample_reserves_at_admission() -> None:
    tables = Contiguous(4, 12, 0, max_model_len=16)
    parent = sequence("01234", n=3)
    assert tables.admission_need(parent.request) == 12
    tables.allocate(parent)
    child = parent.child(0)
    parent.forked.append(child)
    assert tables.fork(parent, child) == [(1, 9), (2, 10)]
    tables.audit([parent.request])
    tables.free(parent)
    tables.free(child)
    assert tables.gpu.free == 12
    tables.audit([parent.request])


def test_a_pool_below_one_reservation_is_refused() -> None:
    with pytest.raises(ConfigError, match="max-model-len"):
        Contiguous(4, 3, 0, max_model_len=16)


PROMPTS = ("", "aaaa", "aaaabbbb", "aaaabbbbcccc", "aaaabbbbccccdddd", "xyz")


@settings(deadline=None, max_examples=examples(150))
@given(
    kind=st.sampled_from((Naive, PrefixCaching)),
    moves=st.lists(
        st.tuples(
            st.sampled_from(("start", "token", "free", "fork", "out", "in", "step")),
            st.integers(0, 7),
            st.sampled_from(PROMPTS),
            st.text("pq", min_size=1, max_size=6),
        ),
        max_size=60,
    ),
)
def test_books_balance_whatever_happens(
    kind: type[Naive], moves: list[tuple[str, int, str, str]]
) -> None:
    tables = kind(4, 12, 6)
    live: list[Request] = []
    for number, (move, pick, shared, rest) in enumerate(moves):
        request = live[pick % len(live)] if live else None
        if move == "start":
            new = sequence(shared + rest, n=2, index=number)
            if tables.admission_need(new.request) <= tables.gpu.free:
                tables.allocate(new)
                new.state = RUNNING
                live.append(new.request)
        elif move == "step":
            for each in live:
                for one in each.sequences:
                    if one.state == RUNNING:
                        tables.scheduled(one, number)
            tables.composed()
        elif request is not None:
            _move(tables, live, request, move)
        tables.audit(live)
    for request in live:
        for each in request.sequences:
            if each.state == RUNNING:
                tables.free(each)
    assert tables.gpu.free == 12


def _move(tables: Naive, live: list[Request], request: Request, move: str) -> None:
    running = [s for s in request.sequences if s.state == RUNNING]
    swapped = [s for s in request.sequences if s.state == SWAPPED]
    if move == "token" and running:
        for each in running:
            each.length += 1
        if sum(tables.growth_need(s) for s in running) > tables.gpu.free:
            for each in running:
                each.length -= 1
            return
        for each in running:
            tables.append(each)
    elif move == "fork" and len(request.sequences) == 1 and running:
        child = request.child(0)
        tables.fork(request, child)
        request.forked.append(child)
    elif move == "free" and not swapped:
        for each in running:
            tables.free(each)
        live.remove(request)
    elif move == "out" and running and tables.swap_need(running, tables.cpu) <= tables.cpu.free:
        tables.swap_out(running)
        for each in running:
            each.state = SWAPPED
    elif move == "in" and swapped and tables.swap_need(swapped, tables.gpu) <= tables.gpu.free:
        tables.swap_in(swapped)
        for each in swapped:
            each.state = RUNNING
