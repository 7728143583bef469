"""What caches of every size make of a trace: the figures behind `kvsim cache curve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.explain.cachelab.breakdown import (
    WHO,
    Group,
    by_prefix,
    by_session,
    histogram,
    who_reuses,
)
from kvsim.explain.cachelab.curve import make_curve
from kvsim.explain.cachelab.optimum import optimum_tokens
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, Reuse, find_reuse
from kvsim.workload.trace import Trace

POINTS = 16
"""Capacities of a curve that are chosen for it, evenly over the logarithm."""


class Point(NamedTuple):
    """A cache of one size, in prompt tokens that hit."""

    blocks: int
    lru: int
    optimum: int | None
    """None where rows were not kept for it."""
    lru_blocks: int
    """Blocks of prompts that hit, under LRU."""
    requests: int
    """Requests that find at least one block, under LRU."""

    @property
    def left(self) -> int | None:
        """What LRU leaves to the optimum."""
        return None if self.optimum is None else self.optimum - self.lru


class Asked(NamedTuple):
    """What a study is to show."""

    capacities: Sequence[int] = ()
    """In blocks; the answer in words is about the first one."""
    warm_up: int = 0
    """Requests at the start, which fill the cache and are not measured."""
    block_bytes: int | None = None
    """Of the model, if one is named."""
    points: int = POINTS
    """How many further capacities to show."""


PLAIN = Asked()


class Study(NamedTuple):
    """The reuse of a trace, and what caches make of it."""

    trace: str
    counting: Counting
    requests: int
    """Requests that are measured; those before only fill the cache."""
    input_tokens: int
    blocks: int
    """Blocks of their prompts, all of which are looked up."""
    distinct: int
    """Different blocks of the whole trace."""
    ceiling: int
    """Prompt tokens that hit in a cache without limit."""
    points: list[Point]
    asked: Asked
    reused: Mapping[str, list[int]] = MappingProxyType({})
    """Of each of `WHO`, tokens by distance: up to the first point, from each one to the next."""
    sessions: Sequence[Group] = ()
    prefixes: Sequence[Group] = ()

    @property
    def block_bytes(self) -> int | None:
        """Of the model, if one was named."""
        return self.asked.block_bytes

    @property
    def chosen(self) -> int | None:
        """The capacity asked about, in blocks; one of the points."""
        return next(iter(self.asked.capacities), None)

    def share(self, tokens: int) -> float:
        """Of the prompt tokens."""
        return tokens / self.input_tokens if self.input_tokens else 0.0

    def point(self, blocks: int) -> Point:
        """The point of a capacity."""
        return next(point for point in self.points if point.blocks == blocks)

    def record(self) -> dict[str, Any]:
        """Everything as plain values, for a JSON file."""
        return {
            "trace": self.trace,
            **self.counting._asdict(),
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "blocks": self.blocks,
            "distinct_blocks": self.distinct,
            "ceiling_tokens": self.ceiling,
            "block_bytes": self.block_bytes,
            "points": [
                {
                    "capacity_blocks": point.blocks,
                    "lru_tokens": point.lru,
                    "optimum_tokens": point.optimum,
                    "lru_blocks": point.lru_blocks,
                    "lru_requests": point.requests,
                }
                for point in self.points
            ],
            "reused_tokens_by_distance": dict(self.reused),
        }


def study_trace(trace: Trace, counting: Counting, asked: Asked = PLAIN) -> Study:
    """Study a trace at every capacity. Raises `ConfigError` where nothing is left to measure."""
    rows, warm_up = trace.rows, asked.warm_up
    refuse_empty(warm_up, len(rows))
    reuse = find_reuse(rows, streams(trace), counting)
    measured = Reuse(counting, reuse.found[warm_up:], reuse.distinct)
    curve = make_curve(measured.found, counting.block_size)
    sizes = sizes_of(reuse.distinct, asked)
    values = zip(
        sizes,
        curve.tokens(sizes),
        optimum_tokens(reuse, sizes, warm_up),
        curve.blocks(sizes),
        curve.requests(sizes),
        strict=True,
    )
    edges = [0, *sizes]
    size, lengths = counting.block_size, [row.input_length for row in rows[warm_up:]]
    return Study(
        trace.path,
        counting,
        len(rows) - warm_up,
        sum(lengths),
        sum(-(-each // size) if counting.partial_blocks else each // size for each in lengths),
        reuse.distinct,
        measured.ceiling_tokens,
        [Point(*each) for each in values],
        asked,
        _reused(rows, reuse, edges),
        by_session(rows, reuse),
        by_prefix(rows, reuse),
    )


def _reused(rows: Any, reuse: Reuse, edges: Sequence[int]) -> dict[str, list[int]]:
    ramps: Mapping[str, Any] = who_reuses(rows, reuse)
    return {who: list(histogram(ramps[who], edges)) for who in WHO}


def refuse_empty(warm_up: int, requests: int) -> None:
    """Raise `ConfigError` if no request is left after those that warm up."""
    if warm_up >= requests:
        raise ConfigError(f"--warm-up: {warm_up} of {requests} requests; leave some to measure")


def sizes_of(distinct: int, asked: Asked) -> list[int]:
    """Capacities up to one that holds everything, with those asked about and twice as many."""
    most = max(distinct, 1)
    chosen = {round(most ** (1 - step / asked.points / 1.5)) for step in range(asked.points)}
    return sorted({*chosen, *asked.capacities, *(2 * each for each in asked.capacities)} - {0})
