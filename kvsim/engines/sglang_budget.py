"""How much one prefill of SGLang 0.5.23 may take on (`managers/schedule_policy.py`,
`PrefillAdder`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from kvsim.engine.request import Request
from kvsim.engines.sglang_blocks import SglangTables

Life = tuple[float, int]
"""The tokens that a request is still expected to generate, and the tokens that its end frees."""


_LONGEST_INTERVAL = 1 << 16
"""Decode steps between prompts. Where there is nothing to decode, the engine counts them down all
the same."""


class State(Enum):
    """Whether a prefill can take on more."""

    CONTINUE = "yes"
    NO_TOKEN = "memory is used up, reservations included"
    OTHER = "another limit is reached"


class Environment(NamedTuple):
    """Values that SGLang reads from environment variables. The variable is `SGLANG_` and the name
    in capitals, with `_ESTIMATION` appended for the clip and `IN_BATCH_PREFIX_CACHING_` for
    `IN_BATCH_`."""

    init_new_token_ratio: float = 0.7
    """The initial share of the announced output tokens that requests are expected to generate."""
    min_new_token_ratio_factor: float = 0.14
    """The smallest value of the share, relative to the initial one."""
    new_token_ratio_decay_steps: float = 600
    """Number of decode steps in which the share falls to its smallest value."""
    retract_decode_steps: float = 20
    """Number of steps for which the requests that remain after a retraction are expected to have
    memory."""
    clip_max_new_tokens: float = 4096
    """Most tokens that any request is expected to generate."""
    in_batch_check_threshold: float = 32
    """Number of cached tokens up to which a waiting request is compared with earlier ones."""
    in_batch_deprioritize_threshold: float = 32
    """Number of tokens that it must share with an earlier one to be put after all others."""


def read_environment(values: Mapping[str, float]) -> Environment:
    """The values of these names. Raises `ValueError` for an unknown one."""
    if unknown := sorted(values.keys() - set(Environment._fields)):
        known = ", ".join(Environment._fields)
        raise ValueError(f"environment: unknown {', '.join(unknown)}; known: {known}")
    return Environment(**values)


def bounded_interval(interval: int) -> int:
    """The decode steps between prompts. Raises `ValueError` for too many."""
    if interval > _LONGEST_INTERVAL:
        what = f"{interval:,} is above {_LONGEST_INTERVAL:,} steps; give less"
        raise ValueError(f"prefill_decode_interval: {what}")
    return interval


class NewTokenRatio:
    """The share of the announced output tokens that requests are expected to generate
    (`managers/scheduler_components/new_token_ratio_tracker.py`)."""

    def __init__(self, environment: Environment, conservativeness: float) -> None:
        """It falls from its initial to its smallest value in a number of decode steps.
        `conservativeness` multiplies both. Raises `ValueError` for values that no server starts
        with or that make the share negative."""
        for name, value in (
            ("schedule_conservativeness", conservativeness),
            *zip(environment._fields[:2], environment[:2], strict=True),
        ):
            if not value >= 0:
                raise ValueError(f"{name}: {value:g} is negative; use 0 or more")
        if not environment.new_token_ratio_decay_steps > 0:
            raise ValueError("new_token_ratio_decay_steps: use a number of steps above 0")
        self._first = first = min(environment.init_new_token_ratio * conservativeness, 1)
        self._least = min(first * environment.min_new_token_ratio_factor, 1)
        self._decay = (first - self._least) / environment.new_token_ratio_decay_steps
        self.now = self.lowest = self.highest = first
        """The share in this step, and its bounds so far."""

    @property
    def ppm(self) -> int:
        """The share in this step, in parts per million."""
        return round(1e6 * self.now)

    def decay(self, steps: int = 1) -> list[int]:
        """Lowers the share in decode steps that have memory for all requests. Returns it in the
        first of these steps, in parts per million, until it falls no more."""
        shares: list[int] = []
        while self.now != self._least and len(shares) < steps:
            self.now = max(self.now - self._decay, self._least)
            shares.append(self.ppm)
        self.lowest = min(self.lowest, self.now)
        return shares

    def estimate(self, generated_tokens: int, limits_tokens: list[int]) -> None:
        """Sets the share after a retraction, from what the remaining requests have generated."""
        if limits_tokens:
            self.now = min(1, generated_tokens / (sum(limits_tokens) + 1))
        else:
            self.now = 0.0
        self.lowest, self.highest = min(self.lowest, self.now), max(self.highest, self.now)

    def reset(self) -> None:
        """Resets the share after the engine was idle."""
        self.now = self._first


class Budget:
    """The tokens of memory and of computation that are left for a prefill."""

    def __init__(
        self,
        blocks: SglangTables,
        riders: int,
        expected_tokens: float,
        max_prefill_tokens: int,
        chunk_tokens: int | None,
    ) -> None:
        """`riders` is the number of decodes that share the step. `expected_tokens` is what the
        running requests will generate. `chunk_tokens` is the most prompt tokens that a step
        computes; None means no limit."""
        self._blocks = blocks
        self._reserved: float = riders + expected_tokens
        self._used = riders
        self.prefill_tokens = max_prefill_tokens - riders
        self.chunk_tokens = None if chunk_tokens is None else chunk_tokens - riders

    @property
    def left(self) -> float:
        """Memory that is neither in use nor reserved for expected tokens."""
        return self._blocks.available_tokens - self._reserved

    @property
    def now(self) -> int:
        """Memory that is not in use."""
        return self._blocks.available_tokens - self._used

    def state(self) -> State:
        """Returns whether the budget allows more."""
        if self._blocks.available_tokens <= max(self._reserved, self._used):
            return State.NO_TOKEN
        if self.prefill_tokens <= 0 or (self.chunk_tokens is not None and self.chunk_tokens <= 0):
            return State.OTHER
        return State.CONTINUE

    def charge(self, tokens: int, expected_tokens: int) -> None:
        """Takes on `tokens` tokens of a prompt whose request is expected to generate
        `expected_tokens`."""
        size = self._blocks.block_size
        paged = self.paged(tokens)
        self._reserved += paged + size + expected_tokens
        self._used += paged + size
        self.prefill_tokens -= paged
        if self.chunk_tokens is not None:
            self.chunk_tokens -= paged

    def give_back(self, expected_tokens: float) -> None:
        """Cancels the reservation of a running request that is preempted."""
        self._reserved -= expected_tokens

    def paged(self, tokens: int) -> int:
        """Returns the token slots of the pages that hold `tokens` tokens."""
        size = self._blocks.block_size
        return -(-tokens // size) * size


class Lives:
    """Tests whether memory suffices until all requests have ended one by one
    (`add_one_req_ignore_eos`).

    The test is exact if no request stops early and nothing is cached.
    """

    def __init__(self, lives: Iterable[Life]) -> None:
        self._lives = sorted((each for each in lives if each[0] > 0), key=lambda each: each[0])

    def add(self, life: Life) -> None:
        """Adds a request. Like the engine, it puts the longest-lived one before the last one, not
        after it."""
        if life[0] > 0:
            later = (i for i, each in enumerate(self._lives) if each[0] >= life[0])
            self._lives.insert(next(later, -1), life)

    def hold(self, room_tokens: int) -> bool:
        """Whether every request can generate to its end, given the free memory now."""
        freed = 0
        for number, (left, tokens) in enumerate(self._lives):
            behind = len(self._lives) - number
            if room_tokens + freed - left * behind <= behind:
                return False
            freed += tokens
        return True


def life(request: Request, limit_tokens: int, factor: float) -> Life:
    """Returns the life of a request that generates `factor` of its limit."""
    length = request.sequences[0].length
    return limit_tokens * factor - (length - request.input_length), length
