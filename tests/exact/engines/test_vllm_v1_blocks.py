"""The block tables of vLLM V1."""

from worlds import manager

from kvsim.core.request import Request
from kvsim.engines.vllm_v1.manager import Admission, KVCacheManager, full_attention


class Chain:
    """A stream whose first `shared` blocks are those of every other one."""

    def __init__(self, own: int, shared: int) -> None:
        self.own, self.shared = own, shared

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        return [i if i < self.shared else 1000 * self.own + i for i in range(first, last)]


def request(length: int, own: int = 1, shared: int = 0) -> Request:
    return Request(own, f"r{own}", length, Chain(own, shared))


def admit(blocks: KVCacheManager, one: Request) -> int:
    """Admits a request with all its tokens, and returns those that were found."""
    found = blocks.find(one)
    assert blocks.allocate(one, one.length - found, 0, Admission(found, 0, False))
    one.computed = one.length
    return found


def cached(blocks: KVCacheManager) -> tuple[int, int]:
    return blocks.gpu.free, blocks.gpu.cached


def test_block_0_is_never_used() -> None:
    blocks, one = manager(4, 5), request(16)
    admit(blocks, one)
    assert one.table == [1, 2, 3, 4]
    assert blocks.gpu.free == 0
    assert not blocks.allocate(one, 1, 0, None)
    assert one.filled == 16


def test_the_last_block_of_a_released_table_is_used_first() -> None:
    blocks, one, other = manager(4, 9), request(12), request(20)
    admit(blocks, one)
    blocks.free(one)
    admit(blocks, other)
    assert other.table == [3, 2, 1, 4, 5]


def test_blank_blocks_go_first_and_the_oldest_content_goes_last() -> None:
    """A table of two full blocks and a part: the part is reused first, then what was never used."""
    blocks, one, other = manager(4, 7, True), request(9, own=1), request(24, own=2)
    admit(blocks, one)
    assert one.table == [1, 2, 3]
    blocks.free(one)
    assert cached(blocks) == (6, 2)
    admit(blocks, other)
    assert other.table == [3, 4, 5, 6, 2, 1]
    assert [blocks.cached_tokens(each) for each in (request(9, 1), request(24, 2))] == [0, 20]


def test_a_hit_that_is_idle_uses_up_a_free_block() -> None:
    blocks = manager(4, 7, True)
    one, same = request(9, own=1, shared=2), request(9, own=2, shared=2)
    hog, other = request(12, own=3), request(9, own=4, shared=2)
    admit(blocks, one)
    admit(blocks, hog)
    blocks.free(one)
    assert cached(blocks) == (3, 2)
    assert admit(blocks, same) == 8
    assert (same.table, cached(blocks)) == ([1, 2, 3], (0, 0))
    assert blocks.find(other) == 8
    assert not blocks.allocate(other, 1, 0, Admission(8, 0, False))
    assert blocks.short_blocks == 1
    assert blocks.lookups == (6, 2)
    blocks.audit([same, hog])


def test_the_last_token_is_always_computed() -> None:
    blocks = manager(4, 20, True)
    one, same = request(8, own=1, shared=2), request(8, own=2, shared=2)
    admit(blocks, one)
    assert admit(blocks, same) == 4
    assert same.table == [1, 3]  # its second block is a duplicate of block 2
    blocks.free(one)
    # The first one labelled is served as long as it keeps its content.
    last = request(9, own=3, shared=2)
    assert admit(blocks, last) == 8
    assert last.table[:2] == [1, 2]


def test_a_look_changes_nothing() -> None:
    blocks, one, same = manager(4, 7, True), request(20, own=1), request(20, own=1)
    admit(blocks, one)
    blocks.free(one)
    idle = list(blocks.gpu.free_list())
    assert blocks.cached_tokens(same) == blocks.find(same) == 16
    assert (list(blocks.gpu.free_list()), blocks.lookups) == (idle, (4, 0))


def test_the_copy_that_was_labelled_first_is_hit_until_it_is_evicted() -> None:
    """The same prompt twice at once, whose last block is withheld: two blocks with one content."""
    blocks = manager(1, 7, True)
    first, second, third = (request(3, own=each, shared=3) for each in (1, 2, 3))
    longer, other = request(4, own=4, shared=3), request(3, own=9)
    admit(blocks, first)
    admit(blocks, second)
    assert (first.table, second.table) == ([1, 2, 3], [1, 2, 4])
    blocks.free(first)
    assert blocks.find(longer) == 3
    admit(blocks, other)
    assert other.table == [5, 6, 3]  # the copy in block 4 is left
    blocks.free(other)
    admit(blocks, longer)
    assert longer.table[:3] == [1, 2, 4]
    blocks.free(second)
    admit(blocks, third)
    assert third.table[:2] == [1, 2]
    blocks.audit([longer, third])


def test_the_longest_sequence_costs_no_memory_before_it_comes() -> None:
    blocks = full_attention(
        16,
        100,
        enable_prefix_caching=True,
        max_model_len=10**15,
        max_num_batched_tokens=8192,
    )
    assert blocks.gpu.free == 99
