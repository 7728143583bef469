"""Block tables of a model with one group of full attention, for a scheduler with features.

Beside what plain tables do, slots can be taken for tokens that a connector loads and for tokens
ahead of those known, and the blocks of a finished request can be kept for a while.
vLLM 0.33.0 `v1/core/kv_cache_manager.py`, `v1/core/block_pool.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from kvsim.engine.pool import each
from kvsim.engine.request import Sequence
from kvsim.engines.vllm_v1_blocks import ContentPool, VllmV1PrefixTables

Find = Callable[[int, int], int | None]
"""Returns the block with the content of a key and a group."""


class Hits(NamedTuple):
    """The part of a sequence whose KV is in blocks already."""

    tokens: int
    blocks: list[list[int]]
    """For each group its leading blocks; 0 stands for one that is not needed any more."""


class FullGroup(NamedTuple):
    """The layers of a model that attend to all tokens."""

    block_size: int
    kind: str = "full"
    eagle: bool = False
    """Whether the layers of the drafter are among them."""


class SharedPool(ContentPool):
    """A pool whose blocks may be held by others than tables, and leave them in any order."""

    def release(self, blocks: list[int]) -> None:
        """Drops a reference to each block, in this order, in one call.

        Idle blocks without content go to the head of the free list, the first one foremost. Those
        with content go to its tail (`BlockPool.free_blocks`)."""
        self.drop_keyed_table(blocks[::-1], 0, -1)

    def drop_keyed_table(self, table: list[int], size: int, access_ns: int) -> None:
        alone, tokens = self._let_go(table, size)
        key_of = self.key_of
        full = [block for block in alone if block in key_of]
        blank = [block for block in alone if block not in key_of]
        self.content.put_table(full, [key_of[block] for block in full], tokens[: len(full)], -1)
        self._blank.put_table(blank, [None] * len(blank), tokens[: len(blank)], -1)

    def free_list(self) -> Iterator[int]:
        """Yields the idle blocks in the order in which they are reused."""
        blank = self._blank
        return chain(reversed([*blank]), blank.fresh, self.content)


class FullTables(VllmV1PrefixTables):
    """Block tables of one group of full attention."""

    gpu: SharedPool
    swaps = False
    cuts = False
    """Whether `cut` may shorten a chunk."""

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        *,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        eagle_drop: bool = False,
        lookahead_keys: bool = False,
    ) -> None:
        """`eagle_drop`: a hit loses its last block. `lookahead_keys`: the key of a block also
        covers the token after it."""
        super().__init__(block_size, num_gpu_blocks)
        self.lockstep = ""
        self.groups = (FullGroup(block_size),)
        self.hash_block_size = self.scheduler_block_size = block_size
        self.caches = enable_prefix_caching
        self.max_model_len = max_model_len
        self._eagle_drop = eagle_drop
        self._ahead = int(lookahead_keys)
        self._detached: list[list[int]] = []
        self._pinned: list[int] = []

    def make_pool(self, size: int, first: int) -> SharedPool:
        return SharedPool(size, first + 1, self.eviction)

    # -- questions -------------------------------------------------------------------------------

    def begin(self) -> None:
        """A scheduling call begins."""

    def keys(self, sequence: Sequence) -> list[int]:
        """Returns the keys of all full blocks of the known tokens."""
        size = self.block_size
        number = (sequence.length - self._ahead) // size
        if not self._ahead:
            return sequence.block_keys(number, size)
        keys = sequence.keys
        if len(keys) < number:
            stream = sequence.identities(sequence.length)
            assert stream is not None, "block identities are needed"
            # The key of a block of one token stands for the tokens before it, too.
            for end in range((len(keys) + 1) * size, number * size + 1, size):
                keys += stream.keys(end, end + 1, 1)
        return keys

    def find(self, key: int, group: int) -> int | None:
        """Returns the block with this content."""
        return self.gpu.block_of.get(key)

    def key_of(self, block: int) -> tuple[int, int] | None:
        """Returns the key and the group of a block's content."""
        key = self.gpu.key_of.get(block)
        return None if key is None else (key, 0)

    def lookup(self, sequence: Sequence) -> Hits:
        """Returns the hits of an admission. The last token is always computed."""
        if not self.caches:
            return self.nothing
        return self.find_hits(self.keys(sequence), sequence.length - 1, self.find)

    @property
    def nothing(self) -> Hits:
        """No hits."""
        return Hits(0, [[]])

    def find_hits(self, keys: list[int], most: int, find: Find) -> Hits:
        """Returns the hits among consecutive blocks with these keys, at most `most` tokens."""
        found: list[int] = []
        for key in keys[: most // self.block_size]:
            block = find(key, 0)
            if block is None:
                break
            found.append(block)
        if self._eagle_drop and found:
            found.pop()
        return Hits(len(found) * self.block_size, [found])

    def junction(self, sequence: Sequence) -> int:
        """Returns the length of a prefix that only some groups knew at the last lookup; 0: none."""
        return 0

    def cut(self, sequence: Sequence, start: int, tokens: int) -> int:
        """Returns the part of a chunk of `tokens` tokens from `start` on that may be computed at
        once."""
        return tokens

    def reserve(self, sequence: Sequence, extra: int) -> int:
        """Returns the blocks that a sequence lacks for all its known tokens and `extra` more."""
        return self.need(sequence, min(sequence.length, self.max_model_len) + extra, [])

    def tables(self, sequence: Sequence) -> list[list[int]]:
        """Returns the table of each group."""
        return [sequence.table]

    # -- moves -----------------------------------------------------------------------------------

    def allocate_slots(
        self,
        sequence: Sequence,
        tokens: int,
        *,
        hits: Hits | None = None,
        external: int = 0,
        whole: bool = False,
        lookahead: int = 0,
        delay: bool = False,
        watermark: int = 0,
        reserved: int = 0,
        flying: int = 0,
    ) -> bool:
        """Gives a sequence slots for `tokens` tokens behind those computed, hit and loaded.
        Returns False, and takes nothing, where too few blocks are free.

        `external`: tokens that a connector loads; `whole`: also tests whether all known tokens
        fit; `lookahead`: slots for drafts; `delay`: others cannot hit the blocks yet;
        `watermark`: blocks that stay free; `reserved`: blocks that others will need; `flying`:
        tokens of batches in flight, whose windows are still read. vLLM 0.33.0
        `v1/core/kv_cache_manager.py`, `allocate_slots`.
        """
        longest, free = self.max_model_len, self.gpu.free - watermark
        local = sequence.computed + (hits.tokens if hits else 0)
        found = hits.blocks[0] if hits else []
        total = min(local + external, longest)
        upto = min(total + tokens + lookahead, longest)
        if whole and self.need(sequence, min(sequence.length, longest), found) > free:
            return False
        if self.need(sequence, upto, found) > free - reserved:
            return False
        if not sequence.table:
            self.hold(sequence, upto, found)
            sequence.seen = -(-(local + external) // self.block_size)
        else:
            self.extend(sequence, upto)
        if not delay:
            self.publish(sequence, min(total + tokens, sequence.length))
        return True

    def publish(self, sequence: Sequence, upto: int) -> None:
        if self.caches:
            known = (sequence.length - self._ahead) // self.block_size * self.block_size
            if self._ahead:
                self.keys(sequence)
            super().publish(sequence, min(upto, known))

    def trim(self, sequence: Sequence, computed: int) -> None:
        """Frees the blocks that nothing reads any more once `computed` tokens are computed."""

    def detach(self, sequence: Sequence) -> list[list[int]]:
        """Takes the tables away from a sequence. Their blocks stay in use until `drop_tables`."""
        table, sequence.table = sequence.table, []
        self.empty_slots -= len(table) * self.block_size - sequence.filled
        sequence.filled = sequence.published = 0
        self._detached.append(table)
        return [table]

    def drop_tables(self, tables: list[list[int]]) -> None:
        """Releases tables that were detached, each from its last block to its first."""
        for table in tables:
            self._detached.remove(table)
            self.gpu.drop_keyed_table(table, self.block_size, -1)

    def drop_at_once(self, tables: list[list[int]]) -> None:
        """Releases tables that were detached in one call, from the last block to the first."""
        self.drop_tables(tables)

    def pin(self, blocks: list[int]) -> None:
        """Keeps blocks from being reused while they are copied."""
        references = self.gpu.references
        for block in blocks:
            references[block] = references.get(block, 0) + 1
        each(self.gpu.content.hit, blocks)
        self._pinned += blocks

    def unpin(self, blocks: list[int]) -> None:
        """Ends `pin`, in the order of `blocks`."""
        each(self._pinned.remove, blocks)
        self.gpu.release(blocks)

    def audit_references(self, counted: dict[int, int], held: dict[int, int]) -> None:
        for block in chain(self._pinned, *self._detached):
            counted[block] = counted.get(block, 0) + 1
        super().audit_references(counted, held)
