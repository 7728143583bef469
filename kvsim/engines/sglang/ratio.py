"""How much SGLang 0.5.23 expects requests to generate
(`managers/scheduler_components/new_token_ratio_tracker.py`), and what it reads from its
environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mypy_extensions import i64


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


class NewTokenRatio:
    """The share of the announced output tokens that requests are expected to generate."""

    now: float
    """The share in this step."""
    ppm: i64
    """The same in parts per million."""
    lowest: float
    highest: float
    """Its bounds so far."""
    _first: float
    _least: float
    _decay: float

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
        first = min(float(environment.init_new_token_ratio) * float(conservativeness), 1.0)
        self._first = first
        self._least = min(first * float(environment.min_new_token_ratio_factor), 1.0)
        self._decay = (first - self._least) / float(environment.new_token_ratio_decay_steps)
        self.lowest = self.highest = first
        self.reset()

    def decay(self) -> None:
        """Lowers the share in a decode step that has memory for all requests."""
        if self.now != self._least:
            self._set(max(self.now - self._decay, self._least))

    def estimate(self, generated_tokens: int, limit_tokens: int) -> None:
        """Sets the share after a retraction, from what the remaining requests have generated and
        may generate."""
        self._set(min(1.0, generated_tokens / (limit_tokens + 1)))

    def reset(self) -> None:
        """Resets the share after the engine was idle."""
        self._set(self._first)

    def _set(self, share: float) -> None:
        self.now = share
        self.lowest, self.highest = min(self.lowest, share), max(self.highest, share)
        self.ppm = round(1e6 * share)


class Surprises:
    """How often a run met what a user may not expect."""

    arrived: i64 = 0
    ignore_eos: i64 = 0
    """Of those who arrived, those that ignore the end of sequence."""
    stuck: i64 = 0
    """Prompts that never fit."""
    reserved: i64 = 0
    """Refusals although memory was free."""
    retracted: i64 = 0
    aborted: i64 = 0
    """Of the retracted requests, those that found the queue full."""
    forgotten: i64 = 0
    """Unfinished prompts that the engine lost sight of, because it cut another."""

    def remarks(self, ratio: NewTokenRatio) -> list[str]:
        """Returns a line for each surprise."""
        found = []
        if self.reserved:
            found.append(
                f"{self.reserved:,} times, the head of the queue was refused though memory was"
                " free: SGLang keeps it for what running requests are expected to generate, and"
                " wants room for all that the new one may generate; clients that announce"
                " max_new_tokens need less"
            )
        if self.retracted:
            found.append(
                f"{self.retracted:,} retractions; the new-token ratio was between"
                f" {ratio.lowest:.3f} and {ratio.highest:.3f}. A higher schedule_conservativeness"
                " admits less and retracts less"
            )
        if self.aborted:
            found.append(
                f"{self.aborted:,} retracted requests were aborted, because max_queued_requests"
                " counts them like new ones"
            )
        if 0 < self.arrived == self.ignore_eos:
            found.append(
                "every request ignores the end of sequence, so SGLang reserves all that each may"
                " generate, and the new-token ratio has no effect; requests that may stop early are"
                " admitted sooner, and may be retracted"
            )
        if self.stuck:
            found.append(
                f"{self.stuck:,} prompts need nearly the whole pool: SGLang wants room for a page"
                " more, so it never admits them, and they block the queue for ever"
            )
        if self.forgotten:
            found.append(
                f"{self.forgotten:,} times, a prompt was cut while another was unfinished: SGLang"
                " goes on with the later one, and the other decodes without the rest"
            )
        return found
