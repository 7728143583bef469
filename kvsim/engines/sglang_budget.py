"""What one prefill of SGLang 0.5.23 may take on (`managers/schedule_policy.py`, `PrefillAdder`)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from kvsim.engine.request import Request
from kvsim.engines.sglang_blocks import SglangTables

Life = tuple[float, int]
"""Tokens that a request is expected to generate still, and tokens that its end sets free."""


class State(Enum):
    """Whether a prefill can take on more."""

    CONTINUE = "yes"
    NO_TOKEN = "memory is used up, reservations included"
    OTHER = "another limit is reached"


class Environment(NamedTuple):
    """What SGLang takes from environment variables: `SGLANG_` and these names in capitals, with
    `_ESTIMATION` behind the clip and `IN_BATCH_PREFIX_CACHING_` for `IN_BATCH_`."""

    init_new_token_ratio: float = 0.7
    """Share of what clients announce that they are expected to generate, at first."""
    min_new_token_ratio_factor: float = 0.14
    """What is left of it, at least."""
    new_token_ratio_decay_steps: float = 600
    """Decode steps in which it falls to that."""
    retract_decode_steps: float = 20
    """Steps that those who stay after a retraction are expected to have memory for."""
    clip_max_new_tokens: float = 4096
    """The most tokens that anybody is expected to generate."""
    in_batch_check_threshold: float = 32
    """Cached tokens up to which a waiting request is compared with those before it."""
    in_batch_deprioritize_threshold: float = 32
    """Tokens that it must share with one of them to be looked at after all others."""


class NewTokenRatio:
    """Share of what clients announced that requests are expected to generate
    (`managers/scheduler_components/new_token_ratio_tracker.py`)."""

    def __init__(self, environment: Environment, conservativeness: float) -> None:
        """It falls from its first value to its least one in a number of decode steps;
        `conservativeness` multiplies both."""
        self._first = first = min(environment.init_new_token_ratio * conservativeness, 1)
        self._least = min(first * environment.min_new_token_ratio_factor, 1)
        self._decay = (first - self._least) / environment.new_token_ratio_decay_steps
        self.now = first
        """The ratio in this step."""

    def decay(self) -> None:
        """A decode step had memory for everybody."""
        self.now = max(self.now - self._decay, self._least)

    def estimate(self, generated_tokens: int, limits_tokens: list[int]) -> None:
        """Requests were retracted: what those that are left have generated counts from now on."""
        if limits_tokens:
            self.now = min(1, generated_tokens / (sum(limits_tokens) + 1))
        else:
            self.now = 0.0

    def reset(self) -> None:
        """The engine was idle."""
        self.now = self._first


class Budget:
    """Tokens of memory and of computation that are left."""

    def __init__(
        self,
        blocks: SglangTables,
        riders: int,
        expected_tokens: float,
        max_prefill_tokens: int,
        chunk_tokens: int | None,
    ) -> None:
        """`riders`: decodes that share the step; `expected_tokens`: what the running requests will
        generate; `chunk_tokens`: the most that a step computes of prompts, None: no limit."""
        self._blocks = blocks
        self._reserved: float = riders + expected_tokens
        self._used = riders
        self.prefill_tokens = max_prefill_tokens - riders
        self.chunk_tokens = None if chunk_tokens is None else chunk_tokens - riders

    @property
    def left(self) -> float:
        """Memory that nobody has or is expected to need."""
        return self._blocks.unused_tokens + self._blocks.evictable_tokens - self._reserved

    @property
    def now(self) -> int:
        """Memory that nobody has."""
        return self._blocks.unused_tokens + self._blocks.evictable_tokens - self._used

    def state(self) -> State:
        """Whether there is anything left."""
        if self.left <= 0 or self.now <= 0:
            return State.NO_TOKEN
        if self.prefill_tokens <= 0 or (self.chunk_tokens is not None and self.chunk_tokens <= 0):
            return State.OTHER
        return State.CONTINUE

    def charge(self, tokens: int, expected_tokens: int) -> None:
        """Take `tokens` of a prompt on, whose request will generate `expected_tokens`."""
        size = self._blocks.block_size
        paged = self.paged(tokens)
        self._reserved += paged + size + expected_tokens
        self._used += paged + size
        self.prefill_tokens -= paged
        if self.chunk_tokens is not None:
            self.chunk_tokens -= paged

    def give_back(self, expected_tokens: float) -> None:
        """A running request gives way: what it was expected to generate is not reserved."""
        self._reserved -= expected_tokens

    def paged(self, tokens: int) -> int:
        """Token slots of the pages that hold so many tokens."""
        size = self._blocks.block_size
        return -(-tokens // size) * size


class Lives:
    """Whether memory holds until everybody has ended, one by one (`add_one_req_ignore_eos`).

    Exact where nobody stops early and nothing is cached.
    """

    def __init__(self, lives: Iterable[Life]) -> None:
        self._lives = sorted((each for each in lives if each[0] > 0), key=lambda each: each[0])

    def add(self, life: Life) -> None:
        """One more request. The engine puts who lives longest before the last one, not after it."""
        if life[0] > 0:
            later = (i for i, each in enumerate(self._lives) if each[0] >= life[0])
            self._lives.insert(next(later, -1), life)

    def hold(self, room_tokens: int) -> bool:
        """Whether each request can generate to its end, with so much memory now."""
        freed = 0
        for number, (left, tokens) in enumerate(self._lives):
            behind = len(self._lives) - number
            if room_tokens + freed - left * behind <= behind:
                return False
            freed += tokens
        return True


def life(request: Request, limit_tokens: int, factor: float) -> Life:
    """The life of a request that generates `factor` of its limit."""
    length = request.sequences[0].length
    return limit_tokens * factor - (length - request.input_length), length
