"""Dynamo's KV router (`ai-dynamo-runtime` 1.6.1, `SelectionService`).

A worker's cost is the prompt tokens that it has to compute, in blocks, less what its caches save,
plus the blocks that its requests hold. The least cost wins.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvsim.fleet.routers.router import Asked, Choice, Keys, Router, delay_ns

TIERS = ("device", "host", "disk")


class Tier:
    """The blocks of one tier of one worker: each behind another, or at the start of a prompt."""

    __slots__ = ("_behind", "_parents")

    def __init__(self) -> None:
        self._parents: dict[Hashable, Hashable | None] = {}
        self._behind: dict[Hashable, set[Hashable]] = {}
        """Block → the blocks that follow it."""

    def __len__(self) -> int:
        return len(self._parents)

    def stored(self, parent: Hashable | None, keys: Keys) -> None:
        """Adds blocks behind a known one; behind an unknown one they are dropped. A block that is
        there already stays as it is, and is not counted twice."""
        # The real index drops the whole report, too.
        if parent is not None and parent not in self._parents:
            return
        for key in keys:
            if key not in self._parents:
                self._parents[key] = parent
                if parent is not None:
                    self._behind.setdefault(parent, set()).add(key)
            parent = key

    def removed(self, keys: Keys) -> None:
        """Removes known blocks, and all that follow them."""
        going = [key for key in keys if key in self._parents]
        # Unlinked first, so that no block that stays names one that is gone.
        for key in going:
            if (parent := self._parents[key]) is not None:
                self._behind[parent].discard(key)
        while going:
            key = going.pop()
            if key in self._parents:
                del self._parents[key]
                going += self._behind.pop(key, ())

    def run(self, keys: Keys, start: int = 0) -> int:
        """Returns how many blocks of a prompt, from `start` on, are here without a gap."""
        # A block is here only with all before it in this tier, so halving finds the last one.
        low, high = start, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._parents:
                low = middle + 1
            else:
                high = middle
        return low - start


@dataclass(slots=True, eq=False)
class Reservation:
    """A request that was sent and has not ended."""

    worker: int
    keys: Keys
    new_tokens: int
    """Prompt tokens to compute, as seen when it was sent; 0 from the first token on."""
    output_weights: list[float] = field(default_factory=list)
    """What each block of its output counts for."""


class Books:
    """Reservations of one worker."""

    def __init__(self) -> None:
        self.requests = 0
        self.prefill_tokens = 0
        """Prompt tokens of requests without a first token."""
        self._holders: dict[Hashable, int] = {}
        """Prompt block → reservations with it."""
        self._weights: dict[Hashable, float] = {}
        """Prompt block → what it counts for, if less than 1."""
        self._blocks = 0.0

    @property
    def blocks(self) -> int:
        """Distinct prompt blocks and output blocks by weight, rounded to nearest, halves up."""
        return math.floor(self._blocks + 0.5)

    def new_blocks(self, keys: Keys) -> int:
        """Returns how many blocks of a prompt no reservation has."""
        return sum(key not in self._holders for key in keys)

    def reserve(self, reservation: Reservation) -> None:
        """A request was sent."""
        self.requests += 1
        self.prefill_tokens += reservation.new_tokens
        for key in reservation.keys:
            held = self._holders.get(key, 0)
            self._holders[key] = held + 1
            if not held:
                self._blocks += 1

    def first_token(self, reservation: Reservation) -> None:
        """Its prompt is computed."""
        self.prefill_tokens -= reservation.new_tokens
        reservation.new_tokens = 0

    def output_block(self, reservation: Reservation, weight: float | None) -> None:
        """It filled another block. With a weight, all its output blocks and those prompt blocks
        that no other request has count for that much from now on."""
        reservation.output_weights.append(1.0)
        self._blocks += 1
        if weight is None:
            return
        for number, old in enumerate(reservation.output_weights):
            self._blocks += weight - old
            reservation.output_weights[number] = weight
        for key in reservation.keys:
            if self._holders[key] == 1:
                self._blocks += weight - self._weights.get(key, 1.0)
                self._weights[key] = weight

    def free(self, reservation: Reservation) -> None:
        """It is over."""
        self.requests -= 1
        # It may end before its first token, and its prompt counted until now.
        self.first_token(reservation)
        self._blocks -= sum(reservation.output_weights)
        for key in reservation.keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._blocks -= self._weights.pop(key, 1.0)


class Standing(NamedTuple):
    """A worker, as a request finds it."""

    worker: int
    overlap: tuple[int, int, int]
    """Blocks of the prompt in each tier; each goes on where the one before it ends."""
    prefill_tokens: int
    new_tokens: int
    """Prompt tokens that the request would add."""
    decode_blocks: int
    """Blocks of all requests, with those that it would add."""
    requests: int
    cost: float


class DynamoKv(Router):
    """Dynamo's KV router as the front end of workers; arguments have its names and defaults."""

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        block_size: int = 16,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        host_cache_hit_weight: float = 0.75,
        disk_cache_hit_weight: float = 0.25,
        prefill_load_scale: float = 1.0,
        decode_active_request_weight: float = 0.0,
        temperature: float = 0.0,
        use_kv_events: bool = True,
        kv_event_delay_ms: float = 0.0,
        ttl_secs: float = 120.0,
        track_prefill_tokens: bool = True,
    ) -> None:
        """Without KV events, a prompt counts as cached for `ttl_secs` after it was sent. With them,
        `kv_event_delay_ms` is the time that they take from the engine's step to the router."""
        super().__init__(workers, seed)
        self.block_size = block_size
        self._credit, self._decay = overlap_score_credit, overlap_score_credit_decay
        self._weights = (host_cache_hit_weight, disk_cache_hit_weight)
        self._scale, self._request_weight = prefill_load_scale, decode_active_request_weight
        self._temperature = temperature
        self._ttl_ns = None if use_kv_events else round(ttl_secs * 1e9)
        self.heeds_events = use_kv_events
        self.event_delay_ns = delay_ns(kv_event_delay_ms)
        self._tracks = track_prefill_tokens
        self.caches = [(Tier(), Tier(), Tier()) for _ in self.workers]
        self.books = [Books() for _ in self.workers]
        self._reservations: dict[str, Reservation] = {}
        self._sent: dict[tuple[int, Hashable], int] = {}
        """Worker and block → when the router last sent it there; oldest first."""

    # -- choosing --------------------------------------------------------------------------------

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        self._forget(now_ns)
        standings = self.weigh(asked, alive)
        least = min(standing.cost for standing in standings)
        if self._temperature > 0:
            spread = max(standing.cost for standing in standings) - least
            # All equal: any scale gives equal chances.
            scale = spread * self._temperature or 1.0
            weights = [math.exp((least - standing.cost) / scale) for standing in standings]
            return Choice([standing.worker for standing in standings], weights, "temperature")
        return Choice([one.worker for one in standings if one.cost == least], why="cost")

    def weigh(self, asked: Asked, alive: Sequence[int]) -> list[Standing]:
        """Returns how each worker stands to a request."""
        keys = asked.content.keys(self.block_size)
        idlest = min(self.books[worker].prefill_tokens for worker in alive)
        return [self._standing(asked, keys, worker, idlest) for worker in alive]

    def _standing(self, asked: Asked, keys: Keys, worker: int, idlest_tokens: int) -> Standing:
        books = self.books[worker]
        overlap = self._overlap(worker, keys)
        new_tokens = self._new_tokens(asked.input_length, overlap) if self._tracks else 0
        decode = books.blocks + books.new_blocks(keys)
        credit = self._credited(asked, overlap, books.prefill_tokens - idlest_tokens)
        if self._tracks:
            # A part of a block counts here, and not in `decode`, which counts whole blocks.
            raw = (books.prefill_tokens + asked.input_length) / self.block_size
            cost = self._scale * max(0.0, raw - credit) + decode
        else:
            cost = max(0.0, decode - credit) if self._credit > 0 else float(decode)
        cost += self._request_weight * books.requests
        return Standing(
            worker, overlap, books.prefill_tokens, new_tokens, decode, books.requests, cost
        )

    def expected(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Mapping[int, int] | None:
        self._forget(now_ns)
        keys, size = asked.content.keys(self.block_size), self.block_size
        return {worker: size * sum(self._overlap(worker, keys)) for worker in alive}

    def _overlap(self, worker: int, keys: Keys) -> tuple[int, int, int]:
        device, host, disk = self.caches[worker]
        on_device = device.run(keys)
        on_host = host.run(keys, on_device)
        return on_device, on_host, disk.run(keys, on_device + on_host)

    def _credited(self, asked: Asked, overlap: tuple[int, int, int], ahead_tokens: int) -> float:
        """Blocks that caches save. With decay, blocks on the device save the less the more prompt
        tokens the worker has ahead of the idlest one."""
        credit = self._credit
        if credit == 0:
            return 0.0
        if self._decay > 0:
            blocks = math.ceil(asked.input_length / self.block_size)
            credit *= 1 / (1 + self._decay * (ahead_tokens / self.block_size) / blocks)
        device, host, disk = overlap
        on_host, on_disk = self._weights
        return credit * device + on_host * host + on_disk * disk

    def _new_tokens(self, input_length: int, overlap: tuple[int, int, int]) -> int:
        device, host, disk = overlap
        on_host, on_disk = self._weights
        saved = device + on_host * host + on_disk * disk
        return max(0, input_length - round(saved * self.block_size))

    # -- news ------------------------------------------------------------------------------------

    def sent(self, asked: Asked, worker: int, now_ns: int) -> None:
        keys = asked.content.keys(self.block_size)
        new_tokens = 0
        if self._tracks:
            new_tokens = self._new_tokens(asked.input_length, self._overlap(worker, keys))
        reservation = Reservation(worker, keys, new_tokens)
        self._reservations[asked.id] = reservation
        self.books[worker].reserve(reservation)
        if self._ttl_ns is not None:
            self.caches[worker][0].stored(None, keys)
            for key in keys:
                # Sent again, it goes to the end of the table: the oldest stand first (`_forget`).
                self._sent.pop((worker, key), None)
                self._sent[worker, key] = now_ns

    def _forget(self, now_ns: int) -> None:
        """Drops blocks that were sent too long ago to count on."""
        if self._ttl_ns is None:
            return
        while self._sent:
            (worker, key), when_ns = next(iter(self._sent.items()))
            if when_ns + self._ttl_ns > now_ns:
                break
            del self._sent[worker, key]
            self.caches[worker][0].removed([key])

    def first_token(self, id: str) -> None:
        if reservation := self._reservations.get(id):
            self.books[reservation.worker].first_token(reservation)

    def output_block(self, id: str, decay: float | None = None) -> None:
        if reservation := self._reservations.get(id):
            self.books[reservation.worker].output_block(reservation, decay)

    def ended(self, id: str) -> None:
        if reservation := self._reservations.pop(id, None):
            self.books[reservation.worker].free(reservation)

    def stored(
        self, worker: int, parent: Hashable | None, keys: Keys, tier: str = "device"
    ) -> None:
        self.caches[worker][TIERS.index(tier)].stored(parent, keys)

    def removed(self, worker: int, keys: Keys, tier: str = "device") -> None:
        self.caches[worker][TIERS.index(tier)].removed(keys)

    def cleared(self, worker: int) -> None:
        self.caches[worker] = Tier(), Tier(), Tier()

    def worker_lost(self, worker: int) -> None:
        self.cleared(worker)
        self.books[worker] = Books()
        self._reservations = {
            id: each for id, each in self._reservations.items() if each.worker != worker
        }
