"""The block manager: it owns the pool and one table for each request and KV cache group.

Source: vLLM 0.33.0, `v1/core/kv_cache_manager.py`, `v1/core/kv_cache_coordinator.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from math import gcd, lcm
from typing import Any, Final

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core import guard
from kvsim.core.blocks import BlockManager
from kvsim.core.contents import Numbering
from kvsim.core.plan import Plan
from kvsim.core.pool import Pool
from kvsim.core.request import Request, Table
from kvsim.core.vectors import longer, zeros
from kvsim.engines.vllm_v1.groups import (
    NEVER,
    STEADY,
    AlignedMamba,
    Ask,
    Full,
    Group,
    Layout,
)
from kvsim.engines.vllm_v1.releases import LATEST, Release
from kvsim.policies.eviction import LeastRecentlyUsed, make_eviction
from kvsim.policies.tables import FULL_HITS, FullHit


@mypyc_attr(acyclic=True, free_list_len=1)
class Admission:
    """What a waiting request brings, and what must stay free for others."""

    found: i64
    """Tokens that `find` has just found; -1: the request has its tables already."""
    external: i64
    """Tokens behind them that a connector loads."""
    whole: bool
    """Whether the whole known sequence must fit."""
    watermark: i64
    """Blocks that stay free, also after the test of the whole sequence."""
    loads: bool = False
    """Whether it only loads for now, so that its blocks are not registered yet."""
    reserved: i64 = 0
    """Further blocks that stay free."""

    def __init__(self, found: i64, external: i64, whole: bool, watermark: i64 = 0) -> None:
        self.found, self.external = found, external
        self.whole, self.watermark = whole, watermark


HOLDS_BLOCKS: Final = Admission(-1, 0, False)
"""That of a running request."""


@mypyc_attr(allow_interpreted_subclasses=True)
class KVCacheManager(BlockManager):
    """Block tables of the KV cache groups over one pool. Block 0 is never used."""

    gpu: Pool
    groups: list[Group]
    kinds: list[Group]
    """The first group of each kind, full attention first."""
    layout: Layout
    caching: bool
    release: Release
    numbering: Numbering
    num_lookups: i64
    num_hits: i64
    short_blocks: i64
    """Free blocks that the last request to be refused lacked."""
    _steady: bool
    """Whether every group is of a kind that changes only where `Request.room` and
    `Request.leaves` say, and nothing is overridden that the others ask less often."""
    _publishes_all: bool
    """Whether `publish` is called for every token, not only for the last one of a unit."""
    cuts: bool
    """Whether `cut` is asked: for the sake of states at block ends, or where it is overridden."""
    _aligned: list[AlignedMamba]
    """Groups of states that are kept at block ends."""
    _short_chunk: i64
    """Chunks of at most so many tokens save no state on their way."""
    _holding: i64
    """Number of groups with a slot for each token."""
    _picks: bool
    """Whether any group picks the blocks that others may hit."""
    _most_tokens: i64
    _detached: list[list[int]]
    """Tables of requests that have ended, whose blocks are given back later."""
    _pinned: Counter[int]

    def __init__(
        self,
        groups: Sequence[Group],
        num_gpu_blocks: int,
        *,
        enable_prefix_caching: bool,
        max_model_len: int,
        max_num_batched_tokens: int,
        keyed: bool | None = None,
        prefix_cache_retention_interval: int | None = 0,
        eagle_drop: bool = False,
        lookahead_keys: bool = False,
        long_prefill_token_threshold: int = 0,
        in_flight: int = 1,
        num_spec_tokens: int = 0,
        eviction: Any = "lru",
        release: Release = LATEST,
    ) -> None:
        """`keyed` says whether blocks have contents although nothing is cached here, as with a
        connector. `in_flight` is the number of steps composed before the oldest is settled.
        `eviction` makes the order in which free blocks with content are reused
        (`kvsim.policies.eviction`). Raises `ConfigError` for an unknown one."""
        self.release = release
        sizes = [int(group.block_size) for group in groups]
        self.caching = enable_prefix_caching
        self.needs_keys = enable_prefix_caching if keyed is None else keyed
        self.groups = [
            each.with_prefix_cache() if enable_prefix_caching else each for each in groups
        ]
        retention = prefix_cache_retention_interval
        # Where content is looked up, the blocks of every group are made of whole units.
        self.layout = Layout(
            gcd(*sizes) if self.needs_keys else lcm(*sizes),
            lcm(*sizes),
            max_model_len,
            max_num_batched_tokens * in_flight,
            -1 if retention is None else retention,
            num_spec_tokens,
            lookahead_keys,
            eagle_drop,
        )
        self._most_tokens = min(
            max_num_batched_tokens, long_prefill_token_threshold or max_num_batched_tokens
        )
        self._detached, self._pinned = [], Counter()
        self.num_lookups = self.num_hits = self.empty_slots = self.short_blocks = 0
        self.block_size = self.layout.align
        self.tier = None
        self.numbering = Numbering(self.layout.key_tokens, lookahead_keys)
        order = make_eviction(eviction, block_size=self.block_size, num_gpu_blocks=num_gpu_blocks)
        own = None if order is LeastRecentlyUsed else order
        self.gpu = Pool(num_gpu_blocks - 1, own, len(groups))
        self._begin_kinds()
        self._begin_questions()
        self.gpu.names = bool(self._aligned)
        self.gpu.blank_last = not release.evicts_blank_blocks_first or (
            release.queues_blank_blocks_uncached and not enable_prefix_caching
        )
        self.cpu = Pool(0)

    def _begin_kinds(self) -> None:
        """Sorts the groups into kinds, and says whose hits lose the last block."""
        layout, eagle = self.layout, any(group.eagle for group in self.groups)
        kinds: dict[Any, list[Group]] = {}
        for number, group in enumerate(self.groups):
            group.join(number, layout, self.gpu)
            group.alike = kinds.setdefault(group.rules(), [])
            group.alike.append(group)
        for group in self.groups:
            group.drop = layout.drops_last and any(each.eagle or not eagle for each in group.alike)
        firsts = [alike[0] for alike in kinds.values()]
        self.kinds = sorted(firsts, key=lambda group: not group.full)

    def _begin_questions(self) -> None:
        """Notes what need not be asked of these groups, where no method is overridden that is."""
        kind, own, groups = type(self), KVCacheManager, self.groups
        overridden = kind.trim is not own.trim or kind.publish is not own.publish
        self._steady = all(type(group) in STEADY for group in groups) and not overridden
        self._aligned = [each for each in groups if isinstance(each, AlignedMamba)]
        self._publishes_all = bool(self._aligned) or overridden
        self.cuts = bool(self._aligned) or kind.cut is not own.cut
        sizes = [each.block_size for each in self._aligned]
        self._short_chunk = min([self.layout.max_model_len, *sizes])
        self._holding = sum([group.holds_tokens for group in groups])
        self._picks = any(group.picks for group in groups)

    # -- for those who look on -------------------------------------------------------------------

    @property
    def lookups(self) -> tuple[int, int]:
        return self.num_lookups, self.num_hits

    @property
    def keeps_states(self) -> bool:
        """Whether it keeps states at block ends, for whose sake chunks of prompts are cut."""
        return bool(self._aligned)

    @property
    def hears(self) -> Any:
        return None if self.gpu.order is None else self.gpu.order.hears

    @property
    def full_hit(self) -> FullHit:
        """Its rule for full prefix hits."""
        return FULL_HITS["last-block"]

    def observe(self, plan: Plan) -> None:
        gpu: Pool = self.gpu
        plan.used_blocks, plan.cached_blocks = gpu.size - gpu.num_free, gpu.num_cached
        plan.free_blocks, plan.empty_slots = gpu.num_free - gpu.num_cached, self.empty_slots

    def tables(self, request: Request) -> list[list[int]]:
        if not request.tables:
            return [[] for _ in self.groups]
        return [list(table.blocks) for table in request.tables]

    def own_blocks(self, request: Request) -> int:
        return self.gpu.own(request)

    def cached_tokens(self, request: Request) -> int:
        junction: i64 = request.junction
        found: i64 = self.find(request)
        request.junction = junction
        return found

    def report(self, events: Any) -> bool:
        if not self.caching or len(self.groups) > 1 or type(self.groups[0]) is not Full:
            return False
        self.gpu.events = events
        self.gpu.watched = True
        return True

    # -- contents --------------------------------------------------------------------------------

    def number(self, request: Request) -> vec[i64]:
        """The numbers of all its known units of tokens."""
        known: i64 = self._known(request)
        self.numbering.extend(request, known // self.layout.key_tokens)
        return request.contents

    def keys(self, request: Request) -> list[int]:
        """The numbers of all its known units of tokens, for connectors."""
        known: i64 = self._known(request)
        return list(self.number(request)[: known // self.layout.key_tokens])

    def content_key(self, key: i64, group: i64) -> i64:
        """The content of a block of a group that ends with a unit."""
        return key * len(self.groups) + group

    def has_key(self, block: int) -> bool:
        """Whether a block has content."""
        return self.gpu.content(block) != 0

    def find_block(self, key: int, group: int) -> int:
        """The first block of a group with the content that ends with a unit; 0: there is none."""
        return self.gpu.find(self.content_key(key, group))

    # -- questions -------------------------------------------------------------------------------

    def find(self, request: Request) -> i64:
        """Looks up its longest hit, and returns the tokens (`get_computed_blocks`). The blocks are
        noted in the groups, until the next look-up."""
        request.junction = 0
        if not self.caching:
            self.forget_hits()
            return 0
        contents: vec[i64] = self.number(request)
        known: i64 = self._known(request)
        units: i64 = known // self.layout.key_tokens
        # The token in flight at a preemption has no key yet, though it may fill a block.
        if self.release.extends_keys_late:
            if request.keyed == 0:
                request.keyed = units
            units = min(units, request.keyed)
            most: i64 = min(request.length - 1, units * self.layout.key_tokens)
            return self.find_common(contents, units, most, self.gpu)
        # The last token is always computed, as the next one is sampled from it.
        tokens: i64 = self.find_common(contents, units, request.length - 1, self.gpu)
        request.junction = self._junction
        return tokens

    _junction: i64

    def forget_hits(self) -> None:
        """Nothing was looked up for the request that is admitted next."""
        kind: Group
        for kind in self.kinds:
            kind.hold(0, 0)

    def find_common(self, contents: vec[i64], units: i64, longest: i64, pool: Pool) -> i64:
        """Looks up the longest hit of at most `longest` tokens on which all groups agree, in a
        pool. Each kind shortens what the others found (`find_longest_cache_hit`)."""
        known: i64 = units * self.layout.key_tokens
        self._junction = 0
        kind: Group
        group: Group
        for group in self.groups:
            # A kind that drops its last block looks beyond `longest`, at most at all units.
            lacking: i64 = max(longest, known) // group.block_size - len(group.hits)
            if lacking > 0:
                group.hits = longer(group.hits, lacking)
        if len(self.groups) == 1:
            # One group agrees with itself; this is what nearly every model comes to.
            kind = self.kinds[0]
            kind.find(contents, longest, kind.drop, pool)
            return kind.num_hits * kind.block_size
        tokens: i64 = self._agree(contents, known, longest, pool)
        for kind in self.kinds:
            # A prefix of a hit of full attention is a hit, so it is cut to what the others found.
            if kind.full:
                size: i64 = kind.block_size
                kind.hold(0, min(kind.num_hits, (tokens + size - 1) // size))
        return tokens

    def _agree(self, contents: vec[i64], known: i64, tokens: i64, pool: Pool) -> i64:
        """The longest hit of at most `tokens` tokens, of `known` ones, on which several kinds
        agree."""
        kind: Group
        best: i64 = 0
        common: i64
        dropped: list[Group] = []
        for kind in self.kinds:
            kind.num_hits = -1
        # Full attention and one other kind: what the other one finds is final.
        simple: bool = len(self.kinds) == 2 and self.kinds[0].full
        searches: bool = True
        while searches:
            common = tokens
            for kind in self.kinds:
                if kind.full and kind.num_hits >= 0:  # Found before: leading blocks stay.
                    common = min(common, kind.num_hits * kind.block_size)
                    continue
                drops: bool = kind.drop and kind not in dropped
                hit: i64 = self._hit(kind, contents, known, common, drops, pool)
                # A kind drops its last block once; if another kind then finds less, its last block
                # is another one, and it drops again.
                if drops:
                    dropped.append(kind)
                elif hit < common:
                    dropped.clear()
                common = hit
                best = max(best, common)
            searches = common < tokens and not simple
            tokens = min(common, tokens)
        self._junction = best if best > tokens else 0
        return tokens

    def _hit(
        self, kind: Group, contents: vec[i64], known: i64, tokens: i64, drops: bool, pool: Pool
    ) -> i64:
        """The longest hit of at most `tokens` tokens of one kind. To lose its last block, it may
        look at one more of the `known` tokens."""
        if drops and kind.holds_tokens:
            tokens = min(tokens + kind.block_size, known)
        kind.find(contents, tokens, drops, pool)
        return kind.num_hits * kind.block_size

    def find_behind(
        self, request: Request, computed: i64, pool: Pool
    ) -> tuple[int, list[list[int]]]:
        """The longest hit of a request in another pool, behind its first `computed` tokens, from
        which positions count: its tokens, and of each group the blocks in token order, 0 where none
        is needed."""
        first: i64 = computed // self.layout.key_tokens
        units: i64 = self._known(request) // self.layout.key_tokens - first
        longest: i64 = request.length - 1 - computed
        if units <= 0 or longest <= 0:
            return 0, []
        contents: vec[i64] = self.number(request)[first : first + units]
        # What was found for the request that is admitted next stays as it is.
        kept = [(group.hits, group.first_hit, group.num_hits) for group in self.groups]
        for group in self.groups:
            # A vector of its own, as the look-up writes to it.
            group.hits = zeros(len(group.hits))
        tokens = self.find_common(contents, units, longest, pool)
        blocks = []
        for group, before in zip(self.groups, kept, strict=True):
            first, hits = group.first_hit, group.num_hits
            found = [0] * min(first, hits)
            found += [group.hits[place] for place in range(len(found), hits)]
            blocks.append(found)
            group.hits, group.first_hit, group.num_hits = before
        return tokens, blocks

    def cut(self, request: Request, start: i64, tokens: i64) -> i64:
        """How many of the next `tokens` tokens from `start` a step computes, so that states at
        block ends can be kept (`_mamba_block_aligned_split`). Asked only where `cuts`, also with 0.

        A chunk of a prompt ends at a block end, at the last state from which an equal sequence can
        resume, or at the junction, whichever comes first. 0 means that the chunk would reach no
        block end.
        """
        if not self._aligned:
            return tokens
        layout: Layout = self.layout
        size: i64 = self._aligned[0].block_size
        end: i64 = start + tokens
        prefill_end: i64 = self._prefill_end(request)
        if start >= prefill_end:
            return tokens
        saved: i64 = layout.resumes_at(prefill_end, layout.align)
        saves: bool = end >= prefill_end
        group: AlignedMamba
        for group in self._aligned:
            saves = saves and group.saves(start, end, saved)
        if end < prefill_end:
            aligned: i64 = end // size * size
            # A chunk without a block end waits for a step with more room, unless no step ever has
            # enough.
            if aligned > start or size <= self._most_tokens:
                end = aligned
        nearest: i64 = end
        stop: i64
        for stop in self._stops(request, start, end, saves):
            if start < stop < nearest:
                nearest = stop
        return max(nearest - start, 0)

    def _stops(self, request: Request, start: i64, end: i64, saves: bool) -> list[i64]:
        """Where a chunk from `start` to `end` may have to end earlier: for the sake of a state, if
        it `saves` none, and at the junction."""
        size: i64 = self._aligned[0].block_size
        stops: list[i64] = []
        if not saves:
            stops = [
                self.layout.resumes_at(request.length, size),
                (start + size - 1) // size * size,
            ]
        if start < request.junction < end:
            stops.append(start + (request.junction - start) // size * size)
        return stops

    def _ends(self, request: Request) -> list[int]:
        """Tokens at which sequences with the same prompt resume."""
        tokens, align = int(request.input_length), int(self.layout.align)
        if self.layout.drops_last:
            return [max(end // align - 1, 0) * align for end in (tokens - 1, tokens)]
        return [tokens - 1]

    def reserved(self, requests: Iterable[Request], extra: i64) -> i64:
        """The free blocks that requests still need for all their known tokens, with `extra` more
        for each and as many besides."""
        blocks: i64 = 0
        for group in self.groups:
            blocks += (extra + group.block_size - 1) // group.block_size
        for request in requests:
            most: i64 = min(request.length, self.layout.max_model_len)
            ask = Ask(most + extra, most, request.computed, self._prefill_end(request), True)
            blocks += self._missing(request, ask, False)
        return blocks

    # -- moves -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a scheduling call."""
        if self.gpu.names:
            self.gpu.named.clear()

    def allocate(
        self, request: Request, tokens: i64, lookahead: i64, admission: Admission | None
    ) -> bool:
        """Gives a request slots for `tokens` more tokens, and `lookahead` more for drafts
        (`allocate_slots`). Returns False if blocks run short. A waiting request comes with its
        `admission`; none: it has its tables."""
        upto: i64 = request.computed + tokens
        slots: i64 = upto + lookahead
        if admission is None and slots <= request.room and tokens <= self._short_chunk:
            # Slots of blocks that it has are enough. Every token comes by here, and most end no
            # block, so what has nothing to do is not called.
            computed: i64 = max(0, request.computed - request.in_flight)
            if computed >= request.leaves:
                self.trim(request, computed)
            self.empty_slots -= (slots - request.filled) * self._holding
            request.filled = slots
            if self.cuts:
                for group in self._aligned:
                    request.tables[group.number].export_tokens = 0
            if upto >= request.next_unit:
                self.publish(request, min(upto, request.length))
            return True
        return self._allocate(request, tokens, lookahead, admission or HOLDS_BLOCKS)

    def _allocate(
        self, request: Request, tokens: i64, lookahead: i64, admission: Admission
    ) -> bool:
        """`allocate` where blocks may be needed."""
        found: i64 = admission.found
        external: i64 = admission.external
        watermark: i64 = admission.watermark
        layout: Layout = self.layout
        held: bool = len(request.tables) > 0
        hit: bool = found >= 0
        start: i64 = request.computed + max(found, 0) + external
        total: i64 = min(start, layout.max_model_len)
        ask: Ask
        # Two tests: whether the whole sequence would fit, if asked, and whether this chunk does.
        free: i64 = self.gpu.num_free - watermark
        prefill_end: i64 = self._prefill_end(request)
        if admission.whole:
            length: i64 = min(request.length, layout.max_model_len)
            ask = Ask(length, length, total, prefill_end, True)
            self.short_blocks = self._missing(request, ask, hit) - free
            if self.short_blocks > 0:
                return False
        upto: i64 = total + tokens
        slots: i64 = min(upto + lookahead, layout.max_model_len)
        ask = Ask(slots, upto, start, prefill_end)
        if held:
            # Before the second test, as what leaves a window is free then, even if the request is
            # refused. Tokens in flight do not count as computed.
            self.trim(request, max(0, total - request.in_flight))
        self.short_blocks = self._missing(request, ask, hit) + watermark + admission.reserved
        self.short_blocks -= self.gpu.num_free
        if self.short_blocks > 0:
            return False
        if held:
            self.empty_slots -= self._empty(request)
        else:
            request.tables = [Table() for _ in self.groups]
            # Counted where a table begins: a request that is refused again and again looks up each
            # time, and counts once.
            if hit and self.caching:
                self.num_lookups += (request.length - 1) // self.block_size
                self.num_hits += found // self.block_size
        self._take(request, ask, hit, external)
        request.filled = slots
        self.empty_slots += self._empty(request)
        if found > 0 or external:
            request.seen = max(found, 0) + external
        if not admission.loads:
            self.publish(request, min(upto, request.length))
        return True

    def publish(self, request: Request, upto: i64) -> None:
        """Lets others hit the full blocks of the first `upto` tokens (`cache_blocks`)."""
        if upto < request.next_unit:
            return
        if not self.caching:
            request.next_unit = 0 if self._publishes_all else NEVER
            return
        layout: Layout = self.layout
        unit: i64 = layout.key_tokens
        known: i64 = self._known(request)
        units: i64 = min(upto, known) // unit
        if units > request.published:
            request.published = units
            request.next_unit = 0 if self._publishes_all else (units + 1) * unit
            request.keyed = max(request.keyed, units)
        elif not self._saves(request):
            return
        known = known // unit * unit
        self.number(request)
        ends: list[int] = self._ends(request) if self._picks else []
        group: Group
        k: i64
        for k in range(len(self.groups)):
            group = self.groups[k]
            most: i64 = min(self.registered_tokens(k, upto), known)
            if self.gpu.watched:
                self._note_keys(request, request.tables[k], group, most)
            group.register(request.tables[k], request, most, ends)

    def _saves(self, request: Request) -> bool:
        """Whether a chunk of a request may have saved a state that its units do not tell of."""
        if self.layout.lookahead_keys:
            return len(self._aligned) > 0
        return any(request.tables[group.number].export_tokens for group in self._aligned)

    def registered_tokens(self, number: i64, upto: i64) -> i64:
        """How many of the first `upto` tokens of a request a group lets others hit."""
        if len(self.groups) == 1:
            return upto
        most: i64 = upto // self.layout.align * self.layout.align
        if self.groups[number].drop and most:
            most = min(upto, most + self.groups[number].block_size)
        return most

    def _note_keys(self, request: Request, table: Table, group: Group, upto: i64) -> None:
        """Tells the order and the events the keys of the blocks about to be registered."""
        first, last = int(table.registered), int(upto // group.block_size)
        if last <= first:
            return
        size, groups = int(group.block_size), len(self.groups)
        keys = request._stream.keys(max(first - 1, 0), last, size)
        parent = keys.pop(0) if first else None
        units = group.block_size // self.layout.key_tokens
        place: i64
        for place in range(first, last):
            content = int(request.contents[(place + 1) * units - 1])
            self.gpu.keys[content * groups + int(group.number)] = keys[place - first]
        if self.gpu.events is not None:
            self.gpu.events.stored(parent, keys)

    def trim(self, request: Request, computed: i64) -> None:
        """Gives back the blocks that nobody reads once `computed` tokens are computed."""
        if computed < request.leaves or not request.tables:
            return
        leaves: i64 = self.layout.max_model_len
        group: Group
        for group in self.groups:
            group.trim(request.tables[group.number], computed)
            leaves = min(leaves, group.leaves(computed))
        if not self._steady:
            leaves = 0
        request.leaves = leaves

    def free(self, request: Request) -> None:
        """Gives back all its blocks."""
        table: Table
        # The tail of a sequence is the least likely to be hit, so it is reused first.
        forwards: bool = not (self.caching or self.release.frees_last_block_first)
        for table in self._leave(request):
            if forwards:
                self.gpu.drop(list(table.blocks))
            else:
                self.gpu.release(table.blocks, 0, len(table.blocks), request.access_ns)

    def detach(self, request: Request) -> list[list[int]]:
        """Takes the tables from a request without giving their blocks back."""
        tables = [list(table.blocks) for table in self._leave(request)]
        self._detached += tables
        return tables

    def drop_tables(self, tables: list[list[int]]) -> None:
        """Gives back what `detach` took, table by table."""
        for table in tables:
            self._detached.remove(table)
            self.gpu.drop(table[::-1])

    def drop_at_once(self, tables: list[list[int]]) -> None:
        """Gives back what `detach` took as if it were one table."""
        for table in tables:
            self._detached.remove(table)
        # The order of free blocks is another one than that of `drop_tables` where there are several
        # groups.
        self.gpu.drop([block for table in reversed(tables) for block in reversed(table)])

    def pin(self, blocks: Iterable[int]) -> None:
        """Holds blocks with content that a connector reads."""
        held = list(blocks)
        self._pinned.update(held)
        self.gpu.hit(held)

    def unpin(self, blocks: Iterable[int]) -> None:
        """Gives back what `pin` held, in this order."""
        held = list(blocks)
        self._pinned.subtract(held)
        self.gpu.drop(held)

    def audit(self, requests: Iterable[Request]) -> None:
        self.gpu.audit()
        held: vec[i64] = zeros(self.gpu.fresh)
        empty: i64 = 0
        block: i64
        k: i64
        for block in self._pinned.elements():
            held[block] += 1
        for detached in self._detached:
            for block in detached:
                held[block] += 1
        request: Request
        table: Table
        for request in requests:
            for table in request.tables:
                for k in range(len(table.blocks)):
                    held[table.blocks[k]] += 1
            if request.tables:
                empty += self._empty(request)
        for k in range(1, self.gpu.fresh):
            assert held[k] == self.gpu.refs(k), "references and tables disagree"
        assert empty == self.empty_slots, "empty slots were miscounted"

    # -- its own ---------------------------------------------------------------------------------

    def _missing(self, request: Request, ask: Ask, hits: bool) -> i64:
        """The free blocks that all groups need together."""
        missing: i64 = 0
        k: i64
        tables: list[Table] = request.tables
        for k in range(len(self.groups)):
            table: Table = tables[k] if tables else NO_TABLE
            missing += self.groups[k].missing(table, ask, hits)
        return missing

    def _take(self, request: Request, ask: Ask, hits: bool, external: i64) -> None:
        """Adds the blocks that were hit, those to load into, and new ones, in this order."""
        tables: list[Table] = request.tables
        group: Group
        table: Table
        k: i64
        adopts: bool = external > 0
        if hits:
            for group in self.groups:
                adopts = adopts or group.num_hits > 0
        if adopts:
            for table in tables:
                adopts = adopts and not table.known
        if adopts:
            # Before any group takes a new block: hits are among the free blocks until they are
            # adopted, and would be taken.
            for k in range(len(self.groups)):
                self.groups[k].adopt(tables[k], ask.start)
            for k in range(len(self.groups)):
                self.groups[k].make_room(tables[k], ask.start, external)
        room: i64 = self.layout.max_model_len
        for k in range(len(self.groups)):
            group, table = self.groups[k], tables[k]
            group.grow(table, ask)
            room = min(room, group.room(table))
        if not self._steady:
            room = 0
        request.room = room
        request.leaves = 0

    def _known(self, request: Request) -> i64:
        """Its tokens of which the content of a block can tell."""
        return request.length - 1 if self.layout.lookahead_keys else request.length

    def _prefill_end(self, request: Request) -> i64:
        return max(request.input_length, request.length - 1)

    def _leave(self, request: Request) -> list[Table]:
        """Forgets a request. Returns its tables, whose blocks are not given back yet."""
        tables: list[Table] = request.tables
        if tables:
            self.empty_slots -= self._empty(request)
            hears = self.hears
            if hears is not None:
                hears.released(request, [*chain(*self.tables(request))])
        # `keyed` stays: what was numbered outlives a preemption.
        request.junction = request.filled = request.seen = request.published = 0
        request.next_unit = request.room = request.leaves = 0
        request.tables = []
        return tables

    def _empty(self, request: Request) -> i64:
        """The slots of a request that hold no token."""
        empty: i64 = 0
        group: Group
        k: i64
        for k in range(len(self.groups)):
            group = self.groups[k]
            if group.holds_tokens:
                slots: i64 = len(request.tables[k].blocks) * group.block_size - request.filled
                empty += max(slots, 0)
        return empty


NO_TABLE = Table()


def full_attention(
    block_size: int,
    num_gpu_blocks: int,
    *,
    enable_prefix_caching: bool,
    max_model_len: int,
    max_num_batched_tokens: int,
    eviction: Any = "lru",
    release: Release = LATEST,
) -> KVCacheManager:
    """The block manager of a model whose layers all keep all tokens."""
    return KVCacheManager(
        [Full(block_size=block_size)],
        num_gpu_blocks,
        enable_prefix_caching=enable_prefix_caching,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        eviction=eviction,
        release=release,
    )


guard.keep(KVCacheManager)
