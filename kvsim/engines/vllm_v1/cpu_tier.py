"""Chunks of KV in CPU memory, and which of them make room for others.

```
 GPU ──store──► CPU ──write──► storage        as soon as the CPU has it
 GPU ◄──load─── CPU ◄──read─── storage        when a request looks for it; it waits meanwhile
```

A chunk is a few consecutive blocks of one group. It is *pending* while it is written, then ready.
Loads that read it keep it. Only the CPU copies to and from the GPU. vLLM 0.33.0
`v1/kv_offload/cpu/manager.py`, `policies/lru.py`, `policies/arc.py`, and, for a storage below, of
which no log of a real engine was compared, `v1/kv_offload/tiering/manager.py`
(`TieringOffloadingSpec`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

from kvsim.engines.vllm_v1.storage import Below, Storage

Key = Any
"""Identity of a chunk's tokens, of all before them and of its group: `KVCacheManager.content_key`.
Of chunks of the same tokens, that of the first group is smallest. It is an integer of Python, which
compiled code passes on as it is."""

PENDING: Final = -1
READY: Final = 0
"""State of a chunk. It is above `READY` while loads read it."""


class Access:
    """The chunks that one request has offered or read."""

    def __init__(self) -> None:
        self.position: dict[Key, int] = {}
        """Chunk → tokens up to its end."""
        self.seen: dict[Key, None] = {}
        self.inserted: set[Key] = set()
        self.reused: set[Key] = set()
        """Chunks of others that were ready when the request offered or read them."""
        self.missed: set[Key] = set()
        """Chunks that it offered when they were absent."""
        self.rank = 0
        """Its place among all requests, by their first access; 0: it has none yet."""

    def in_order(self) -> list[Key]:
        """Returns the chunks from the head of the sequence to its tail; at one place, in the order
        of the groups."""
        return sorted(self.seen, key=lambda key: (self.position[key], key))


class _Run:
    """The chunks of one rank, in the order of their sequence: its tail makes room first."""

    def __init__(self, rank: int, access: Access) -> None:
        self.rank = rank
        self.chunks: dict[Key, None] = {}
        self.ended = False
        """Whether the request is over. Of chunks at one place, that of the first group makes room
        first until then, and that of the last group from then on."""
        self.sorted = True
        self._position = access.position

    def in_order(self) -> dict[Key, None]:
        """Returns the chunks, those that go first at the end."""
        if not self.sorted:
            chunks = sorted(self.chunks, reverse=not self.ended)
            chunks.sort(key=self._position.__getitem__)
            self.chunks, self.sorted = dict.fromkeys(chunks), True
        return self.chunks


class Lru:
    """Evicts the chunk that was least recently used, the tail of a sequence before its head.

    Recency belongs to requests. Chunks that a request in progress uses share its rank; when it
    ends, they become the most recent ones.
    """

    def __init__(self, capacity: int) -> None:
        self._run_of: dict[Key, _Run] = {}
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        """Rank → its chunks, in order."""
        self._last = 0

    def missed(self, keys: list[Key]) -> None:
        """A request offers these chunks for the first time, and they are absent."""

    def accessed(self, keys: list[Key], access: Access) -> None:
        """A request uses chunks for the first time. They may be absent."""
        run, run_of = self._own(access), self._run_of
        older = []
        for key in keys:
            before = run_of.get(key)
            if before is not None and before.rank < run.rank:
                older.append(key)
        self._move(older, run)

    def inserted(self, keys: list[Key], access: Access) -> None:
        """Chunks will be written for a request."""
        if keys:  # An offer of nothing is no first access.
            self._move(keys, self._own(access))

    def ended(self, access: Access) -> None:
        """A request is over."""
        run = self._own(access)
        del self._runs[run.rank]
        self._last += 1
        run.rank, run.ended, run.sorted = self._last, True, False
        # Some of what it used has the rank of a later request: all of it becomes as recent as its
        # end.
        if len(run.chunks) < len(access.seen):
            self._move([key for key in access.seen if key in self._run_of], run)
        if run.chunks:
            self._runs[run.rank] = run

    def evict(self, number: int, evictable: Callable[[Key], bool]) -> list[Key] | None:
        """Removes and returns `number` chunks; None, and nothing changes, if there are too few."""
        chosen: list[Key] = []
        for run in self._runs.values():
            for key in reversed(run.in_order()):
                if len(chosen) == number:
                    break
                if evictable(key):
                    chosen.append(key)
            if len(chosen) == number:
                break
        else:
            return None
        for key in chosen:
            self._leave(key, self._run_of.pop(key))
        return chosen

    def _own(self, access: Access) -> _Run:
        """The run of a request, which begins with its first access."""
        run = self._runs.get(access.rank)
        if run is None:
            self._last += 1
            access.rank = self._last
            run = self._runs[self._last] = _Run(self._last, access)
        return run

    def _move(self, keys: list[Key], run: _Run) -> None:
        run_of = self._run_of
        for key in keys:
            before = run_of.get(key)
            if before is not run:
                if before is not None:
                    self._leave(key, before)
                run_of[key] = run
                run.chunks[key] = None
                run.sorted = False

    def _leave(self, key: Key, run: _Run) -> None:
        del run.chunks[key]
        if run.ended and not run.chunks:
            del self._runs[run.rank]


class Arc:
    """Adaptive replacement: chunks used once, and chunks that another request used again.

    Ghosts remember what was evicted from either list. An offer that meets a ghost shifts the
    target size of the first list. Megiddo and Modha, FAST 2003, as in vLLM. Methods: as of `Lru`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._again: OrderedDict[Key, None] = OrderedDict()
        self._ghosts: tuple[OrderedDict[Key, None], OrderedDict[Key, None]] = (
            OrderedDict(),
            OrderedDict(),
        )
        """Chunks evicted from `_once`, and from `_again`."""
        self._target = 0.0

    def missed(self, keys: list[Key]) -> None:
        once, again = self._ghosts
        for key in reversed(keys):
            if key in once:
                shift = max(1, len(again) / len(once))
                self._target = min(self._target + shift, self._capacity)
                once.move_to_end(key)
            elif key in again:
                shift = max(1, len(once) / len(again))
                self._target = max(self._target - shift, 0)
                again.move_to_end(key)

    def accessed(self, keys: list[Key], access: Access) -> None:
        """Nothing changes before the request is over."""

    def inserted(self, keys: list[Key], access: Access) -> None:
        for key in keys:
            self._once[key] = None
            for ghosts in self._ghosts:
                ghosts.pop(key, None)

    def ended(self, access: Access) -> None:
        once, again = self._once, self._again
        for key in reversed(access.in_order()):
            for present in (once, again):
                if key in present and key in access.reused:
                    del present[key]
                    again[key] = None
                elif key in present and key in access.inserted:
                    present.move_to_end(key)

    def evict(self, number: int, evictable: Callable[[Key], bool]) -> list[Key] | None:
        once, again = filter(evictable, self._once), filter(evictable, self._again)
        size = len(self._once)
        chosen: list[Key] = []
        for _ in range(number):
            turns = (once, again) if size >= int(self._target) else (again, once)
            # Both filters go on where they stopped, so no chunk is chosen twice.
            key = next(chain(*turns), None)
            if key is None:
                return None
            size -= key in self._once
            chosen.append(key)
        for key in chosen:
            first = key in self._once
            del (self._once if first else self._again)[key]
            self._ghosts[not first][key] = None
        for ghosts in self._ghosts:
            while len(ghosts) > self._capacity:
                ghosts.popitem(last=False)
        return chosen


POLICIES: dict[str, type[Lru | Arc]] = {"lru": Lru, "arc": Arc}
"""Values of `eviction_policy`, beside classes of outsiders with the methods of these."""


class Counter:
    """Counts how often chunks were offered, for as many of them as it may remember."""

    def __init__(self, threshold: int, size: int) -> None:
        self._threshold, self._size = threshold, size
        self._counts: OrderedDict[Key, int] = OrderedDict()

    def offered(self, keys: list[Key]) -> None:
        """Counts an offer. Room for its new chunks is made by those least recently offered."""
        counts = self._counts
        known = [key for key in keys if key in counts]
        for key in known:
            counts[key] += 1
            counts.move_to_end(key)
        others = len(counts) - len(set(known))
        for key in keys:
            if key in counts:
                continue
            if len(counts) >= self._size:
                # Those of this offer stand at the end of the table, and make no room for each
                # other.
                if not others:
                    continue
                counts.popitem(last=False)
                others -= 1
            counts[key] = 1

    def enough(self, key: Key) -> bool:
        """Whether a chunk was offered often enough to be stored."""
        return self._counts.get(key, 0) >= self._threshold


@mypyc_attr(acyclic=True)
class _Held:
    """A chunk in CPU memory."""

    place: i64
    state: i64

    def __init__(self, place: i64) -> None:
        self.place = place
        self.state = PENDING


@mypyc_attr(allow_interpreted_subclasses=True)
class CpuTier:
    """The chunks in CPU memory, perhaps above a storage."""

    def __init__(
        self,
        capacity: int,
        *,
        policy: Callable[[int], Any] = Lru,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        storage: Storage | None = None,
    ) -> None:
        """`capacity`: number of chunks. `policy` makes of it what decides who makes room.
        `store_threshold`: number of offers from which on a chunk is stored, counted for
        `max_tracker_size` chunks."""
        self.capacity = capacity
        self.storage = storage
        self._policy = policy(capacity)
        self._counter = Counter(store_threshold, max_tracker_size) if store_threshold > 1 else None
        self._held: dict[Key, _Held] = {}
        self._fresh = 0
        """Places that were ever used; those above are free."""
        self._returned: list[int] = []
        """Free places that were used before; the last one is used first."""
        self.pending = self.evictable = 0
        """Number of chunks that are being written, and that can be evicted."""
        self.copying = 0
        """Number of chunks on their way to or from the storage."""
        self._wanted: list[Key] = []
        """Chunks of the storage that a request looks for, to be read with this step."""
        self._reading: dict[Key, Access] = {}
        self._risen: set[Key] = set()
        """Chunks that were read from the storage and not loaded since."""
        self._stored: list[Key] = []
        """Chunks to be written to the storage with this step."""
        self._moved = {"written_chunks": 0, "read_chunks": 0}

    def look_up(self, key: Key) -> int | None:
        """Returns the state of a chunk that a request looks for; None if it is absent. What the
        storage has is read first."""
        held = self._held.get(key)
        if held is not None:
            return held.state
        if self.storage is None or not self.storage.holds(key):
            return None
        access = Access()
        access.position[key], access.seen[key] = 0, None
        # It takes no room from chunks that come or came the same way and were not loaded yet.
        if self._inserted([key], access, self._risen) is None:
            return None
        self._wanted.append(key)
        self._reading[key] = access
        self.copying += 1
        return PENDING

    @property
    def free(self) -> int:
        """Number of chunks that fit without an eviction."""
        return self.capacity - self._fresh + len(self._returned)

    def offer(self, keys: list[Key], access: Access) -> dict[Key, int] | None:
        """A request offers chunks. Returns the places to which those must be written that are
        absent. None: there is no room for all of them, so none is stored."""
        counter, chunks = self._counter, self._held
        if counter is not None:
            counter.offered(keys)
        wanted: list[Key] = []
        ready: list[Key] = []
        used: list[Key] = []
        for key in keys:
            held = chunks.get(key)
            if held is None:
                if counter is None or counter.enough(key):
                    wanted.append(key)
                    used.append(key)
            elif held.state >= READY:
                ready.append(key)
                used.append(key)
        new = [key for key in wanted if key not in access.missed]
        if new:
            self._policy.missed(new)
            access.missed.update(new)
        self._accessed(used, access, ready)
        return self._inserted(wanted, access, set(ready))

    def stored(self, keys: list[Key]) -> None:
        """Chunks were written."""
        self._become_ready(keys)
        storage = self.storage
        if storage is not None:
            self._risen.difference_update(keys)
            new = [key for key in keys if not storage.holds(key)]
            # They stay until they are written there, too.
            self._pin(new)
            self._stored += new

    def load(self, keys: list[Key], access: Access) -> list[int]:
        """A request begins to read chunks. Returns their places."""
        self._risen.difference_update(keys)
        self._pin(keys)
        self._accessed(keys, access, keys)
        return [self._held[key].place for key in keys]

    def loaded(self, keys: list[Key]) -> None:
        """Chunks have been read."""
        for key in keys:
            held = self._held[key]
            held.state -= 1
            self.evictable += held.state == READY

    def ended(self, access: Access) -> None:
        """A request is over."""
        self._policy.ended(access)

    def risen(self, keys: list[Key]) -> int:
        """Returns how many of these chunks come from the storage."""
        return len(self._risen.intersection(keys)) if self._risen else 0

    # -- copies to and from the storage ----------------------------------------------------------

    def copies(self) -> list[Below]:
        """Returns the copies that begin with this step."""
        storage = self.storage
        if storage is None:
            return []
        found = []
        wanted, self._wanted = self._wanted, []
        if wanted:
            found.append(Below(wanted, True, storage.read_ns(len(wanted))))
            self._moved["read_chunks"] += len(wanted)
        stored, self._stored = self._stored, []
        if stored:
            found.append(Below(stored, False, storage.write_ns(len(stored))))
            self._moved["written_chunks"] += len(stored)
            self.copying += len(stored)
        return found

    def copied(self, copy: Below) -> None:
        """A copy is over."""
        self.copying -= len(copy.keys)
        if copy.upward:
            self._become_ready(copy.keys)
            self._risen.update(copy.keys)
            for key in copy.keys:
                self.ended(self._reading.pop(key))
        elif self.storage is not None:
            self.storage.keep(copy.keys)
            self.loaded(copy.keys)

    # -- for those who look on -------------------------------------------------------------------

    def contents(self) -> tuple[Iterable[int], Iterable[int]]:
        """Returns the places of its chunks, and their states
        (`kvsim.results.blockmap.Tier`)."""
        chunks = self._held.values()
        return [held.place for held in chunks], [held.state for held in chunks]

    def describe(self) -> dict[str, Any]:
        """Returns its figures in plain values."""
        figures: dict[str, Any] = {"capacity_chunks": self.capacity}
        if self.storage is None:
            return figures
        return {**figures, "storage": type(self.storage).__name__, **self._moved}

    def _accessed(self, keys: list[Key], access: Access, reused: Iterable[Key]) -> None:
        new = [key for key in keys if key not in access.seen]
        if new:
            for key in new:
                access.seen[key] = None
            self._policy.accessed(new, access)
        access.reused.update(key for key in reused if key not in access.inserted)

    def _inserted(
        self, wanted: list[Key], access: Access, spared: set[Key]
    ) -> dict[Key, int] | None:
        """Makes room for chunks, without eviction of those that are spared. Returns their places;
        None if there is too little room."""
        chunks, lacking = self._held, len(wanted) - self.free
        if lacking > 0:
            evicted = None
            if lacking <= self.evictable:
                evicted = self._policy.evict(
                    lacking, lambda key: chunks[key].state == READY and key not in spared
                )
            if evicted is None:
                return None
            self.evictable -= len(evicted)
            for key in evicted:
                self._returned.append(chunks.pop(key).place)
        places: dict[Key, int] = {}
        for key in wanted:
            if self._fresh < self.capacity:
                place = self._fresh
                self._fresh += 1
            else:
                place = self._returned.pop()
            places[key] = place
            chunks[key] = _Held(place)
        self._policy.inserted(wanted, access)
        self.pending += len(wanted)
        access.inserted.update(wanted)
        return places

    def _become_ready(self, keys: list[Key]) -> None:
        for key in keys:
            self._held[key].state = READY
        self.pending -= len(keys)
        self.evictable += len(keys)

    def _pin(self, keys: list[Key]) -> None:
        """Chunks are read, and stay meanwhile."""
        for key in keys:
            held = self._held[key]
            self.evictable -= held.state == READY
            held.state += 1
