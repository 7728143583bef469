"""The tier in CPU memory of vLLM V1: `OffloadingConnector`, `--kv-offloading-size`.

Blocks are copied to the tier as soon as their tokens are computed, prompts only by default. A
waiting request first hits blocks of the GPU; what follows is loaded from the tier. The blocks that
a store reads are not held: who reuses one of them waits for the store (a *flush*). vLLM 0.33.0
`distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from mypy_extensions import i64

from kvsim.core.plan import Plan
from kvsim.core.request import ABORTED, Request, Table
from kvsim.engines.vllm_v1.connector import (
    NO_TRANSFERS,
    Connector,
    Done,
    Job,
    Match,
    Reported,
    Transfers,
)
from kvsim.engines.vllm_v1.cpu_tier import PENDING, Access, CpuTier, Key
from kvsim.engines.vllm_v1.groups import Group, Mask, Sliding
from kvsim.engines.vllm_v1.manager import KVCacheManager

STORING, LOADED_BY_OTHERS, OWN_STORES = "pending", "loaded_by_others", "own_stores"
"""Why a request was told to wait: what it could load is being stored; another request loads it; it
was preempted, and its own stores are under way."""
ANSWERS, REFUSED, PREEMPTED, FLUSHED = "answers", "refused", "preempted", "flushed"
"""A prompt went on where an answer was not stored; a store found no room; transfers for which a
step waited because of a preemption; all transfers for which steps waited."""


class ChunkedGroup(NamedTuple):
    """A group of layers whose blocks go to a tier in chunks."""

    rules: Group
    tokens: int
    """Tokens of a chunk."""
    window: int
    """Tokens that a token reads; 0: all before it."""

    @property
    def slides(self) -> bool:
        """Whether its window moves with every token."""
        return isinstance(self.rules, Sliding)

    @property
    def window_chunks(self) -> int:
        """The chunks that a window touches at least; 0 without a window."""
        return -(-self.window // self.tokens)

    def load_chunks(self, end: int) -> int:
        """Returns the chunks that have to be loaded for a hit of `end` tokens."""
        if not self.slides:
            return self.window_chunks
        padding = -end % self.tokens
        return max(self.window_chunks, -(-(self.window - 1 + padding) // self.tokens))


class _Chunks:
    """The chunks of one group of a request."""

    def __init__(self, group: ChunkedGroup) -> None:
        self.group = group
        self.keys: list[Key] = []
        """Keys of the chunks whose tokens are all known."""
        self.blocks: list[int] = []
        """The table as the tier knows it; 0 where a block is not there, or was reused."""
        self.next = 0
        """First chunk that was not considered for a store yet."""


class Search:
    """Looks up sequences in a tier."""

    def __init__(self, groups: Sequence[ChunkedGroup], tier: CpuTier) -> None:
        self._tier = tier
        numbers = range(len(groups))
        self._windowed = sorted(
            [number for number in numbers if groups[number].window],
            key=lambda number: -groups[number].window_chunks,
        )
        self._order = [number for number in numbers if not groups[number].window] + self._windowed
        self._eagle = {number for number in numbers if groups[number].rules.eagle}

    def longest(self, groups: list[_Chunks], base: int, length: int) -> int | None:
        """Returns how many tokens behind the first `base` tokens of a sequence of `length` tokens
        can be loaded. None: some of these chunks are still being written."""
        # The last token is always computed. Behind full attention alone, `VllmV1._ready` sees to
        # that.
        top, hit, later = length - bool(self._windowed), 0, False
        drops = set(self._eagle)
        due = self._order
        while due:
            looked_up, numbers, due = False, due, []
            for number in numbers:
                top, known = self._reach(groups[number], base, top, number in drops)
                if top == base:
                    return 0
                if known:
                    drops.discard(number)
                later |= not known
                if top - base < hit:
                    # The others found more: they lose their last chunk again when asked again.
                    if number not in self._eagle:
                        drops = set(self._eagle)
                    # What is still being written may lie behind the shorter hit, so all are asked
                    # again.
                    if later:
                        later, due = False, self._order
                    elif looked_up and not due:
                        due = self._windowed
                looked_up |= groups[number].group.window > 0
                hit = top - base
        return None if later else hit

    def _reach(self, chunks: _Chunks, base: int, top: int, drops: bool) -> tuple[int, bool]:
        """Returns up to where the tier can restore the first `top` tokens of one group, `base` if
        it has no chunk behind that; and whether it is known, as some may still be written. With
        `drops`, the last chunk is lost."""
        group, tokens = chunks.group, chunks.group.tokens
        top = min(top, len(chunks.keys) * tokens)
        if top - base < tokens:
            return base, True
        # With `drops`, one chunk more is asked for, which is lost again.
        last = min(-(-top // tokens) + drops, len(chunks.keys))
        keys = chunks.keys[base // tokens : last]
        if group.window:
            needed = group.load_chunks(min(top, (last - drops) * tokens))
            count = self._last_window(keys, group.window_chunks + drops, needed + drops)
        else:
            count = self._leading(keys)
        if count is None:
            return top, False
        end = min(top, tokens * (base // tokens + count - drops))
        return end if end - base >= tokens else base, True

    def _leading(self, keys: list[Key]) -> int | None:
        """Returns the number of leading chunks that are present; None if one is being written."""
        pending, count = False, 0
        for key in keys:
            state = self._tier.look_up(key)
            if state is None:
                break
            pending = pending or state == PENDING
            count += 1
        return None if pending else count

    def _last_window(self, keys: list[Key], window: int, first_window: int) -> int | None:
        """Returns the end of the last window whose chunks are all present, or else of the run at
        the start; None if one of them is being written. Until a chunk is missing, the window has
        `first_window` chunks."""
        run, pending, needed = 0, False, first_window
        for place in range(len(keys) - 1, -1, -1):
            state = self._tier.look_up(keys[place])
            if state is None:
                run, pending, needed = 0, False, window
                continue
            run += 1
            pending = pending or state == PENDING
            if run == needed:
                return None if pending else place + run
        return None if pending else run


class _Known:
    """What the tier knows of a request."""

    def __init__(self, groups: list[ChunkedGroup]) -> None:
        self.access = Access()
        self.groups = [_Chunks(group) for group in groups]
        self.events: set[str] = set()
        """What happened to it (`STORING` and those below)."""
        self.jobs: set[int] = set()
        """Its transfers in flight."""
        self.over = False
        self.stored = False
        """Whether it runs and nothing of it will be offered before it ends."""
        self.junction = 0
        """Tokens of a prefix that only some groups had when it was last looked up; 0: none."""
        self.local = 0
        """Tokens in blocks of the GPU when it was last looked up."""


class _Copy:
    """A transfer in flight."""

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys
        self.held: list[int] = []
        """Blocks that it reads and that its request keeps until it is over."""
        self.fenced: set[int] = set()
        """Blocks that it reads and that may be given to somebody else, who waits for it."""


class Offloading(Connector):
    """Decides what is loaded from a CPU tier, and what is stored there."""

    loads = True

    def __init__(
        self,
        blocks: KVCacheManager,
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
        blocks.tier = tier
        self.blocks_per_chunk = blocks_per_chunk
        self.capacity_blocks = tier.capacity * blocks_per_chunk
        self.prompts_only = offload_prompt_only
        self.happened: Counter[str] = Counter()
        """Event (`STORING` and those below) → how many requests or transfers it happened to."""
        self._unstored: set[Key] = set()
        """The first chunk of each answer that was not stored, as prompts only are."""
        self._sync_budget = self._sync_left = sync_load_budget_bytes
        self._bytes_per_token = bytes_per_token
        self._groups = [
            ChunkedGroup(group, int(group.block_size) * blocks_per_chunk, int(group.window))
            for group in blocks.groups
        ]
        self._tiers = Search(self._groups, tier)
        self._align = _alignment(self._groups)
        self._copies: dict[int, _Copy] = {}
        self._being_loaded: set[Key] = set()
        self._jobs = 0
        self._new_loads: list[Job] = []
        self._touched: set[int] = set()
        """Blocks that this step gave to somebody."""
        self._sparse = any(group.window for group in self._groups)
        self._holders: dict[int, list[tuple[_Chunks, int]]] = {}
        """Block of a group with a window → the tables that it was last put into, and its places."""

    # -- a request waits -------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> Match | None:
        known = self._known_of(request)
        known.stored = False
        # A request that waits has no blocks: what was known of its table is void.
        for chunks in known.groups:
            chunks.blocks.clear()
            chunks.next = 0
        if known.jobs:
            self._happens(OWN_STORES, known)
            return None
        self._extend_keys(request, known)
        known.local = computed
        known.junction = request.junction
        if request.options.skip_reading_prefix_cache:
            return Match()
        found = self._search(request, known)
        if not found:
            return None if found is None else Match()
        below = self._from_below(known, found)
        needed = found * self._bytes_per_token
        # Within the step, the last token must be left to compute.
        within = self._sync_budget > 0 and computed + found < request.length
        within = within and needed <= self._sync_left
        if within:
            self._sync_left -= needed
        return Match(found, asynchronous=not within, below=below)

    def _search(self, request: Request, known: _Known) -> int | None:
        """Returns the tokens of a request in the tier behind its local ones; None: they may change
        before the next step."""
        found = self._tiers.longest(known.groups, known.local, request.length)
        if found is None:
            self._happens(STORING, known)
            return None
        self._note_answers(known, known.local + found)
        # Once the other one has loaded them, they are hits of the GPU; without its prefix cache,
        # each loads its own.
        if found and self._blocks.caching and self._being_loaded:
            end = known.local + found
            for chunks in known.groups:
                group = chunks.group
                wanted = chunks.keys[known.local // group.tokens : -(-end // group.tokens)]
                if group.window:
                    wanted = wanted[-group.load_chunks(end) :]
                if not self._being_loaded.isdisjoint(wanted):
                    self._happens(LOADED_BY_OTHERS, known)
                    return None
        return found

    def _from_below(self, known: _Known, found: int) -> int:
        """Returns how many of the tokens found came from a tier below."""
        chunks = next((each for each in known.groups if not each.group.window), known.groups[0])
        tokens = chunks.group.tokens
        keys = chunks.keys[known.local // tokens : (known.local + found) // tokens]
        return min(found, self.tier.risen(keys) * tokens)

    def _note_answers(self, known: _Known, end: int) -> None:
        """Notes whether a prompt goes on behind its hits with an answer that was not stored."""
        if self._unstored:
            for chunks in known.groups:
                place = end // chunks.group.tokens
                if not self._unstored.isdisjoint(chunks.keys[place : place + 1]):
                    self._happens(ANSWERS, known)

    def update_state_after_alloc(self, request: Request, local: int, match: Match) -> None:
        tables = self._blocks.tables(request)
        for table in tables:
            self._touch(table)
        if not match.tokens:
            return
        known: _Known = request.standing
        end, within, has_key = local + match.tokens, not match.asynchronous, self._blocks.has_key
        keys: list[Key] = []
        targets: list[list[int]] = []
        for chunks, table in zip(known.groups, tables, strict=True):
            group, size = chunks.group, chunks.group.rules.block_size
            first, last = -(-local // size), -(-end // size)
            while first < last and not (table[first] and (within or not has_key(table[first]))):
                first += 1  # It holds what others know, or nothing.
            chunks.next = -(-end // group.tokens)
            if first < last:
                keys += chunks.keys[first // self.blocks_per_chunk : chunks.next]
            targets.append(table[first:last])
        places = self.tier.load(keys, known.access)
        job = Job(self._begin(known, _Copy(keys)), request, targets, [places], True, within)
        self._new_loads.append(job)
        if match.asynchronous:
            self._being_loaded.update(keys)

    # -- a step is composed ----------------------------------------------------------------------

    def build_connector_meta(self, plan: Plan) -> Transfers:
        self._note_tables(plan)
        loads, self._new_loads = self._new_loads, []
        # Before the stores of this step begin, which add to it what must be flushed of them.
        flush = self._flushed(plan, loads)
        stores: list[Job] = []
        k: i64
        for k in range(plan.num_requests):
            moved: Request = plan.places[k]
            known: _Known = moved.standing
            if not known.stored:
                stores += self._stored(moved, moved.computed + plan.scheduled[k], flush)
        for request in plan.finished:
            stores += self._stored(request, _written(request), flush)
        for request in plan.finished:
            # What has ended becomes the most recent once all have offered.
            self._over(request)
        if flush:
            self.happened[FLUSHED] += len(flush)
        self._touched.clear()
        self._sync_left = self._sync_budget
        below = self.tier.copies()
        if not (loads or stores or flush or below):
            return NO_TRANSFERS
        return Transfers(loads, stores, sorted(flush), [], below=below)

    def _flushed(self, plan: Plan, loads: list[Job]) -> set[int]:
        """Returns the transfers in flight for which the step waits: those of preempted requests,
        and those of which it gave blocks away."""
        flush: set[int] = set()
        if plan.preempted:
            for request, _ in plan.preempted:
                if request.standing is not None:
                    flush |= request.standing.jobs
            # As in the engine, which waits for no load that begins with the step.
            flush.difference_update([job.number for job in loads])
            self.happened[PREEMPTED] += len(flush)
        touched = self._touched
        if touched:
            for number, copy in self._copies.items():
                if not touched.isdisjoint(copy.fenced):
                    flush.add(number)
        return flush

    def _note_tables(self, plan: Plan) -> None:
        """Notes the tables of the batch, and forgets blocks that were reused."""
        requests: list[Request] = plan.places
        chunks: _Chunks
        table: Table
        k: i64
        number: i64
        for k in range(plan.num_requests):
            request: Request = requests[k]
            known: _Known = self._known_of(request)
            if request.finish_ns >= 0:
                known.stored = True  # A policy gave it up while the step was composed.
                continue
            if not known.stored:
                self._extend_keys(request, known)
            for number in range(len(known.groups)):
                chunks = known.groups[number]
                if k >= plan.num_continued:
                    chunks.blocks.clear()
                table = request.tables[number]
                first: i64 = len(chunks.blocks)
                if first < len(table.blocks):
                    new = list(table.blocks[first:])
                    self._touch(new)
                    chunks.blocks += new
                    if chunks.group.window:
                        for place, block in enumerate(new, first):
                            self._holders.setdefault(block, []).append((chunks, place))

    def _touch(self, blocks: list[int]) -> None:
        """The step gives blocks to somebody: who held them behind a window has lost them."""
        touched = self._touched
        if self._sparse:
            for block in blocks:
                if block in touched:
                    continue
                for chunks, at in self._holders.pop(block, ()):
                    noted = chunks.next * self.blocks_per_chunk <= at < len(chunks.blocks)
                    if noted and chunks.blocks[at] == block:
                        chunks.blocks[at] = 0
        touched.update(blocks)

    def _stored(self, request: Request, computed: int, flush: set[int]) -> list[Job]:
        """Offers the chunks of a request whose first `computed` tokens are computed. Returns the
        store, if there is one."""
        known: _Known | None = request.standing
        if known is None:
            return []
        ended, tokens = request.finish_ns >= 0, min(computed, request.length)
        if self.prompts_only:
            tokens = min(tokens, request.input_length)
        ends = [(chunks, self._whole(chunks, request, tokens)) for chunks in known.groups]
        stores: list[Job] | None = []
        if ended or any(end > chunks.next for chunks, end in ends):
            stores = self._offer(request, known, ends, flush)
        if stores is None:
            self.happened[REFUSED] += 1
            return []
        known.stored = self.prompts_only and all(
            chunks.next >= request.input_length // chunks.group.tokens for chunks in known.groups
        )
        return stores

    def _offer(
        self, request: Request, known: _Known, ends: list[tuple[_Chunks, int]], flush: set[int]
    ) -> list[Job] | None:
        """Offers the chunks of each group before its end. Returns the store, if there is one; None:
        the tier has no room now."""
        offers = [(chunks, self._offers(chunks, request, end, known)) for chunks, end in ends]
        keys = [chunks.keys[at] for chunks, offered in offers for at in offered]
        places = self.tier.offer(keys, known.access) if keys else {}
        if places is None:
            return None
        for chunks, end in ends:
            chunks.next = max(chunks.next, end)
        return [self._store(request, offers, places, flush)] if places else []

    def _store(
        self,
        request: Request,
        offers: list[tuple[_Chunks, list[int]]],
        places: dict[Key, int],
        flush: set[int],
    ) -> Job:
        """A store of offered chunks begins, of those that have places in the tier."""
        self._unstored.difference_update(places)
        size, copy = self.blocks_per_chunk, _Copy([*places])
        sources: list[list[int]] = []
        for chunks, offered in offers:
            held: list[int] = []
            for at in offered:
                if chunks.keys[at] in places:
                    held += chunks.blocks[at * size : (at + 1) * size]
            blocks = [block for block in held if block]
            sources.append(blocks)
            # Blocks behind a window may be reused while the request runs, others not before its
            # end.
            if chunks.group.window:
                copy.fenced.update(blocks)
            else:
                copy.held += blocks
        number = self._begin(request.standing, copy)
        if request.finish_ns >= 0:
            copy.fenced.update(copy.held)
            if not self._touched.isdisjoint(copy.held):
                flush.add(number)
        return Job(number, request, sources, [[*places.values()]], False)

    def _whole(self, chunks: _Chunks, request: Request, tokens: int) -> int:
        """Returns the number of chunks of a group that could be stored by now."""
        end = tokens // chunks.group.tokens
        if chunks.group.rules.eagle and tokens > request.input_length and request.finish_ns < 0:
            # Its last block may be written again while drafts are verified.
            end -= 1
        return max(0, min(end, len(chunks.blocks) // self.blocks_per_chunk, len(chunks.keys)))

    def _offers(self, chunks: _Chunks, request: Request, end: int, known: _Known) -> list[int]:
        """Returns the chunks of a group that are offered: those that a later load can use, and
        whose blocks are all there."""
        group, size, first = chunks.group, self.blocks_per_chunk, chunks.next
        if not (self._align and group.rules.picks):
            chosen, blocks = range(first, end), chunks.blocks
            if 0 not in blocks[first * size : end * size]:
                return [*chosen]
            return [at for at in chosen if 0 not in blocks[at * size : (at + 1) * size]]
        offered: set[int] = set()
        ended = request.finish_ns >= 0
        mask = self._mask(group, request, known.junction, end, ended)
        if ended:
            first, offered = self._passed_over(chunks, request, end, known, mask)
        found = []
        for at, used in enumerate(self._used(group, first, end, mask), first):
            held = chunks.blocks[at * size : (at + 1) * size]
            wanted = [*compress(held, used)]
            # As the engine tests it: the last block is there, and so is each that a hit could use.
            if at not in offered and held[-1] and wanted and 0 not in wanted:
                found.append(at)
        return found

    def _passed_over(
        self, chunks: _Chunks, request: Request, end: int, known: _Known, mask: Mask
    ) -> tuple[int, set[int]]:
        """Returns the first chunk to offer of a request that is over, and those behind it that were
        offered before. That its end would be one was not known when the last were passed over."""
        group, size, first = chunks.group, self.blocks_per_chunk, chunks.next
        if not (group.slides and mask.horizon) or mask.align % group.rules.block_size:
            return first, set()
        segment = mask.align // group.rules.block_size
        first = min(first, end * size // segment * segment // size)
        prompt = request.input_length // group.tokens
        before = self._mask(group, request, known.junction, prompt)
        passed = self._used(group, first, chunks.next, before)
        return first, {first + place for place, used in enumerate(passed) if any(used)}

    def _used(self, group: ChunkedGroup, first: int, end: int, mask: Mask) -> list[list[bool]]:
        """Returns which blocks of each of the chunks `first .. end - 1` a later request can use."""
        size = self.blocks_per_chunk
        kept = group.rules.keeps(first * size, end * size, mask)
        if kept is None:
            kept = [True] * (end - first) * size
        return [kept[at : at + size] for at in range(0, len(kept), size)]

    def _mask(
        self, group: ChunkedGroup, request: Request, junction: int, end: int, ended: bool = False
    ) -> Mask:
        """Returns where later requests can resume a request that has `end` chunks by now."""
        interval, eagle = self._blocks.layout.retention, group.rules.eagle
        marks = (request.input_length - 1, *([junction] if junction else []))
        prompt = request.input_length // group.tokens
        horizon = end if ended else prompt if end <= prompt else 0
        if interval >= 0 or eagle:
            horizon = 0
        return Mask(self._align, interval, eagle, marks, horizon * self.blocks_per_chunk)

    # -- a request is over, or a transfer --------------------------------------------------------

    def request_finished(self, request: Request) -> bool:
        known: _Known | None = request.standing
        if known is not None:
            self._extend_keys(request, known)
            # Its blocks are given back all the same. Whoever gets them waits for the store.
            for number in known.jobs:
                copy = self._copies[number]
                copy.fenced.update(copy.held)
        return False

    def update_connector_output(self, done: Done) -> Reported:
        for job in done.stores:
            self.tier.stored(self._done(job))
        for job in done.loads:
            keys = self._done(job)
            self.tier.loaded(keys)
            self._being_loaded.difference_update(keys)
        for copy in done.below:
            self.tier.copied(copy)
        # A load within the step has made nobody wait.
        return Reported([job.request for job in done.loads if not job.within_step], [])

    def _done(self, job: Job) -> list[Key]:
        """A transfer is over. Returns its chunks."""
        request, copy = job.request, self._copies.pop(job.number)
        assert request is not None
        known: _Known = request.standing
        known.jobs.remove(job.number)
        if known.over and not known.jobs:
            request.standing = None
        return copy.keys

    @property
    def busy(self) -> bool:
        return len(self._copies) > 0 or self.tier.copying > 0

    @property
    def restless(self) -> bool:
        return self.tier.storage is not None and self.busy

    def remarks(self) -> list[str]:
        return _remarks(self.happened)

    def describe(self) -> dict[str, Any]:
        return {
            **self.tier.describe(),
            "blocks_per_chunk": self.blocks_per_chunk,
            "flushed_jobs": self.happened[FLUSHED],
            "refused_stores": self.happened[REFUSED],
            "waited_for_stores": self.happened[STORING],
            "waited_for_loads_of_others": self.happened[LOADED_BY_OTHERS],
        }

    # -- the connector's own ---------------------------------------------------------------------

    def _over(self, request: Request) -> None:
        """The last stores of a request have been offered."""
        known: _Known | None = request.standing
        if known is not None:
            known.over = True
            if self.prompts_only:
                for chunks in known.groups:
                    first = request.input_length // chunks.group.tokens
                    self._unstored.update(chunks.keys[first : first + 1])
            self.tier.ended(known.access)
            if not known.jobs:
                request.standing = None

    def _happens(self, event: str, known: _Known) -> None:
        """Counts what happens to a request, once."""
        if event not in known.events:
            known.events.add(event)
            self.happened[event] += 1

    def _known_of(self, request: Request) -> _Known:
        known: _Known | None = request.standing
        if known is None:
            known = request.standing = _Known(self._groups)
        return known

    def _extend_keys(self, request: Request, known: _Known) -> None:
        """Notes the keys of chunks whose tokens are known by now."""
        blocks, position = self._blocks, known.access.position
        unit: i64 = blocks.layout.key_tokens
        contents = blocks.number(request)
        length: i64 = len(contents)
        for number, chunks in enumerate(known.groups):
            each: i64 = chunks.group.tokens // unit
            end: i64 = (len(chunks.keys) + 1) * each
            while end <= length:
                key: Key = blocks.content_key(contents[end - 1], number)
                chunks.keys.append(key)
                position[key] = end * unit
                end += each

    def _begin(self, known: _Known, copy: _Copy) -> int:
        """A transfer of a request begins. Returns its number."""
        number = self._jobs
        self._jobs += 1
        self._copies[number] = copy
        known.jobs.add(number)
        return number


def _alignment(groups: list[ChunkedGroup]) -> int:
    """Returns the tokens of which every hit is a multiple; 0 if groups differ in that."""
    sizes = {group.tokens for group in groups if not group.window}
    if not sizes:
        return max(group.tokens for group in groups)
    return sizes.pop() if len(sizes) == 1 else 0


def _written(request: Request) -> int:
    """Returns the tokens of an ended request whose KV will not change any more."""
    if request.reason == ABORTED:
        return request.computed
    return max(request.input_length, request.length - 1)


def _remarks(happened: Mapping[str, int]) -> list[str]:
    """Returns a line for each surprise. `happened`: event → how often it happened in a run."""
    texts = {
        ANSWERS: "{} follow-up prompts found no stored answer: by default the tier stores prompts"
        " only; with offload_prompt_only = false it stores answers, too",
        REFUSED: "{} stores found no room and stored nothing: a step stores all new chunks of a"
        " request or none, and tries again in the next step; raise --kv-offloading-size",
        STORING: "{} requests waited for a hit that was still on its way to CPU memory, even where"
        " computing it would have taken less time",
        LOADED_BY_OTHERS: "{} requests waited until another one had loaded the same prefix, and"
        " then hit it on the GPU",
        OWN_STORES: "{} requests waited after a preemption until their own stores were over",
        PREEMPTED: "{} transfers of preempted requests held up a whole step",
        FLUSHED: "{} stores held up a whole step, because the blocks that they read were reused;"
        " they include those of preempted requests",
    }
    lines = (text.format(f"{happened[name]:,}") for name, text in texts.items() if happened[name])
    return [f"KV offload: {line}" for line in lines]
