"""How far eviction policies get with a trace, beside the optimum: `kvsim cache policies`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvsim.engines.sglang.ranks import RADIX_EVICTION, make_rank
from kvsim.errors import ConfigError
from kvsim.explain.cachelab.optimum import next_uses, optimum_blocks
from kvsim.explain.cachelab.policies import Prompt, prompts, replay, replay_radix
from kvsim.explain.certainty.estimates import Estimate
from kvsim.explain.certainty.stretches import Figure, together
from kvsim.policies.eviction import EVICTIONS, make_eviction
from kvsim.policies.order import Order
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, find_reuse
from kvsim.workload.trace import Trace

LEVEL = 0.05
"""Chance that the interval of a policy misses."""
RADIX = "sglang-"
"""Prefix of the names of SGLang's policies, which evict whole nodes of its tree."""
POLICIES = (
    *(name for name in EVICTIONS if name != "belady"),
    *(RADIX + name for name in RADIX_EVICTION),
)
"""Policies that a trace can be replayed through. The oracle's place is taken by the optimum."""


class Ranked(NamedTuple):
    """A policy at one capacity, in prompt tokens that hit."""

    name: str
    capacity: int
    blocks: int | None
    """Tokens where single blocks are evicted; None for a policy that evicts whole nodes."""
    closed: int
    """Tokens where only ends of prompts are evicted."""
    gain: Estimate | None
    """Of `closed` over `lru`, per prompt token; None where the trace is too short to tell."""


class Ranking(NamedTuple):
    """Policies at some capacities."""

    trace: str
    block_size: int
    input_tokens: int
    rows: list[Ranked]
    optimum: dict[int, int]
    """By capacity."""
    ceiling: int

    def record(self) -> dict[str, Any]:
        """Everything as plain values, for a JSON file."""
        return {
            "trace": self.trace,
            "block_size": self.block_size,
            "input_tokens": self.input_tokens,
            "ceiling_tokens": self.ceiling,
            "optimum_tokens": self.optimum,
            "policies": [
                {
                    "policy": row.name,
                    "capacity_blocks": row.capacity,
                    "single_blocks_tokens": row.blocks,
                    "closed_tokens": row.closed,
                    "gain_over_lru": None if row.gain is None else row.gain.difference,
                    "interval": None if row.gain is None else row.gain.interval(LEVEL),
                }
                for row in self.rows
            ],
        }


def rank_policies(
    trace: Trace, names: Sequence[str], capacities: Sequence[int], counting: Counting
) -> Ranking:
    """Replay a trace through policies: names of `POLICIES`, or a user's `package.module:name`.

    Raises `ConfigError` for an unknown name.
    """
    identities = streams(trace)
    asked = prompts(trace.rows, identities, counting)
    reuse = find_reuse(trace.rows, identities, counting)
    size = counting.block_size
    lengths = np.array([row.input_length for row in trace.rows])
    uses = next_uses(reuse)
    rows, optimum = list[Ranked](), dict[int, int]()
    for capacity in capacities:
        kept = optimum_blocks(reuse, uses, capacity)
        limits = [each.most_tokens for each in reuse.found]
        optimum[capacity] = sum(
            min(blocks * size, most) for blocks, most in zip(kept, limits, strict=True)
        )
        base = _replayed("lru", asked, capacity, size)(closed=True)
        for name in names:
            run = _replayed(name, asked, capacity, size)
            closed = base if name == "lru" else run(closed=True)
            single = None if name.startswith(RADIX) else sum(run(closed=False))
            gain = _gain(base, closed, lengths)
            rows.append(Ranked(name, capacity, single, sum(closed), gain))
    total = int(lengths.sum())
    return Ranking(trace.path, size, total, rows, optimum, reuse.ceiling_tokens)


def _replayed(
    name: str, asked: Sequence[Prompt], capacity: int, block_size: int
) -> Callable[..., list[int]]:
    if name == "belady":
        raise ConfigError("--policy: belady sees the future; the optimum is in every table")
    if name.startswith(RADIX):
        rank = make_rank(name.removeprefix(RADIX), {})

        def whole_nodes(*, closed: bool) -> list[int]:
            return replay_radix(asked, rank, capacity, block_size)

        return whole_nodes
    make: Callable[[int, int], Order] = make_eviction(
        name, block_size=block_size, num_gpu_blocks=capacity, seed=0
    )
    return partial(replay, asked, make, capacity, block_size)


def _gain(base: Sequence[int], found: Sequence[int], lengths: Any) -> Estimate | None:
    """Hits per prompt token over those of `base`, from stretches of the trace."""
    scale = 1 / lengths.mean()
    figure = Figure(np.array(base) * scale, np.array(found) * scale, lambda v: v.mean(axis=-1))
    return together({"hits": figure}).get("hits")
