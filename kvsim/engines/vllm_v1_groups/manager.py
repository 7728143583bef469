"""The block manager of models with several KV cache groups, or with one that is not full attention.

It owns the pool and one table for each group and sequence, and asks the groups for the rest.

Source: vLLM 0.33.0, `v1/core/kv_cache_manager.py`, `v1/core/kv_cache_coordinator.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from math import gcd, lcm

from kvsim.engine.order import MakeOrder
from kvsim.engine.request import Request
from kvsim.engine.request import Sequence as TokenSequence
from kvsim.engine.tables import Tables
from kvsim.engines.vllm_v1_groups.chunks import Chunks
from kvsim.engines.vllm_v1_groups.deaths import state_of_drafts
from kvsim.engines.vllm_v1_groups.full import Full
from kvsim.engines.vllm_v1_groups.group import Ask, Found, Group, GroupTable, Known, Layout, Prompt
from kvsim.engines.vllm_v1_groups.lookup import (
    Alike,
    Hits,
    longest_common,
    sets_of,
    tables_of,
)
from kvsim.engines.vllm_v1_groups.mamba import AlignedMamba
from kvsim.engines.vllm_v1_groups.pool import GroupPool
from kvsim.rules.eviction import make_eviction

Find = Callable[[int], int | None]
"""Maps a content key (`GroupTables.content_key`) to the block with this content."""


class GroupTables(Tables):
    """Block tables of several KV cache groups over one pool. Block 0 is never used."""

    needs_keys = True
    swaps = False
    gpu: GroupPool

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
        eviction: str | MakeOrder = "lru",
    ) -> None:
        """`keyed` says whether blocks have keys although nothing is cached here, as with a
        connector. `in_flight` is the number of steps composed before the oldest is settled.

        Raises `ConfigError` for an unknown `eviction`.
        """
        sizes = [group.block_size for group in groups]
        caching = enable_prefix_caching
        self.needs_keys = caching if keyed is None else keyed
        self.caching = caching
        self.groups = tuple(each.with_prefix_cache() if caching else each for each in groups)
        """The rules of each group."""
        self.layout = Layout(
            gcd(*sizes) if self.needs_keys else lcm(*sizes),
            lcm(*sizes),
            max_model_len,
            max_num_batched_tokens * in_flight,
            prefix_cache_retention_interval,
            num_spec_tokens,
            lookahead_keys,
            eagle_drop,
        )
        self._sets = sets_of(self.groups, self.layout)
        drops = {number: each.drop for each in self._sets for number in each.members}
        self._drops = [drops[number] for number in range(len(groups))]
        self._all_full = all(type(group) is Full for group in self.groups)
        most = max_num_batched_tokens
        self._most_tokens = min(most, long_prefill_token_threshold or most)
        aligned = tuple(each for each in self.groups if isinstance(each, AlignedMamba))
        self._chunks = Chunks(aligned, self.layout)
        self._held: dict[TokenSequence, tuple[GroupTable, ...]] = {}
        self._junctions: dict[TokenSequence, int] = {}
        """Sequence → its junction (`longest_common`) at the last lookup, where there is one."""
        self._detached: list[list[int]] = []
        """Tables of requests that have ended, whose blocks are given back later."""
        self._pinned: Counter[int] = Counter()
        self._lookups = self._hits = 0
        self._eviction = make_eviction(
            eviction, block_size=self.layout.align, num_gpu_blocks=num_gpu_blocks
        )
        super().__init__(self.layout.align, num_gpu_blocks - 1, 0)

    def make_pool(self, size: int, first: int) -> GroupPool:
        return GroupPool(size, first + 1, self._eviction)

    # -- keys ----------------------------------------------------------------------------------

    def keys(self, sequence: TokenSequence) -> list[int]:
        """Returns the request keys of all known tokens.

        With lookahead keys, a key also stands for the token after its block: it is the key of a
        block of one token.
        """
        size, length = self.layout.key_tokens, sequence.length
        if not self.layout.lookahead_keys:
            return sequence.block_keys(length // size, size)
        stream, keys = sequence.identities(length), sequence.keys
        assert stream is not None, "block identities are needed"
        for end in range((len(keys) + 1) * size, length, size):
            keys.append(stream.keys(end, end + 1, 1)[0])
        return keys

    def content_key(self, key: int, group: int) -> int:
        """Returns the key of a block of a group that ends at a request key."""
        return key * len(self.groups) + group

    def has_key(self, block: int) -> bool:
        """Whether a block has content."""
        return block in self.gpu.key_of

    def key_of(self, block: int) -> tuple[int, int] | None:
        """Returns the request key and the group of the content of a block; None if it has none."""
        key = self.gpu.key_of.get(block)
        return None if key is None else divmod(key, len(self.groups))

    def find(self, key: int, group: int) -> int | None:
        """Returns the first block of a group with the content that ends at a request key."""
        return self.gpu.block_of.get(self.content_key(key, group))

    # -- questions -----------------------------------------------------------------------------

    def tables(self, sequence: TokenSequence) -> list[list[int]]:
        held = self._held.get(sequence)
        return [table.blocks for table in held] if held else [[] for _ in self.groups]

    def lookup(self, sequence: TokenSequence) -> Hits:
        """Returns the blocks that an admission would find, and notes the junction: tokens of a
        longer prefix that one group has and another has not."""
        self._junctions.pop(sequence, None)
        if not self.caching:
            return self.nothing
        hits, junction = self._find_own(sequence)
        if junction:
            self._junctions[sequence] = junction
        return hits

    def cached_tokens(self, sequence: TokenSequence) -> int:
        if not self.caching:
            return 0
        return self._find_own(sequence)[0].tokens

    @property
    def nothing(self) -> Hits:
        """No hits."""
        return Hits(0, [[] for _ in self.groups])

    def find_hits(self, keys: Sequence[int], max_tokens: int, find: Find) -> Hits:
        """Returns the longest hit of at most `max_tokens` tokens in a pool, of which `find` knows
        the blocks. Positions count from the first of `keys`."""
        return self._find_common(keys, max_tokens, find)[0]

    def junction(self, sequence: TokenSequence) -> int:
        """Returns the junction of the last lookup; 0 if there was none."""
        return self._junctions.get(sequence, 0)

    def cut(self, sequence: TokenSequence, start: int, tokens: int) -> int:
        """Returns how many of the next `tokens` tokens from `start` a step computes
        (`Chunks.cut`)."""
        prompt = self.prompt(sequence)
        return self._chunks.cut(prompt, sequence.length, start, tokens, self._most_tokens)

    def prompt(self, sequence: TokenSequence) -> Prompt:
        """Returns where later sequences may leave or resume a sequence."""
        tokens, align = sequence.request.input_length, self.layout.align
        ends = [tokens - 1]
        if self.layout.drops_last:
            ends = [max(end // align - 1, 0) * align for end in (tokens - 1, tokens)]
        return Prompt(tokens, self.junction(sequence), tuple(ends))

    def reserve(self, sequence: TokenSequence, extra: int) -> int:
        """Returns the free blocks that a sequence still needs for all its known tokens and `extra`
        more."""
        most = min(sequence.length, self.layout.max_model_len)
        ask = Ask(most + extra, most, sequence.computed, self._prefill_end(sequence), True)
        return self._missing(self._tables(sequence), ask, self.nothing)

    @property
    def cuts(self) -> bool:
        """Whether chunks of prompts are cut for the sake of states at block ends."""
        return bool(self._chunks.groups)

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    # -- moves ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a scheduling call."""
        self.gpu.named.clear()

    def allocate_slots(
        self,
        sequence: TokenSequence,
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
        """Gives a sequence slots for `tokens` more tokens. Returns False if blocks run short.

        `hits` are what `lookup` found, followed by `external` tokens that a connector loads. With
        `whole`, the whole known sequence must fit. `lookahead` more slots are for drafts. With
        `delay`, the blocks are not registered yet. `watermark` and `reserved` blocks stay free; the
        first also after the test of the whole sequence. `flying` is the number of computed tokens
        of steps in flight, which still read what is behind the window.
        """
        if hits is None and self._stays(sequence, tokens, lookahead):
            return True
        layout, tables = self.layout, self._tables(sequence)
        found = hits or self.nothing
        start = sequence.computed + found.tokens + external
        total = min(start, layout.max_model_len)
        free, prefill_end = self.gpu.free - watermark, self._prefill_end(sequence)
        if whole:
            length = min(sequence.length, layout.max_model_len)
            if self._missing(tables, Ask(length, length, total, prefill_end, True), found) > free:
                return False
        upto = total + tokens
        slots = min(upto + lookahead, layout.max_model_len)
        ask = Ask(slots, upto, start, prefill_end)
        if sequence in self._held:
            self.trim(sequence, max(0, total - flying))
        if self._missing(tables, ask, found) > self.gpu.free - watermark - reserved:
            return False
        if sequence in self._held:
            self.empty_slots -= self._empty(sequence)
        else:
            self._held[sequence] = tables
            self._count(sequence, hits)
        self._take(tables, ask, found, external)
        sequence.filled = slots
        self.empty_slots += self._empty(sequence)
        if found.tokens or external:
            sequence.seen = found.tokens + external
        if not delay:
            self.publish(sequence, min(upto, sequence.length))
        return True

    def publish(self, sequence: TokenSequence, upto: int) -> None:
        if not self.caching:
            return
        layout = self.layout
        unit, known = layout.key_tokens, sequence.length - layout.lookahead_keys
        units = min(upto, known) // unit
        if units == sequence.published and not self.cuts:
            return
        sequence.published, known = units, known // unit * unit
        tables, prompt = self._held[sequence], self.prompt(sequence)
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            most = min(self.registered_tokens(number, upto), known)
            key_at = partial(self._key_at, sequence, number)
            group.register(
                table, Known(prompt, most, key_at, self._drops[number]), self.gpu, self.layout
            )

    def registered_tokens(self, number: int, upto: int) -> int:
        """Returns how many of the first `upto` tokens of a sequence a group lets others hit."""
        if len(self.groups) == 1:
            return upto
        most = upto // self.layout.align * self.layout.align
        if self._drops[number] and most:
            most = min(upto, most + self.groups[number].block_size)
        return most

    def trim(self, sequence: TokenSequence, computed: int) -> None:
        """Gives back the blocks that nobody reads once `computed` tokens are computed."""
        for group, table in zip(self.groups, self._tables(sequence), strict=True):
            group.trim(table, computed, self.gpu)

    def free(self, sequence: TokenSequence) -> None:
        for table in self._leave(sequence):
            self.gpu.release(reversed(table), sequence.access_ns)

    def detach(self, sequence: TokenSequence) -> list[list[int]]:
        """Takes the tables from a sequence without giving their blocks back."""
        tables = self._leave(sequence)
        self._detached += tables
        return tables

    def drop_tables(self, tables: list[list[int]]) -> None:
        """Gives back what `detach` took, table by table."""
        for table in tables:
            self._detached.remove(table)
            self.gpu.release(reversed(table))

    def drop_at_once(self, tables: list[list[int]]) -> None:
        """Gives back what `detach` took as if it were one table."""
        for table in tables:
            self._detached.remove(table)
        self.gpu.release([block for table in reversed(tables) for block in reversed(table)])

    def pin(self, blocks: Iterable[int]) -> None:
        """Holds blocks with content that a connector reads."""
        held = list(blocks)
        self._pinned.update(held)
        self.gpu.hit(held)

    def unpin(self, blocks: Iterable[int]) -> None:
        """Gives back what `pin` held, in this order."""
        held = list(blocks)
        self._pinned.subtract(held)
        self.gpu.release(held)

    def scheduled(self, sequence: TokenSequence, now_ns: int) -> int:
        sequence.access_ns = now_ns
        return sequence.seen

    # -- audit ---------------------------------------------------------------------------------

    def audit(self, requests: Iterable[Request]) -> None:
        self.gpu.audit()
        alive = {each for request in requests for each in request.sequences}
        assert self._held.keys() <= alive, "a sequence that has ended holds blocks"
        counted = +self._pinned
        counted.update(chain.from_iterable(self._detached))
        for sequence in self._held:
            for table in self.tables(sequence):
                counted.update(table)
        del counted[0]
        assert counted == self.gpu.references, "references and tables disagree"
        empty = sum(map(self._empty, self._held))
        assert empty == self.empty_slots, "empty slots were miscounted"

    # -- the manager's own ---------------------------------------------------------------------

    def _stays(self, sequence: TokenSequence, tokens: int, lookahead: int) -> bool:
        """Fills slots of blocks that a running sequence has, if these are enough and no others fall
        behind. Returns whether they are."""
        held = self._held.get(sequence)
        if held is None or not self._all_full:
            return False
        upto = sequence.computed + tokens
        slots, filled = min(upto + lookahead, self.layout.max_model_len), sequence.filled
        for group, table in zip(self.groups, held, strict=True):
            if len(table.blocks) * group.block_size < slots:
                return False
        self.empty_slots -= (slots - filled) * len(self.groups)
        sequence.filled = slots
        self.publish(sequence, min(upto, sequence.length))
        return True

    def _tables(self, sequence: TokenSequence) -> tuple[GroupTable, ...]:
        return self._held.get(sequence) or tuple(group.table() for group in self.groups)

    def _missing(self, tables: Sequence[GroupTable], ask: Ask, hits: Hits) -> int:
        """Returns the free blocks that all groups need together."""
        return sum(
            group.missing(table, ask, found, self.gpu, self.layout)
            for group, table, found in zip(self.groups, tables, hits.blocks, strict=True)
        )

    def _count(self, sequence: TokenSequence, hits: Hits | None) -> None:
        """Counts the blocks of an admission that were looked up, and those that were found."""
        if hits is not None and self.caching:
            self._lookups += (sequence.length - 1) // self.block_size
            self._hits += hits.tokens // self.block_size

    def _take(self, tables: Sequence[GroupTable], ask: Ask, hits: Hits, external: int) -> None:
        """Adds the blocks that were hit, those to load into, and new ones, in this order."""
        if (any(hits.blocks) or external) and not any(table.known for table in tables):
            for group, table, blocks in zip(self.groups, tables, hits.blocks, strict=True):
                group.adopt(table, blocks, ask.start, self.gpu)
            for group, table in zip(self.groups, tables, strict=True):
                group.make_room(table, ask.start, external, self.gpu)
        for group, table in zip(self.groups, tables, strict=True):
            group.grow(table, ask, self.gpu, self.layout)

    def _find_own(self, sequence: TokenSequence) -> tuple[Hits, int]:
        """Returns the longest hit of a sequence, and its junction."""
        find = self.gpu.block_of.get
        return self._find_common(self.keys(sequence), sequence.length - 1, find)

    def _find_common(self, keys: Sequence[int], longest: int, find: Find) -> tuple[Hits, int]:
        """Returns the longest hit, and its junction."""
        layout, sets, groups = self.layout, self._sets, len(self.groups)

        def finder(alike: Alike) -> Found:
            units = alike.rules.block_size // layout.key_tokens

            def found(place: int) -> list[int] | None:
                first, blocks = keys[(place + 1) * units - 1] * groups, []
                for member in alike.members:
                    block = find(first + member)
                    if block is None:
                        return None
                    blocks.append(block)
                return blocks

            return found

        if groups == 1:
            rules, _, drop = sets[0]
            entries = rules.find(finder(sets[0]), longest, drop, layout.align)
            return Hits(len(entries) * layout.align, tables_of(sets, [entries], 1)), 0
        known = len(keys) * layout.key_tokens
        found, tokens, junction = longest_common(sets, finder, longest, known, layout.align)
        return Hits(tokens, tables_of(sets, found, groups)), junction

    def _key_at(self, sequence: TokenSequence, group: int, tokens: int) -> int:
        """Returns the content key of a block of a group that ends after `tokens` tokens."""
        keys, place = self.keys(sequence), tokens // self.layout.key_tokens
        if place > len(keys):
            raise state_of_drafts(sequence.request)
        return self.content_key(keys[place - 1], group)

    def _prefill_end(self, sequence: TokenSequence) -> int:
        return max(sequence.request.input_length, sequence.length - 1)

    def _leave(self, sequence: TokenSequence) -> list[list[int]]:
        """Forgets a sequence and returns its tables."""
        self._junctions.pop(sequence, None)
        if sequence not in self._held:
            return []
        self.empty_slots -= self._empty(sequence)
        tables = self._held.pop(sequence)
        sequence.filled = sequence.seen = sequence.published = 0
        return [table.blocks for table in tables]

    def _empty(self, sequence: TokenSequence) -> int:
        """Returns the slots of a sequence that hold no token."""
        held = zip(self.groups, self._held[sequence], strict=True)
        return sum(
            max(len(table.blocks) * group.block_size - sequence.filled, 0)
            for group, table in held
            if group.holds_tokens
        )
