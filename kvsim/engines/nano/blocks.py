"""Block managers of nano-vllm (`nanovllm/engine/block_manager.py`), to be read beside their source.

A freed block goes to the end of one first-in, first-out queue and keeps its content until it is
reused. So the queue is also the eviction order. Of several blocks with equal content, the one
registered last is hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from librt.vecs import append, vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core import guard
from kvsim.core.blocks import BlockManager
from kvsim.core.contents import Numbering
from kvsim.core.plan import Plan
from kvsim.core.pool import Pool
from kvsim.core.request import Request, Table
from kvsim.core.vectors import EMPTY
from kvsim.policies.eviction import make_eviction
from kvsim.policies.tables import (
    FullHit,
    HitsSave,
    PublishAt,
    make_full_hit,
    make_hits_save,
    make_publish_at,
)


class NanoPool:
    """Blocks 0 .. `size` - 1, of which, for each content, the one registered last is hit."""

    size: i64
    num_free: i64
    num_cached: i64
    """Free blocks whose content can be hit."""
    refs: vec[i64]
    """Block → number of tables that hold it."""
    content: vec[i64]
    """Block → number of what it was registered for; 0: nothing since it was taken."""
    known: dict[int, int]
    """Content → the block registered last for it (`hash_to_block_id`)."""
    fresh: i64
    """The first block that was never used."""
    forgets: bool
    """Whether a content is unknown once its block was taken. If not, its entry stays for ever, also
    while the block holds something else."""
    order: Any
    """Which free block with content is reused first, once no other is left
    (`kvsim.policies.order.Order`); None: all free blocks wait in one queue."""
    keys: dict[int, int]
    """Content → its key in the stream, for the order."""
    _next: vec[i64]
    _prev: vec[i64]
    _oldest: i64
    """The ends of the queue; -1: it is empty."""
    _newest: i64

    def __init__(self, size: int, order: Any = None, forgets: bool = True) -> None:
        """`order` makes an order of free blocks with content from the first id and `size`."""
        self.size = self.num_free = size
        self.num_cached = self.fresh = 0
        self.refs, self.content = EMPTY, EMPTY
        self._next, self._prev = EMPTY, EMPTY
        self._oldest = self._newest = -1
        self.known = {}
        self.forgets = forgets
        self.order = None if order is None else order(0, size)
        self.keys = {}

    # -- for those who look on -------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The first block id."""
        return 0

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self.num_free

    @property
    def used(self) -> int:
        """Blocks that at least one table holds."""
        return self.size - self.num_free

    @property
    def cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return self.num_cached

    @property
    def references(self) -> dict[int, int]:
        """Block → number of tables that hold it, of the blocks in use."""
        return {block: self.refs[block] for block in range(self.fresh) if self.refs[block]}

    def cached_blocks(self) -> list[int]:
        """Ids of the free blocks whose content can still be hit."""
        refs = self.refs
        return [block for block in range(self.fresh) if not refs[block] and self.is_hit(block)]

    # -- questions -------------------------------------------------------------------------------

    def find(self, content: i64) -> i64:
        """The block registered last for a content; -1: there is none."""
        return self.known.get(content, -1)

    def is_hit(self, block: i64) -> bool:
        """Whether it is the block that is found by its content."""
        content: i64 = self.content[block]
        return content != 0 and self.find(content) == block

    # -- moves -----------------------------------------------------------------------------------

    def take(self) -> i64:
        """Takes the next free block, whose content is lost (`_allocate_block`)."""
        block: i64
        if self.fresh < self.size:
            block = self.fresh
            self._open()
        elif self._oldest >= 0:
            block = self._oldest
            self._unlink(block)
        else:
            block = self.order.pop()
        content: i64 = self.content[block]
        if content:
            if self.find(content) == block:
                self.num_cached -= 1
                if self.forgets:
                    del self.known[content]
            self.content[block] = 0
        self.refs[block] = 1
        self.num_free -= 1
        return block

    def hit(self, blocks: vec[i64]) -> None:
        """Adds a reference to each of these blocks with content, free or in use."""
        k: i64
        for k in range(len(blocks)):
            block: i64 = blocks[k]
            if self.refs[block] == 0:
                self.num_free -= 1
                self.num_cached -= self.is_hit(block)
                if self.order is None:
                    self._unlink(block)
            self.refs[block] += 1
        if self.order is not None:
            self.order.hit_table(list(blocks))

    def register(self, block: i64, content: i64) -> None:
        """From now on, a block in use is the one to be hit for a content."""
        before: i64 = self.find(content)
        if before >= 0 and self.refs[before] == 0 and self.content[before] == content:
            self.num_cached -= 1
        self.known[content] = block
        self.content[block] = content
        if self.order is not None:
            self.order.store(block, self.keys[content])

    def release(self, blocks: vec[i64], block_size: i64, access_ns: i64) -> None:
        """Drops one reference of each block of a table, the last one first (`deallocate`).

        With an order of its own, content that is not hit any more is lost at once.
        """
        k: i64
        for k in range(len(blocks) - 1, -1, -1):
            block: i64 = blocks[k]
            self.refs[block] -= 1
            if self.refs[block] > 0:
                continue
            self.num_free += 1
            hit: bool = self.is_hit(block)
            self.num_cached += hit
            if self.order is None:
                self._append(block)
            elif hit:
                key = self.keys[self.content[block]]
                self.order.put(block, key, (k + 1) * block_size, access_ns)
            else:
                self.content[block] = 0
                self._append(block)

    # --------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Makes room in the books for the first block that was never used."""
        self.fresh += 1
        self.refs, self.content = append(self.refs, 0), append(self.content, 0)
        self._next, self._prev = append(self._next, -1), append(self._prev, -1)

    def _append(self, block: i64) -> None:
        """Puts a block at the end of the queue."""
        last: i64 = self._newest
        if last >= 0:
            self._next[last] = block
        else:
            self._oldest = block
        self._prev[block], self._next[block] = last, -1
        self._newest = block

    def _unlink(self, block: i64) -> None:
        """Takes a block out of the queue."""
        before: i64 = self._prev[block]
        behind: i64 = self._next[block]
        if before >= 0:
            self._next[before] = behind
        else:
            self._oldest = behind
        if behind >= 0:
            self._prev[behind] = before
        else:
            self._newest = before

    def audit(self) -> None:
        """Asserts that every block is in exactly one place, and every content can be found."""
        idle: set[int] = set()
        block: i64 = self._oldest
        while block >= 0:
            assert block not in idle, "a block is free twice"
            idle.add(block)
            block = self._next[block]
        if self.order is not None:
            kept = set(self.order)
            assert idle.isdisjoint(kept), "a block is free twice"
            idle |= kept
        unused: i64 = self.size - self.fresh
        assert len(idle) + unused == self.num_free, "free blocks were miscounted"
        held: i64 = 0
        cached: i64 = 0
        found: i64 = 0
        for block in range(self.fresh):
            assert self.refs[block] >= 0, "a block in use has no holder"
            assert (self.refs[block] == 0) == (block in idle), "a block is free and in use"
            held += self.refs[block] > 0
            if self.is_hit(block):
                found += 1
                cached += self.refs[block] == 0
        assert held + self.num_free == self.size, "blocks were lost or invented"
        assert cached == self.num_cached, "free blocks with content were miscounted"
        assert found == len(self.known) or not self.forgets, "content without a block"


@mypyc_attr(allow_interpreted_subclasses=True)
class NanoTables(BlockManager):
    """Block tables of nano-vllm, commit bb823b3 (`nanovllm/engine/block_manager.py`).

    Blocks can be hit once they are computed, and the last block of a sequence never hits, unless
    other rules of `kvsim.policies.tables` are set.
    """

    gpu: NanoPool
    numbering: Numbering
    publish_at: PublishAt
    hits_save: HitsSave
    full_hit: FullHit
    hits: vec[i64]
    """The blocks that the last look-up found."""
    _lookups: i64
    _hits: i64

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        *,
        eviction: Any = None,
        publish_at: str | PublishAt = "computed",
        hits_save: str | HitsSave = "admission",
        full_hit: str | FullHit = "last-block",
    ) -> None:
        """`eviction` makes the order in which free blocks lose their content once no blank block is
        left (`kvsim.policies.eviction`). None stands for the engine's queue, which also holds the
        blank blocks. Raises `ConfigError` for an unknown rule."""
        order = None
        if eviction is not None:
            order = make_eviction(eviction, block_size=block_size, num_gpu_blocks=num_gpu_blocks)
        self.block_size = block_size
        self.gpu, self.cpu = NanoPool(num_gpu_blocks, order), Pool(0)
        self.numbering = Numbering(block_size)
        self.tier = None
        self.needs_keys = True
        self.publish_at = make_publish_at(publish_at)
        self.hits_save = make_hits_save(hits_save)
        self.full_hit = make_full_hit(full_hit)
        self.hits = EMPTY
        self.empty_slots = self._lookups = self._hits = 0

    # -- for those who look on -------------------------------------------------------------------

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    def observe(self, plan: Plan) -> None:
        gpu: NanoPool = self.gpu
        plan.used_blocks, plan.cached_blocks = gpu.size - gpu.num_free, gpu.num_cached
        plan.free_blocks, plan.empty_slots = gpu.num_free - gpu.num_cached, self.empty_slots

    def tables(self, request: Request) -> list[list[int]]:
        return [request.table]

    def own_blocks(self, request: Request) -> int:
        refs = self.gpu.refs
        return sum([refs[block] == 1 for block in request.table])

    def cached_tokens(self, request: Request) -> int:
        self.find(request)
        return self.hit_tokens(request, len(self.hits))

    # -- questions -------------------------------------------------------------------------------

    def find(self, request: Request) -> None:
        """Looks up its leading blocks that an admission finds computed, and notes them in `hits`
        until the next look-up."""
        gpu: NanoPool = self.gpu
        units: i64 = (request.length - self.full_hit.withheld) // self.block_size
        self.numbering.extend(request, units)
        contents: vec[i64] = request.contents
        hits: vec[i64] = EMPTY
        k: i64
        for k in range(units):
            block: i64 = gpu.find(contents[k])
            if block < 0:
                break
            hits = append(hits, block)
        self.hits = hits

    def hit_tokens(self, request: Request, blocks: i64) -> i64:
        """The tokens whose computation so many leading blocks save; 0 for none."""
        if blocks == 0:
            return 0
        return min(blocks * self.block_size, request.length - self.full_hit.least)

    def charged_hits(self, request: Request) -> i64:
        """The tokens of a request whose prompt begins that hits save from the token budget."""
        return self.hit_tokens(request, len(self.hits)) if self.hits_save.charged else 0

    def need(self, request: Request) -> i64:
        """The free blocks that a request without a table needs, given what was just found. Hits on
        free blocks take these, so only those in use may save any."""
        blocks: i64 = (request.length + self.block_size - 1) // self.block_size
        if self.hits_save.blocks:
            hits: vec[i64] = self.hits
            k: i64
            for k in range(len(hits)):
                blocks -= self.gpu.refs[hits[k]] > 0
        return blocks

    # -- moves -----------------------------------------------------------------------------------

    def allocate(self, request: Request) -> None:
        """Gives a request without a table what was just found, and slots for all its known tokens
        (`allocate`)."""
        gpu: NanoPool = self.gpu
        size: i64 = self.block_size
        table: Table = Table()
        self.share(request)
        request.seen = len(self.hits) * size
        request.published = len(self.hits)
        table.blocks = self.hits
        self.hits = EMPTY
        self._lookups += request.length // size
        self._hits += request.published
        request.room = request.published * size
        while request.room < request.length:
            table.blocks = append(table.blocks, gpu.take())
            request.room += size
        request.tables = [table]
        request.filled = request.length
        self.empty_slots += request.room - request.filled
        if not self.publish_at.computed:
            self.publish(request, request.length)

    def share(self, request: Request) -> None:
        """A table begins with the blocks that were just found."""
        self.gpu.hit(self.hits)

    def append(self, request: Request) -> None:
        """Gives a running request a slot for its newest token (`may_append`)."""
        if request.length > request.room:
            table: Table = request.tables[0]
            table.blocks = append(table.blocks, self.gpu.take())
            request.room += self.block_size
            self.empty_slots += self.block_size
        self.empty_slots -= 1
        request.filled += 1
        if request.filled == request.room and not self.publish_at.computed:
            self.publish(request, request.filled)

    def publish(self, request: Request, upto: i64) -> None:
        """Lets others hit the full blocks of the first `upto` tokens (`hash_blocks`)."""
        if upto < (request.published + 1) * self.block_size:
            return
        units: i64 = upto // self.block_size
        self.numbering.extend(request, units)
        blocks: vec[i64] = request.tables[0].blocks
        if self.gpu.order is not None:
            keys = request._stream.keys(request.published, units, self.block_size)
            for place, key in enumerate(keys, request.published):
                self.gpu.keys[request.contents[place]] = key
        k: i64
        for k in range(request.published, units):
            self.gpu.register(blocks[k], self.content_at(request, k))
        request.published = units

    def content_at(self, request: Request, place: i64) -> i64:
        """The number for which a full block of a table is registered."""
        return request.contents[place]

    def free(self, request: Request) -> None:
        """Gives back all blocks of a request (`deallocate`)."""
        self.empty_slots -= request.room - request.filled
        self.gpu.release(request.tables[0].blocks, self.block_size, request.access_ns)
        request.tables = []
        request.room = request.filled = request.seen = request.published = 0

    # -- audit -----------------------------------------------------------------------------------

    def audit(self, requests: Iterable[Request]) -> None:
        self.gpu.audit()
        counted: Counter[int] = Counter()
        empty: i64 = 0
        for request in requests:
            counted.update(request.table)
            empty += request.room - request.filled
            assert 0 <= request.filled <= request.room == len(request.table) * self.block_size
        assert counted == self.gpu.references, "references and tables disagree"
        assert empty == self.empty_slots, "empty slots were miscounted"


class Chain(Numbering):
    """Numbers that follow from the number of the block before and a block's own tokens.

    These are below 0. Where tokens are known only by their prefix, numbers are as usual, and each
    stands for tokens that no other prefix ends with.
    """

    _numbers: dict[tuple[int, Any], int]
    """(number of the block before, its tokens) → number."""
    _tokens: list[Any]
    """Minus number → what identifies the tokens of its block."""

    def __init__(self, unit: int) -> None:
        super().__init__(unit)
        self._numbers, self._tokens = {}, [None]

    def extend(self, request: Request, units: i64) -> None:
        contents: vec[i64] = request.contents
        done: i64 = len(contents)
        if done >= units:
            return
        stream = request._stream
        assert stream is not None, "block identities are needed"
        if not stream.knows_tokens:
            super().extend(request, units)
            return
        before: i64 = contents[done - 1] if done else 0
        for tokens in stream.contents(done, units, self.unit):
            before = self._follow(before, tokens)
            contents = append(contents, before)
        request.contents = contents

    def behind(self, before: i64, number: i64) -> i64:
        """The number of the same tokens behind another block; 0: behind none."""
        return number if number > 0 else self._follow(before, self._tokens[-number])

    def agree(self, one: i64, other: i64) -> bool:
        """Whether two numbers stand for the same tokens, whatever is before them."""
        if one >= 0 or other >= 0:
            return one == other
        same: bool = self._tokens[-one] == self._tokens[-other]
        return same

    def _follow(self, before: i64, tokens: Any) -> i64:
        number = self._numbers.setdefault((before, tokens), -len(self._tokens))
        if number == -len(self._tokens):
            self._tokens.append(tokens)
        return number


@mypyc_attr(allow_interpreted_subclasses=True)
class NanoTables2025(NanoTables):
    """Block tables of nano-vllm, commit 6ef2a4f (August 2025).

    Blocks can be hit from their allocation on, the last one included. An entry of the cache is
    never removed, not even when its block is overwritten: it is a hit where the block's own tokens
    agree, whatever is before them. A hit gives the block the number under which it was found, even
    if others hold it: a block that they fill later is chained to that number.
    """

    chain: Chain

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        *,
        publish_at: str | PublishAt = "allocation",
        hits_save: str | HitsSave = "charge",
        full_hit: str | FullHit = "nothing",
    ) -> None:
        super().__init__(
            block_size,
            num_gpu_blocks,
            publish_at=publish_at,
            hits_save=hits_save,
            full_hit=full_hit,
        )
        self.gpu = NanoPool(num_gpu_blocks, forgets=False)
        self.numbering = self.chain = Chain(block_size)

    def find(self, request: Request) -> None:
        gpu: NanoPool = self.gpu
        chain: Chain = self.chain
        units: i64 = (request.length - self.full_hit.withheld) // self.block_size
        chain.extend(request, units)
        contents: vec[i64] = request.contents
        hits: vec[i64] = EMPTY
        k: i64
        for k in range(units):
            block: i64 = gpu.find(contents[k])
            if block < 0 or not chain.agree(gpu.content[block], contents[k]):
                break
            hits = append(hits, block)
        self.hits = hits

    def share(self, request: Request) -> None:
        self.gpu.hit(self.hits)
        k: i64
        for k in range(len(self.hits)):
            self.gpu.register(self.hits[k], request.contents[k])

    def content_at(self, request: Request, place: i64) -> i64:
        before: i64 = 0
        if place > 0:
            before = self.gpu.content[request.tables[0].blocks[place - 1]]
        return self.chain.behind(before, request.contents[place])


guard.keep(NanoPool, "refs content keys")
guard.keep(NanoTables)
