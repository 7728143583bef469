"""The rules of each kind of KV cache group: layers that keep the same of a sequence.

Every group has a block table of its own for each request; all take their blocks from one pool. A
kind says what it no longer needs, what an admission asks for, what can be hit, and what is worth
keeping. Source: vLLM 0.33.0, `v1/core/single_type_kv_cache_manager.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from librt.vecs import append, vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core import guard
from kvsim.core.pool import Pool
from kvsim.core.request import Request, Table
from kvsim.core.vectors import EMPTY, zeros
from kvsim.engines.deaths import died

NEVER: Final = 1 << 60


class Layout:
    """What the groups of one engine share."""

    key_tokens: i64
    """Tokens of a unit of content."""
    align: i64
    """Every hit of several groups is a multiple of this: the least common multiple of their block
    sizes (vLLM's `scheduler_block_size`)."""
    max_model_len: i64
    max_in_flight_tokens: i64
    """`max_num_batched_tokens` x number of steps in flight."""
    retention: i64
    """`prefix_cache_retention_interval`: -1 keeps every block that a hit could use, 0 those at the
    end of prompts, any other value also those at its multiples."""
    num_spec_tokens: i64
    lookahead_keys: bool
    """Whether the content of a block covers the token after it, too (EAGLE)."""
    drops_last: bool
    """Whether a hit loses its last block (EAGLE without `lookahead_keys`)."""

    def __init__(
        self,
        key_tokens: int,
        align: int,
        max_model_len: int,
        max_in_flight_tokens: int,
        retention: int = 0,
        num_spec_tokens: int = 0,
        lookahead_keys: bool = False,
        drops_last: bool = False,
    ) -> None:
        self.key_tokens, self.align, self.max_model_len = key_tokens, align, max_model_len
        self.max_in_flight_tokens, self.retention = max_in_flight_tokens, retention
        self.num_spec_tokens = num_spec_tokens
        self.lookahead_keys, self.drops_last = lookahead_keys, drops_last

    def resumes_at(self, tokens: i64, unit: i64) -> i64:
        """The last multiple of `unit` at which a sequence with the same `tokens` tokens can resume
        (`get_mamba_prefill_checkpoint_position`)."""
        if self.drops_last:
            return max((tokens // unit - 1) * unit, 0)
        return max((tokens - 1) // unit * unit, 0)


@mypyc_attr(acyclic=True, free_list_len=1)
class Ask:
    """What a request asks of every group."""

    slots: i64
    """Leading tokens that need a slot, lookahead included."""
    tokens: i64
    """The same without lookahead, and without the limit of `max_model_len`."""
    start: i64
    """Leading tokens that are computed, hits and loads included."""
    prefill_end: i64
    """Where its prompt stage ends."""
    whole: bool
    """Whether it is the test of the whole sequence, in which a window never needs more than its own
    tokens and those in flight."""

    def __init__(
        self, slots: i64, tokens: i64, start: i64, prefill_end: i64, whole: bool = False
    ) -> None:
        self.slots, self.tokens, self.start, self.prefill_end = slots, tokens, start, prefill_end
        self.whole = whole


class Mask(NamedTuple):
    """Where later sequences can resume, and so which blocks are worth keeping."""

    align: int
    """Every hit is a multiple of this many tokens."""
    interval: int
    """Retention interval in tokens (`Layout.retention`)."""
    drop: bool
    """Whether a hit loses its last block."""
    marks: Sequence[int] = ()
    """Numbers of tokens at which sequences are known to resume."""
    horizon: int = 0
    """Block after the last one of the sequence, where sequences may resume, too; 0 for none."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Group:
    """What every kind has in common. The rules are those of full attention unless a subclass says
    otherwise."""

    words = ""
    """What its layers are, in words."""
    block_size: i64
    eagle: bool
    """Whether the layers of an EAGLE draft are in it."""
    picks: bool
    """Whether `keeps` may turn blocks down."""
    holds_tokens: bool
    """Whether its blocks have a slot for each token."""
    full: bool
    """Whether it keeps all tokens, so that a prefix of a hit is always a hit."""
    drop: bool
    """Whether its hits lose the last block."""
    window: i64
    """The most tokens that a token reads, itself included; 0: all before it."""
    number: i64
    """Its place among the groups of the engine."""
    alike: list[Group]
    """It and those with equal `rules`, which are looked up together."""
    units: i64
    """Units of content in a block."""
    layout: Layout
    pool: Pool
    """The one that all groups take blocks from."""
    hits: vec[i64]
    """The blocks that the last look-up found, from `first_hit` to before `num_hits`."""
    first_hit: i64
    """Before it, no block is needed."""
    num_hits: i64

    def __init__(self, *, block_size: int, eagle: bool = False) -> None:
        self.block_size, self.eagle = block_size, eagle
        self.holds_tokens, self.full, self.drop, self.picks = True, False, False, False
        self.window = self.number = self.first_hit = self.num_hits = 0
        self.alike, self.hits = [self], EMPTY

    def join(self, number: int, layout: Layout, pool: Pool) -> None:
        """It becomes a group of an engine."""
        self.number, self.layout, self.pool = number, layout, pool
        self.units = self.block_size // layout.key_tokens

    def rules(self) -> tuple[Any, ...]:
        """What it has in common with groups that are looked up together with it."""
        return type(self).__name__, int(self.block_size), int(self.window)

    def with_prefix_cache(self) -> Group:
        """The rules of this group where a prefix cache is on."""
        return self

    # -- questions -----------------------------------------------------------------------------

    def skipped(self, computed: i64) -> i64:
        """Leading tokens that nobody reads once `computed` tokens are computed
        (`get_num_skipped_tokens`)."""
        return 0

    def leaves(self, computed: i64) -> i64:
        """The computed tokens from which on `trim` gives back more than at `computed`."""
        return NEVER

    def room(self, table: Table) -> i64:
        """Tokens for which a table needs no further blocks."""
        return len(table.blocks) * self.block_size

    def most_blocks(self, layout: Layout) -> i64:
        """The most blocks that a sequence ever holds; 0 if its length decides."""
        return 0

    def peak_blocks(self, layout: Layout) -> int:
        """The blocks that a sequence of `max_model_len` tokens holds at most."""
        most: i64 = self.most_blocks(layout)
        return most if most else -(-layout.max_model_len // self.block_size)

    def wanted(self, ask: Ask) -> i64:
        """Table entries for all slots."""
        return (ask.slots + self.block_size - 1) // self.block_size

    def missing(self, table: Table, ask: Ask, hits: bool) -> i64:
        """The free blocks that `adopt` and `grow` would use (`get_num_blocks_to_allocate`).
        `hits`: whether those of the last look-up are for this request."""
        wanted: i64 = self.wanted(ask)
        if ask.whole:
            most: i64 = self.most_blocks(self.layout)
            if most:
                wanted = min(wanted, most)
        held: i64 = len(table.blocks)
        # From the second time on, hits play no part.
        if table.known:
            return max(wanted - held, 0)
        # Entries behind the window are left empty, so they take no block.
        behind: i64 = self.skipped(ask.start) // self.block_size
        if not hits:
            return max(wanted - max(behind, held), 0)
        new: i64 = max(wanted - max(behind, self.num_hits + held), 0)
        # A hit that nobody holds counts as free now, and is not any more once it is touched.
        return new + self.idle_hits(max(behind - held, 0))

    def idle_hits(self, start: i64) -> i64:
        """Blocks of the last look-up from entry `start` on that nobody holds."""
        idle: i64 = 0
        k: i64
        for k in range(max(start, self.first_hit), self.num_hits):
            idle += self.pool.refs(self.hits[k]) == 0
        return idle

    def find(self, contents: vec[i64], most: i64, drop: bool, pool: Pool) -> None:
        """Looks up the longest hit of at most `most` tokens in a pool, a multiple of
        `Layout.align`, and holds it (`find_longest_cache_hit`). With `drop`, the hit loses its last
        block. A block counts if all groups that are `alike` have it."""
        raise NotImplementedError

    def present(self, contents: vec[i64], place: i64, pool: Pool) -> bool:
        """Notes the blocks at one place as hits if all groups have them."""
        group: Group
        content: i64 = contents[(place + 1) * self.units - 1]
        for group in self.alike:
            block: i64 = pool.find(content * pool.groups + group.number)
            if block == 0:
                return False
            group.hits[place] = block
        return True

    def hold(self, first: i64, end: i64) -> None:
        """The hits of all groups alike are the entries from `first` to before `end`."""
        group: Group
        for group in self.alike:
            group.first_hit, group.num_hits = first, end

    def keeps(self, first: int, last: int, mask: Mask) -> list[bool] | None:
        """Which of the blocks `first .. last - 1` a later hit could use; None for all
        (`reachable_block_mask`)."""
        return None

    # -- moves ---------------------------------------------------------------------------------

    def adopt(self, table: Table, start: i64) -> None:
        """Begins a table with the blocks of the last look-up, except those behind the window of a
        sequence with `start` computed tokens (`allocate_new_computed_blocks`)."""
        behind: i64 = self.skipped(start) // self.block_size
        first: i64 = max(behind, min(self.first_hit, self.num_hits))
        blocks: vec[i64] = zeros(max(first, self.num_hits))
        hits: vec[i64] = self.hits
        k: i64
        for k in range(first, self.num_hits):
            self.pool.touch(hits[k])
            blocks[k] = hits[k]
        table.blocks = blocks
        table.registered = len(blocks)
        table.known = True

    def make_room(self, table: Table, start: i64, external: i64) -> None:
        """Adds blocks for the last `external` of `start` tokens, which a connector loads."""
        if external and start > self.skipped(start):
            lacking: i64 = (start + self.block_size - 1) // self.block_size - len(table.blocks)
            if lacking > 0:
                table.blocks = self.pool.extended(table.blocks, lacking)

    def grow(self, table: Table, ask: Ask) -> None:
        """Adds the blocks that the slots need (`allocate_new_blocks`)."""
        lacking: i64 = self.wanted(ask) - len(table.blocks)
        if lacking > 0:
            table.blocks = self.pool.extended(table.blocks, lacking)

    def trim(self, table: Table, processed: i64) -> None:
        """Gives back the blocks that nobody reads once `processed` tokens are computed
        (`remove_skipped_blocks`)."""
        behind: i64 = min(self.skipped(processed) // self.block_size, len(table.blocks))
        start: i64 = behind
        # Those before were given back at an earlier call.
        while start > 0 and table.blocks[start - 1]:
            start -= 1
        if start < behind:
            self.pool.release(table.blocks, start, behind, -1)
            k: i64
            for k in range(start, behind):
                table.blocks[k] = 0

    def register(self, table: Table, request: Request, upto: i64, ends: list[int]) -> None:
        """Lets others hit the full blocks of the first `upto` tokens (`cache_blocks`). `ends`:
        tokens at which sequences with the same prompt resume, where a group `picks`."""
        first: i64 = table.registered
        last: i64 = upto // self.block_size
        if last <= first:
            return
        kept = self.keeps(first, last, self._mask(request, ends)) if self.picks else None
        pool: Pool = self.pool
        units: i64 = self.units
        contents: vec[i64] = request.contents
        blocks: vec[i64] = table.blocks
        groups: i64 = pool.groups
        place: i64
        for place in range(first, last):
            block: i64 = blocks[place]
            # A block that no later hit can use stays without content, so that it is reused first.
            if block and (kept is None or kept[place - first]):
                content: i64 = contents[(place + 1) * units - 1]
                pool.label(block, content * groups + self.number, (place + 1) * self.block_size)
        table.registered = last
        table.known = True

    def _mask(self, request: Request, ends: list[int]) -> Mask:
        """Where later sequences can resume a request: also around its junction."""
        marks, junction = [*ends], int(request.junction)
        if junction:
            marks += [junction, junction - self.block_size] if self.drop else [junction]
        return Mask(self.layout.align, self.layout.retention, self.drop, marks)


@mypyc_attr(allow_interpreted_subclasses=True)
class Full(Group):
    """Every token is kept until the sequence ends (`FullAttentionManager`)."""

    words = "full attention"

    def __init__(self, *, block_size: int, eagle: bool = False) -> None:
        super().__init__(block_size=block_size, eagle=eagle)
        self.full = True

    def find(self, contents: vec[i64], most: i64, drop: bool, pool: Pool) -> None:
        align: i64 = self.layout.align
        entries: i64 = 0
        longest: i64 = most // self.block_size
        while entries < longest and self.present(contents, entries, pool):
            entries += 1
        tokens: i64 = entries * self.block_size
        if drop and tokens:
            tokens -= self.block_size
        self.hold(0, tokens // align * align // self.block_size)

    def register(self, table: Table, request: Request, upto: i64, ends: list[int]) -> None:
        super().register(table, request, upto, ends)
        if self.units > 1:
            self._keep_tail(table, request, upto)

    def _keep_tail(self, table: Table, request: Request, upto: i64) -> None:
        """Names the block in which the prompt ends. No look-up finds it, because hits end at block
        ends, but a block with content is reused after those without."""
        pool: Pool = self.pool
        unit: i64 = self.layout.key_tokens
        tokens: i64 = request.input_length if self.drop else request.input_length - 1
        end: i64 = tokens // unit * unit
        place: i64 = end // self.block_size
        if end <= 0 or end > upto or end % self.block_size == 0 or place >= len(table.blocks):
            return
        block: i64 = table.blocks[place]
        if block and pool.end_of(block) < end:
            pool.label(block, request.contents[end // unit - 1] * pool.groups + self.number, end)


@mypyc_attr(allow_interpreted_subclasses=True)
class Sliding(Group):
    """A token reads the last `window` tokens, itself included (`SlidingWindowManager`)."""

    words = "a sliding window"

    def __init__(self, *, block_size: int, window: int, eagle: bool = False) -> None:
        super().__init__(block_size=block_size, eagle=eagle)
        self.window, self.picks = window, True

    def skipped(self, computed: i64) -> i64:
        return max(0, computed - self.window + 1)

    def leaves(self, computed: i64) -> i64:
        # The first length at which `skipped` covers a block more.
        size: i64 = self.block_size
        return (self.skipped(computed) // size + 1) * size + self.window - 1

    def most_blocks(self, layout: Layout) -> i64:
        # A window may begin within a block, hence one more.
        tokens: i64 = min(self.window - 1 + layout.max_in_flight_tokens, layout.max_model_len)
        return (tokens + self.block_size - 1) // self.block_size + 1

    def blocks_of_window(self, drop: bool) -> i64:
        """The consecutive blocks that a hit needs."""
        # The token itself is computed, so a hit needs the `window - 1` before it.
        return (self.window - 1 + self.block_size - 1) // self.block_size + (1 if drop else 0)

    def find(self, contents: vec[i64], most: i64, drop: bool, pool: Pool) -> None:
        """The last run of blocks that fills a window, or else the run at the very start."""
        align: i64 = self.layout.align
        size: i64 = self.block_size
        # A window of one token needs no block, yet the engine looks for one.
        need: i64 = max(self.blocks_of_window(drop), 1)
        run: i64 = 0
        place: i64 = most // size
        while place and run < need:
            place -= 1
            if not self.present(contents, place, pool):
                run = 0
            # A run ends where all groups can resume; within the run, any place will do.
            elif run or (place if drop else place + 1) * size % align == 0:
                run += 1
        # After a whole scan, `place` is 0 and the run begins there.
        end: i64 = place + run
        if run < need:
            end = end * size // align * align // size
        if drop and end:
            end = (end - 1) * size // align * align // size
        self.hold(place, end)

    def keeps(self, first: int, last: int, mask: Mask) -> list[bool] | None:
        align, interval, drop, marks, horizon = mask
        size = int(self.block_size)
        if align % size:
            return None
        need, kept = int(self.blocks_of_window(drop)), [False] * (last - first)
        segment = align if interval < 0 else interval
        # Down to where a hit can end. A hit that loses its last block needs the one behind, too.
        ends = [] if interval < 0 else [mark // align * align // size + drop for mark in marks]
        if segment:
            each = segment // size
            # Windows overlap, so every block is within one.
            if need >= each:
                return None
            for place in range(max(first, int(drop)), last):
                kept[place - first] = (place - drop) % each >= each - need
            if horizon % each and not drop:
                # The last segment is cut short, and nothing before it is of use.
                need = min(need, horizon % each)
                ends.append(horizon)
        for end in ends:
            for place in range(max(first, end - need), min(last, end)):
                kept[place - first] = True
        return kept


@mypyc_attr(allow_interpreted_subclasses=True)
class Chunked(Group):
    """A token reads the tokens before it in its chunk of `window` tokens (Llama 4,
    `ChunkedLocalAttentionManager`)."""

    words = "attention in chunks"

    def __init__(self, *, block_size: int, chunk: int, eagle: bool = False) -> None:
        super().__init__(block_size=block_size, eagle=eagle)
        self.window = chunk

    def skipped(self, computed: i64) -> i64:
        return computed // self.window * self.window

    def leaves(self, computed: i64) -> i64:
        return (computed // self.window + 1) * self.window

    def most_blocks(self, layout: Layout) -> i64:
        tokens: i64 = min(self.window + layout.max_in_flight_tokens, layout.max_model_len)
        return (tokens + self.block_size - 1) // self.block_size

    def find(self, contents: vec[i64], most: i64, drop: bool, pool: Pool) -> None:
        """Everything before the last chunk, without a look-up, and the leading blocks of that chunk
        that are there."""
        # Chunks that are over are never read again, so they count as hit without a block.
        first: i64 = self.skipped(most) // self.block_size
        place: i64 = first
        longest: i64 = most // self.block_size
        while place < longest and self.present(contents, place, pool):
            place += 1
        self.hold(first, place)


@mypyc_attr(allow_interpreted_subclasses=True)
class Mamba(Group):
    """Layers that keep one state of a sequence, and one more for each drafted token.

    A block is a state, not a place for tokens. Without a prefix cache, the state is never given
    back before the sequence ends. Its block size is then `max_model_len` (`MambaManager` with
    `mamba_cache_mode` `none`).
    """

    words = "states"
    checkpoint: bool
    """Whether the layers can save one state inside a chunk."""
    checkpoint_alignment: i64
    """Such a state lies at a multiple of this many tokens behind the start of the chunk."""

    def __init__(
        self,
        *,
        block_size: int,
        eagle: bool = False,
        checkpoint: bool = False,
        checkpoint_alignment: int = 1,
    ) -> None:
        super().__init__(block_size=block_size, eagle=eagle)
        self.checkpoint, self.checkpoint_alignment = checkpoint, checkpoint_alignment
        self.holds_tokens = False

    def rules(self) -> tuple[Any, ...]:
        return *super().rules(), self.checkpoint, int(self.checkpoint_alignment)

    def with_prefix_cache(self) -> Group:
        made = AlignedMamba(
            block_size=self.block_size,
            eagle=self.eagle,
            checkpoint=self.checkpoint,
            checkpoint_alignment=self.checkpoint_alignment,
        )
        made.picks = True
        return made

    def skipped(self, computed: i64) -> i64:
        return max(computed - 1, 0)

    def leaves(self, computed: i64) -> i64:
        # The first length at which `skipped` covers a block more.
        size: i64 = self.block_size
        return (self.skipped(computed) // size + 1) * size + 1

    def room(self, table: Table) -> i64:
        return (len(table.blocks) - self.layout.num_spec_tokens) * self.block_size

    def peak_blocks(self, layout: Layout) -> int:
        return 1 + layout.num_spec_tokens

    def wanted(self, ask: Ask) -> i64:
        return super().wanted(ask) + self.layout.num_spec_tokens

    def find(self, contents: vec[i64], most: i64, drop: bool, pool: Pool) -> None:
        """The last state that is there."""
        size: i64 = self.block_size
        place: i64
        for place in range(most // size - 1, -1, -1):
            ends: bool = (place + 1) * size % self.layout.align == 0
            if ends and self.present(contents, place, pool):
                self.hold(place, place + 1)
                return
        self.hold(0, 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class AlignedMamba(Mamba):
    """The same layers with a prefix cache: a block keeps the state at its end (`mamba_cache_mode`
    `align`).

    A state moves on with its sequence, so only chunks that end at a block end leave one behind
    (`cut`).
    """

    def with_prefix_cache(self) -> Group:
        return self

    def peak_blocks(self, layout: Layout) -> int:
        return 2 + layout.num_spec_tokens + self.checkpoint

    def missing(self, table: Table, ask: Ask, hits: bool) -> i64:
        pool: Pool = self.pool
        found: i64 = self.num_hits if hits else 0
        if found and int(pool.content(self.hits[found - 1])) in pool.named:
            # Another request computes this state in this very step. Who asks for more blocks than
            # there are waits for the next one.
            return pool.size + 2
        drafts: i64 = self.layout.num_spec_tokens
        wanted: i64 = (ask.tokens + self.block_size - 1) // self.block_size + drafts
        new: i64 = wanted - found - len(table.blocks)
        if new > 0:
            most: i64 = 2 if self._export(table, ask) else 1
            # Entries between the last state and the new one stay empty.
            new = min(new, most if table.grown else most + drafts)
        return new + (self.idle_hits(0) if hits else 0)

    def grow(self, table: Table, ask: Ask) -> None:
        drafts: i64 = self.layout.num_spec_tokens
        blocks: vec[i64] = table.blocks
        wanted: i64 = (ask.tokens + self.block_size - 1) // self.block_size + drafts
        table.export_tokens = self._export(table, ask)
        table.export_place = (ask.tokens + self.block_size - 1) // self.block_size - 2
        exports: bool = table.export_tokens > 0
        held: i64 = len(blocks)
        grown: bool = table.grown
        # The first time, there are no blocks of drafts to move on.
        table.grown = True
        if wanted <= held and not exports:
            return
        gap: i64 = wanted - drafts - 1 - (1 if exports else 0)
        while len(blocks) < gap:
            blocks = append(blocks, 0)
        if grown:
            # States of drafts that this step leaves behind are written again, further on.
            place: i64
            for place in range(held - drafts, min(held, gap)):
                blocks = append(blocks, blocks[place])
                blocks[place] = 0
        while len(blocks) < wanted:
            blocks = append(blocks, self.pool.take())
        table.blocks = blocks

    def trim(self, table: Table, processed: i64) -> None:
        blocks: vec[i64] = table.blocks
        behind: i64 = min(self.skipped(processed) // self.block_size, len(blocks))
        if behind > table.trimmed:
            self.pool.release(blocks, table.trimmed, behind, -1)
            k: i64
            for k in range(table.trimmed, behind):
                blocks[k] = 0
            table.trimmed = behind

    def keeps(self, first: int, last: int, mask: Mask) -> list[bool] | None:
        each = 1 if mask.interval < 0 else mask.interval // int(self.block_size)
        if each == 1:
            return None
        size = int(self.block_size)
        ends = {mark // mask.align * mask.align // size for mark in mask.marks}
        return [
            place in ends or (each > 0 and place % each == 0)
            for place in range(first + 1, last + 1)
        ]

    def register(self, table: Table, request: Request, upto: i64, ends: list[int]) -> None:
        super().register(table, request, upto, ends)
        tokens: i64 = table.export_tokens
        if tokens == 0:
            return
        pool: Pool = self.pool
        block: i64 = table.blocks[table.export_place]
        if not self._worth(tokens, request):
            pool.unname(block)
        elif pool.end_of(block) != tokens:
            unit: i64 = tokens // self.layout.key_tokens
            if unit > len(request.contents):
                raise died("state-of-drafts", request)
            content: i64 = request.contents[unit - 1]
            pool.label(block, content * pool.groups + self.number, tokens)

    def _worth(self, tokens: i64, request: Request) -> bool:
        """Whether a state that a chunk saved on its way is kept for others."""
        layout: Layout = self.layout
        if tokens in (layout.resumes_at(request.input_length, layout.align), request.junction):
            return True
        if tokens % self.block_size:
            return False
        place = int(tokens // self.block_size)
        kept = self.keeps(place - 1, place, Mask(layout.align, layout.retention, False))
        return kept is None or kept[0]

    def _export(self, table: Table, ask: Ask) -> i64:
        """Tokens of the state that the chunk saves on its way; 0 if there is none."""
        layout: Layout = self.layout
        end: i64 = ask.tokens
        tokens: i64 = layout.resumes_at(end, layout.align)
        place: i64 = (end + self.block_size - 1) // self.block_size - 2
        # Where only ends of prompts are kept, earlier chunks save nothing.
        prefill_end: i64 = ask.prefill_end if layout.retention == 0 else 0
        if end < prefill_end or not self.saves(ask.start, end, tokens):
            return 0
        held: i64 = len(table.blocks)
        if place >= held or table.blocks[place] == 0:
            return tokens
        return tokens if table.grown and place >= held - layout.num_spec_tokens else 0

    def saves(self, start: i64, end: i64, tokens: i64) -> bool:
        """Whether the chunk from `start` to `end` can save the state after `tokens` tokens on its
        way (`is_mamba_prefill_checkpoint_valid`)."""
        size: i64 = self.block_size
        unit: i64 = self.layout.key_tokens
        return (
            self.checkpoint
            and start % unit == 0
            and (end + size - 1) // size - 2 > (start - 1) // size
            and start + unit <= tokens
            and start < tokens < end
            and (tokens - start) % self.checkpoint_alignment == 0
        )


guard.keep(Layout)
guard.keep(Group, "hits alike")

STEADY = (Full, Sliding, Chunked, Mamba, AlignedMamba)
"""Kinds whose tables change only where `room` and `leaves` say."""

KINDS: dict[str, type[Group]] = {
    "full": Full,
    "sliding": Sliding,
    "chunked": Chunked,
    "mamba": Mamba,
}
"""The kinds of groups, by their `type` in a configuration."""


def groups_of(tables: Sequence[dict[str, Any]]) -> tuple[Group, ...]:
    """The groups that a configuration describes. Raises `ValueError` where it is not understood."""
    found = []
    for table in tables:
        given = dict(table)
        kind = given.pop("type", None)
        if kind not in KINDS:
            raise ValueError(f"kv_groups: unknown type {kind!r}")
        try:
            group = KINDS[kind](**given)
        except TypeError as error:
            raise ValueError(f"kv_groups: {error}") from None
        found.append(group)
    return tuple(found)
