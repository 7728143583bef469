"""What each worker has to do, as the Dynamo router counts it (1.6.1, `lib/kv-router`)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


class Reservation:
    """A request that was sent and has not ended."""

    __slots__ = ("keys", "new_tokens", "output_weights", "worker")

    def __init__(self, worker: int, keys: Sequence[Hashable], new_tokens: int) -> None:
        self.worker = worker
        self.keys = keys
        self.new_tokens = new_tokens
        """Prompt tokens to compute, as seen when it was sent; 0 from the first token on."""
        self.output_weights: list[float] = []
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

    def new_blocks(self, keys: Sequence[Hashable]) -> int:
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
        self.first_token(reservation)
        self._blocks -= sum(reservation.output_weights)
        for key in reservation.keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._blocks -= self._weights.pop(key, 1.0)
