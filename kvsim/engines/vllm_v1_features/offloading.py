"""The tier in CPU memory of vLLM V1: `OffloadingConnector`, `--kv-offloading-size`.

Blocks are copied to the tier as soon as their tokens are computed, prompts only by default. A
waiting request first hits blocks of the GPU; what follows is loaded from the tier. The blocks that
a store reads are not held: who reuses one of them waits for the store (a *flush*). vLLM 0.33.0
`distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`.
"""

from __future__ import annotations

from math import lcm

from kvsim.engine.request import ABORTED, Request
from kvsim.engines.vllm_v1_features.connector import (
    Connector,
    Done,
    Job,
    Match,
    Reported,
    Transfers,
)
from kvsim.engines.vllm_v1_features.cpu_tier import PENDING, Access, CpuTier, Key
from kvsim.engines.vllm_v1_features.plan import FeaturePlan, Move
from kvsim.engines.vllm_v1_features.tables import FullTables


class _Chunks:
    """The chunks of one group of a request."""

    __slots__ = ("blocks", "keys", "next")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        """Keys of the chunks whose tokens are all known."""
        self.blocks: list[int] = []
        """The table as the tier knows it; 0 where a block is not there, or was reused."""
        self.next = 0
        """First chunk that was not considered for a store yet."""


class _Known:
    """What the tier knows of a request."""

    __slots__ = ("access", "groups", "jobs", "local")

    def __init__(self, groups: int) -> None:
        self.access = Access()
        self.groups = [_Chunks() for _ in range(groups)]
        self.jobs: set[int] = set()
        """Its transfers in flight."""
        self.local = 0
        """Tokens in blocks of the GPU when it was last looked up."""


class _Copy:
    """A transfer in flight."""

    __slots__ = ("fenced", "job", "keys")

    def __init__(self, job: Job, keys: list[Key], fenced: list[int]) -> None:
        self.job, self.keys = job, keys
        self.fenced = fenced
        """Blocks that are watched from the end of the request on."""


class Offloading(Connector):
    """Decides what is loaded from a CPU tier, and what is stored there."""

    loads = True

    def __init__(
        self,
        blocks: FullTables,
        tier: CpuTier,
        *,
        blocks_per_chunk: int = 1,
        offload_prompt_only: bool = True,
        sync_load_budget_bytes: int = 0,
        bytes_per_token: int = 0,
    ) -> None:
        """`sync_load_budget_bytes`: bytes that a step may load before it computes; other loads
        happen while their requests wait. `bytes_per_token`: of all layers together."""
        self._blocks, self.tier = blocks, tier
        self._size = blocks_per_chunk
        self._prompt_only = offload_prompt_only
        self._sync_budget = self._sync_left = sync_load_budget_bytes
        self._bytes_per_token = bytes_per_token
        self._tokens = [group.block_size * blocks_per_chunk for group in blocks.groups]
        """Tokens of a chunk of each group."""
        self._windows = [
            -(-group.reach // tokens)
            for group, tokens in zip(blocks.groups, self._tokens, strict=True)
        ]
        """Chunks that a window touches at least; 0: the group reads all tokens."""
        self._align = _alignment(self._tokens, self._windows)
        self._known: dict[Request, _Known] = {}
        self._copies: dict[int, _Copy] = {}
        self._fences: dict[int, set[int]] = {}
        """Block → stores in flight that read it, where it may be reused."""
        self._being_loaded: set[Key] = set()
        self._jobs = 0
        self._new_loads: list[Job] = []
        self._touched: set[int] = set()
        """Blocks that this step gave to somebody."""

    # -- a request waits -------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> Match | None:
        known = self._known_of(request)
        for chunks in known.groups:
            chunks.blocks.clear()
            chunks.next = 0
        if known.jobs:
            return None
        self._extend_keys(request, known)
        known.local = computed
        if request.options.skip_reading_prefix_cache:
            return Match()
        found = self._search(request, known)
        if not found:
            return None if found is None else Match()
        needed = found * self._bytes_per_token
        within = computed + found < request.sequences[0].length and needed <= self._sync_left
        if self._sync_budget and within:
            self._sync_left -= needed
            return Match(found, asynchronous=False)
        return Match(found, asynchronous=True)

    def _search(self, request: Request, known: _Known) -> int | None:
        """Returns the tokens of a request in the tier behind its local ones; None: they may change
        before the next step."""
        found = Search(self._blocks.groups, self._tokens, self._windows, self.tier).longest(
            [chunks.keys for chunks in known.groups], known.local, request.sequences[0].length
        )
        if found and self._blocks.caches and self._being_loaded:
            end = known.local + found
            for number, chunks in enumerate(known.groups):
                tokens = self._tokens[number]
                keys = chunks.keys[known.local // tokens : -(-end // tokens)]
                if self._windows[number]:
                    keys = keys[-self._blocks.groups[number].window_chunks(end, tokens) :]
                if not self._being_loaded.isdisjoint(keys):
                    return None
        return found

    def update_state_after_alloc(self, request: Request, local: int, match: Match) -> None:
        tables = self._blocks.tables(request.sequences[0])
        for table in tables:
            self._touched.update(table)
        self._touched.discard(0)
        if not match.tokens:
            return
        known, end = self._known[request], local + match.tokens
        keys: list[Key] = []
        targets: list[list[int]] = []
        for number, (group, table) in enumerate(zip(self._blocks.groups, tables, strict=True)):
            chunks, tokens = known.groups[number], self._tokens[number]
            last = -(-end // group.block_size)
            first = -(-local // group.block_size)
            while first < last and not self._to_load(table[first], match):
                first += 1
            chunks.next = -(-end // tokens)
            if first < last:
                keys += chunks.keys[first // self._size : chunks.next]
            targets.append(table[first:last])
        places = self.tier.load(keys, known.access)
        within = not match.asynchronous
        job = Job(self._number(), request, targets, [places], True, within)
        self._new_loads.append(job)
        known.jobs.add(job.number)
        self._copies[job.number] = _Copy(job, keys, [])
        if match.asynchronous:
            self._being_loaded.update(keys)

    def _to_load(self, block: int, match: Match) -> bool:
        """Whether a block is the first one to load into: it holds nothing that others know, unless
        the step itself waits for the load."""
        return block != 0 and (not match.asynchronous or self._blocks.key_of(block) is None)

    # -- a step is composed ----------------------------------------------------------------------

    def build_connector_meta(self, plan: FeaturePlan) -> Transfers:
        self._note_tables(plan.moves)
        loads, self._new_loads = self._new_loads, []
        new = {job.number for job in loads}
        flush = {
            number
            for request, _ in plan.preempted
            if request in self._known
            for number in self._known[request].jobs - new
        }
        for block in self._touched & self._fences.keys():
            flush |= self._fences[block]
        stores: list[Job] = []
        for move in plan.moves:
            computed = move.request.sequences[0].computed + move.tokens
            stores += self._stored(move.request, computed, flush)
        for request in plan.finished:
            stores += self._stored(request, _written(request), flush)
        for request in plan.finished:
            self._over(request)
        self._touched.clear()
        self._sync_left = self._sync_budget
        return Transfers(loads, stores, sorted(flush), [])

    def _note_tables(self, moves: list[Move]) -> None:
        """Notes the tables of the batch, and forgets blocks that were reused."""
        sparse = [number for number, window in enumerate(self._windows) if window]
        before: dict[Request, list[int]] = {}
        for move in moves:
            known = self._known_of(move.request)
            self._extend_keys(move.request, known)
            tables = self._blocks.tables(move.request.sequences[0])
            if move.resumed:
                for chunks in known.groups:
                    chunks.blocks.clear()
            before[move.request] = [len(chunks.blocks) for chunks in known.groups]
            for chunks, table in zip(known.groups, tables, strict=True):
                new = table[len(chunks.blocks) :]
                chunks.blocks += new
                self._touched.update(new)
        self._touched.discard(0)
        if not (sparse and self._touched):
            return
        for request, known in self._known.items():
            for number in sparse:
                chunks = known.groups[number]
                end = before[request][number] if request in before else len(chunks.blocks)
                for place in range(chunks.next * self._size, end):
                    if chunks.blocks[place] in self._touched:
                        chunks.blocks[place] = 0

    def _stored(self, request: Request, computed: int, flush: set[int]) -> list[Job]:
        """Offers the chunks of a request whose first `computed` tokens are computed. Returns the
        store, if there is one."""
        known = self._known.get(request)
        if known is None:
            return []
        ended, sequence = request.finish_ns >= 0, request.sequences[0]
        tokens = min(computed, sequence.length)
        if self._prompt_only:
            tokens = min(tokens, request.input_length)
        ends = [self._whole(number, known, request, tokens) for number in range(len(self._tokens))]
        offers = [
            self._offers(number, known, request, end, ended) for number, end in enumerate(ends)
        ]
        keys = [known.groups[number].keys[at] for number, found in enumerate(offers) for at in found]
        places = self.tier.offer(keys, known.access) if keys else {}
        if places is None:
            return []
        for chunks, end in zip(known.groups, ends, strict=True):
            chunks.next = max(chunks.next, end)
        if not places:
            return []
        sources: list[list[int]] = []
        watched: list[int] = []
        later: list[int] = []
        for number, found in enumerate(offers):
            chunks = known.groups[number]
            blocks = [
                block
                for at in found
                if chunks.keys[at] in places
                for block in chunks.blocks[at * self._size : (at + 1) * self._size]
                if block
            ]
            sources.append(blocks)
            (watched if self._windows[number] else later).extend(blocks)
        job = Job(self._number(), request, sources, [[*places.values()]], False)
        known.jobs.add(job.number)
        self._copies[job.number] = _Copy(job, [*places], later)
        self._fence(job.number, watched)
        if ended:
            self._fence(job.number, later)
            if not self._touched.isdisjoint(later):
                flush.add(job.number)
        return [job]

    def _whole(self, number: int, known: _Known, request: Request, tokens: int) -> int:
        """Returns the number of chunks of a group that could be stored by now."""
        chunks = known.groups[number]
        end = tokens // self._tokens[number]
        if self._blocks.groups[number].eagle and tokens > request.input_length:
            # Its last block may be written again while drafts are verified.
            end -= request.finish_ns < 0
        return max(0, min(end, len(chunks.blocks) // self._size, len(chunks.keys)))

    def _offers(
        self, number: int, known: _Known, request: Request, end: int, ended: bool
    ) -> list[int]:
        """Returns the chunks of a group that are offered: those that a later load can use, and
        whose blocks are all there."""
        chunks, size = known.groups[number], self._size
        first = chunks.next
        kept = None
        if self._windows[number]:
            first, kept = self._kept(number, known, request, end, ended)
        found = []
        for at in range(first, end):
            blocks = chunks.blocks[at * size : (at + 1) * size]
            needed = [True] * size if kept is None else kept(at)
            if blocks[-1] and any(needed) and all(map(_there, blocks, needed)):
                found.append(at)
        return found
