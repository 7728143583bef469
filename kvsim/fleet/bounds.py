"""What other ways of sending the same requests could have found in caches, from the trace alone.

Each number is prompt tokens that hit, if the admitted requests followed each other in the order of
the router's decisions and nothing took time. Caches keep prompts and named outputs and evict the
least recently used block (`kvsim.workload.reuse`). So *as sent* is the fleet itself under these
rules, and the differences to it say what is lost between replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvsim.explain.cachelab.curve import lru_tokens, optimum_tokens
from kvsim.fleet.result import FleetResult
from kvsim.fleet.routing import of_admitted
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, find_reuse
from kvsim.workload.trace import Row, Trace


class Bounds(NamedTuple):
    """Prompt tokens that hit."""

    as_sent: int
    """Each replica with its own cache, and the requests that the router sent it."""
    by_session: int
    """Each session whole on one replica, the longest ones first to whoever has the least."""
    pooled: int
    """One cache as large as all together."""
    pooled_optimum: int
    """The same, if it knew the future when it evicts (Belady's rule)."""
    unlimited: int
    """One cache that forgets nothing."""

    def record(self) -> dict[str, int]:
        """Returns the figures by name."""
        return {f"{name}_tokens": value for name, value in self._asdict().items()}


def find_bounds(trace: Trace, result: FleetResult) -> Bounds | None:
    """Returns the bounds of a run; None if it was not explained, if it split prefill and decode, or
    if replicas cache nothing or in blocks of different sizes."""
    metas = [replica.meta for replica in result.replicas]
    sizes = {meta["block_size"] for meta in metas}
    if result.decisions is None or result.ways or len(sizes) > 1 or not metas[0]["prefix_caching"]:
        return None
    noted = of_admitted(result.decisions, result.requests)
    order = np.argsort(noted["time_ns"], kind="stable")
    rows = [trace.rows[place] for place in noted["request"][order]]
    prompts, counting = streams(trace), Counting(sizes.pop(), outputs=True)
    pools = [int(meta["num_gpu_blocks"]) for meta in metas]

    def apart(replica_of: Sequence[int]) -> int:
        """Hits of replicas with caches of their own."""
        total = 0
        for replica, pool in enumerate(pools):
            own = [row for row in rows if replica_of[row.index] == replica]
            reuse = find_reuse(own, [prompts[row.index] for row in own], counting)
            total += lru_tokens(reuse, [pool])[0]
        return total

    whole = find_reuse(rows, [prompts[row.index] for row in rows], counting)
    return Bounds(
        apart(result.chosen),
        apart(_by_session(rows, pools, len(trace.rows))),
        lru_tokens(whole, [sum(pools)])[0],
        optimum_tokens(whole, [sum(pools)])[0],
        whole.ceiling_tokens,
    )


def _by_session(rows: Iterable[Row], pools: Sequence[int], requests: int) -> list[int]:
    """The replica of each request; a request without a session is a session of its own."""
    sessions: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        sessions[row.session or ("request", row.id)].append(row)
    tokens = {name: sum(row.input_length for row in own) for name, own in sessions.items()}
    replica_of, load = [-1] * requests, [0.0] * len(pools)
    for name in sorted(sessions, key=lambda name: -tokens[name]):
        idlest = min(range(len(pools)), key=load.__getitem__)
        load[idlest] += tokens[name] / pools[idlest]
        for row in sessions[name]:
            replica_of[row.index] = idlest
    return replica_of
