"""The simple tier in CPU memory of vLLM V1: `SimpleCPUOffloadConnector`.

The tier is a second pool of blocks, with the prefix cache of the first. *Eager* copies a block once
its tokens are confirmed; *lazy* copies what is about to be evicted. Blocks of the GPU are held
while they are copied. vLLM 0.33.0 `v1/simple_kv_offload/manager.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, count, dropwhile, islice
from typing import Any, NamedTuple

from kvsim.core.plan import Plan
from kvsim.core.pool import Pool
from kvsim.core.request import Request, Table
from kvsim.engines.vllm_v1.connector import Connector, Done, Job, Match, Reported, Transfers
from kvsim.engines.vllm_v1.cpu_tier import PENDING, READY
from kvsim.engines.vllm_v1.groups import Chunked, Full, Group, Sliding
from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.machine.hardware import GIB


class Copy(NamedTuple):
    """Blocks that are copied."""

    gpu: list[int]
    cpu: list[int]
    request: Request | None = None
    """Who waits for it."""


class _Stored:
    """What the tier has considered of a request."""

    __slots__ = ("blocks", "counts")

    def __init__(self, groups: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        """Its tables as the tier knows them."""
        self.counts = [0] * groups
        """Blocks of each group that were stored or passed over."""

    def note(self, tables: list[Table]) -> None:
        """Notes what was added to the tables of the request."""
        for known, table in zip(self.blocks, tables, strict=False):
            if len(known) < len(table.blocks):
                known += list(table.blocks[len(known) :])


class SimpleOffload(Connector):
    """Decides what is copied to and from a second pool in CPU memory.

    Without a prefix cache on the GPU, it does nothing.
    """

    loads = True
    stores_at_once = True

    def __init__(
        self,
        *,
        blocks: KVCacheManager,
        block_bytes: int,
        world_size: int,
        max_num_batched_tokens: int,
        cpu_bytes_to_use: int = 8 * GIB,
        cpu_bytes_to_use_per_rank: int | None = None,
        num_cpu_blocks: int | None = None,
        lazy_offload: bool = False,
    ) -> None:
        """Raises `ValueError` for a tier without room, and where no group has full attention."""
        room = cpu_bytes_to_use
        if cpu_bytes_to_use_per_rank is not None:
            room = cpu_bytes_to_use_per_rank * world_size
        most = room // block_bytes
        number = most if num_cpu_blocks is None else num_cpu_blocks
        if not 1 < number <= most:
            raise ValueError(
                f"num_cpu_blocks: {number} blocks, of which one is never used; the memory has room"
                f" for {most}"
            )
        if not any(isinstance(group, Full) for group in blocks.groups):
            raise ValueError("SimpleCPUOffloadConnector needs a group of full attention")
        self._blocks = blocks
        size = number - 1 if blocks.caching else 0
        self.cpu = Pool(size, None, len(blocks.groups))
        self.capacity = self.capacity_blocks = size
        blocks.tier = self
        self._preemptions = 0
        """Number of steps that waited for all transfers because of a preemption."""
        self._lazy = lazy_offload
        # Twice what a step may take, as the engine reckons.
        self._ahead = 2 * sum(
            -(-group.window // group.block_size) + 1
            if isinstance(group, Sliding)
            else -(-max_num_batched_tokens // group.block_size)
            for group in blocks.groups
        )
        """Blocks at the head of the free list that are looked at."""
        self._cursor = 0
        """Block of the free list that was looked at last; 0: none."""
        self._found: dict[Request, list[list[int]]] = {}
        """Blocks of the tier that were hit, of each group, held until the GPU has blocks for them.
        """
        self._stored: dict[Request, _Stored] = {}
        self._copied: set[int] = set()
        """GPU blocks that an eager store reads."""
        self._waiting: list[Copy] = []
        """Stores of requests that have ended since the last step."""
        self._new_loads: list[Copy] = []
        self._loading: dict[int, list[Copy]] = {}
        self._storing: dict[int, list[Copy]] = {}
        """Number of a job → what it copies."""
        self._load_numbers, self._store_numbers = count(), count()

    # -- a request waits -------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> Match:
        self._forget(request)
        blocks = self._blocks
        if request.options.skip_reading_prefix_cache or not blocks.caching:
            return Match()
        units = [group.window for group in blocks.groups if isinstance(group, Chunked)]
        # The tier counts blocks and windows from there, so it has to be the beginning of one in
        # every group.
        if any(computed % unit for unit in (blocks.layout.align, *units)):
            return Match()
        tokens, found = blocks.find_behind(request, computed, self.cpu)
        if not tokens:
            return Match()
        self.cpu.hit(_there(found))
        self._found[request] = found
        return Match(tokens, asynchronous=True)

    def update_state_after_alloc(self, request: Request, local: int, match: Match) -> None:
        blocks = self._blocks
        if not self._lazy and blocks.caching:
            self._stored.setdefault(request, _Stored(len(blocks.groups)))
        if not match.tokens:
            return
        targets: list[int] = []
        sources: list[int] = []
        tables = blocks.tables(request)
        for group, found, table in zip(blocks.groups, self._found[request], tables, strict=True):
            first = local // group.block_size
            for place, block in enumerate(found[: -(-match.tokens // group.block_size)], first):
                if block:
                    targets.append(table[place])
                    sources.append(block)
        # Held for the copy before the look-up lets go, so that they are never free in between.
        self.cpu.hit(sources)
        self._forget(request)
        blocks.pin(targets)
        self._new_loads.append(Copy(targets, sources, request))

    # -- a step is composed ----------------------------------------------------------------------

    def build_connector_meta(self, plan: Plan) -> Transfers:
        copies = self._reserved(self._evicted_next()) if self._lazy else self._confirmed(plan)
        stores = _begun(copies + self._waiting, self._storing, self._store_numbers)
        loads = _begun(self._new_loads, self._loading, self._load_numbers)
        self._waiting, self._new_loads = [], []
        waits = self._blocks.caching and bool(plan.preempted)
        self._preemptions += waits
        return Transfers(loads, stores, [], [], flush_all=waits)

    def _confirmed(self, plan: Plan) -> list[Copy]:
        """Returns the stores of blocks whose tokens were computed by earlier steps."""
        groups = len(self._blocks.groups)
        for request, _ in plan.preempted:
            if request in self._stored:
                self._stored[request] = _Stored(groups)
        # A connector hears of new requests first, then of those that come back, then of the others.
        admitted = plan.requests[plan.num_continued :]
        admitted.sort(key=lambda request: request.num_preemptions > 0)
        for request in admitted:
            if request in self._stored:
                self._stored[request].blocks = [[] for _ in range(groups)]
        copies: list[Copy] = []
        for request in admitted + plan.requests[: plan.num_continued]:
            stored = self._stored.get(request)
            if stored is not None:
                stored.note(request.tables)
                copies += self._reserved(self._selected(request, stored, stored.blocks))
        return copies

    def _selected(self, request: Request, stored: _Stored, tables: list[list[int]]) -> list[int]:
        """Returns the blocks of a request that can be copied now and are not in the tier yet."""
        blocks, room = self._blocks, self.cpu.free
        confirmed = request.computed - request.placeholders
        chosen: list[int] = []
        for group, table in zip(blocks.groups, tables, strict=True):
            if len(chosen) >= room:
                break
            number = int(group.number)
            tokens = blocks.registered_tokens(number, confirmed)
            for place in range(stored.counts[number], min(len(table), tokens // group.block_size)):
                block = table[place] or self._behind_window(request, group, place)
                if self._is_new(block):
                    if len(chosen) >= room:
                        break
                    chosen.append(block)
                stored.counts[number] += 1
        return chosen

    def _behind_window(self, request: Request, group: Group, place: int) -> int:
        """Returns the block that left the window of a request at a place of its table and may still
        be among the free blocks; 0: there is none."""
        keys, end = self._blocks.keys(request), (place + 1) * group.units
        return self._blocks.find_block(keys[end - 1], group.number) if end <= len(keys) else 0

    def _is_new(self, block: int) -> bool:
        """Whether a block has content that the tier lacks."""
        content = self._blocks.gpu.content(block)
        return content != 0 and block not in self._copied and not self.cpu.find(content)

    def _evicted_next(self) -> list[int]:
        """Returns the blocks with new content that come next in the free list."""
        gpu, room = self._blocks.gpu, self.cpu.free
        if self._cursor < gpu.fresh and gpu.refs(self._cursor):
            # It was taken meanwhile, and its place in the list is lost.
            self._cursor = 0
        rest = gpu.free_list()
        if self._cursor:
            rest = islice(dropwhile(lambda block: block != self._cursor, rest), 1, None)
        chosen: list[int] = []
        for block in islice(rest, self._ahead):
            if len(chosen) >= room:
                break
            self._cursor = block
            content = gpu.content(block) if block < gpu.fresh else 0
            if content and not self.cpu.find(content):
                chosen.append(block)
        return chosen

    def _reserved(self, chosen: list[int]) -> list[Copy]:
        """Holds GPU blocks for a store, if there are any, and takes CPU blocks for them."""
        if not chosen:
            return []
        self._blocks.pin(chosen)
        if not self._lazy:
            self._copied.update(chosen)
        return [Copy(chosen, self.cpu.take_many(len(chosen)))]

    # -- a request is over, or a transfer --------------------------------------------------------

    def request_finished(self, request: Request) -> bool:
        self._forget(request)
        stored = self._stored.pop(request, None)
        if stored is not None:
            tables = [
                table[: -(-request.computed // group.block_size)]
                for group, table in zip(
                    self._blocks.groups, self._blocks.tables(request), strict=True
                )
            ]
            self._waiting += self._reserved(self._selected(request, stored, tables))
        return False

    def update_connector_output(self, done: Done) -> Reported:
        loads = [copy for job in done.loads for copy in self._loading.pop(job.number)]
        stores = [copy for job in done.stores for copy in self._storing.pop(job.number)]
        pool = self._blocks.gpu
        for copy in stores:
            self._copied.difference_update(copy.gpu)
            for source, target in zip(copy.gpu, copy.cpu, strict=True):
                self.cpu.label(target, pool.content(source), pool.end_of(source))
        # Not before the labels: a block without content would be reused first.
        for copy in loads + stores:
            self.cpu.drop(copy.cpu)
            self._blocks.unpin(copy.gpu)
        return Reported([copy.request for copy in loads if copy.request is not None], [])

    @property
    def busy(self) -> bool:
        # Loads need no mention: their requests wait.
        return bool(self._storing or self._waiting)

    def contents(self) -> tuple[Iterable[int], Iterable[int]]:
        """Returns the places of its blocks, and their states
        (`kvsim.results.blockmap.Tier`)."""
        loads = chain(*self._loading.values())
        stores = chain(*self._storing.values(), self._waiting)
        state = dict.fromkeys((*self.cpu.cached_blocks(), *self.cpu.references), READY)
        state |= Counter(block for copy in loads for block in copy.cpu)
        state |= dict.fromkeys((block for copy in stores for block in copy.cpu), PENDING)
        return [block - self.cpu.first for block in state], state.values()

    def remarks(self) -> list[str]:
        if not self._preemptions:
            return []
        steps = f"{self._preemptions:,} steps with a preemption"
        return [f"SimpleCPUOffloadConnector: {steps} waited for all copies under way"]

    def describe(self) -> dict[str, Any]:
        return {"capacity_blocks": self.capacity_blocks, "lazy_offload": self._lazy}

    # -- the connector's own ---------------------------------------------------------------------

    def _forget(self, request: Request) -> None:
        """Lets go of the blocks of the tier that were found for a request."""
        self.cpu.drop(_there(self._found.pop(request, [])))


def _begun(
    copies: list[Copy], under_way: dict[int, list[Copy]], numbers: Iterator[int]
) -> list[Job]:
    """Begins copies, as one job if there is anything to copy."""
    if not copies:
        return []
    number = next(numbers)
    under_way[number] = copies
    gpu = [block for copy in copies for block in copy.gpu]
    cpu = [block for copy in copies for block in copy.cpu]
    return [Job(number, None, [gpu], [cpu])]


def _there(found: list[list[int]]) -> list[int]:
    return [block for table in found for block in table if block]
