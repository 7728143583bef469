"""Sums up a router's decisions: what was lost and why, what was chance, and how even the load was.

Of the prompt tokens of all requests that were sent and later admitted:

* `cached_tokens` were in the cache of the chosen replica when the router decided, `best_tokens` in
  that of the best eligible one. The difference is the *regret*; every decision's regret has one
  cause (`kvsim.core.schema.CAUSES`), so the parts add up to it.
* `luck_tokens` are those that a replica drawn at random would have had: the mean over the eligible
  ones. `affinity_tokens` are what the choice added, so the two add up to `cached_tokens`.
* `hit_tokens` were found at the first admission. `waiting_tokens`, what requests gained or lost
  while they waited for it, is the difference to `cached_tokens`.
* `duplicate_tokens` were cached in more than one replica, counted once for each further one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.core.schema import CAUSES
from kvsim.core.sums import added
from kvsim.explain.cachelab.curve import lru_tokens, optimum_tokens
from kvsim.fleet.result import FleetResult
from kvsim.results.statistics import ratio
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, find_reuse
from kvsim.workload.trace import Row, Trace

Ints = NDArray[np.int64]
Columns = Mapping[str, Any]


def of_admitted(decisions: Columns, requests: Columns) -> dict[str, Ints]:
    """Returns the decisions about requests that were admitted later, with the tokens of their
    prompts and those that hit."""
    columns = {name: np.asarray(requests[name]) for name in ("input_length", "num_cached_tokens")}
    admitted = np.asarray(requests["first_scheduled_ns"]) >= 0
    return {name: column[admitted] for name, column in {**decisions, **columns}.items()}


def regrets(decisions: Columns) -> dict[str, tuple[int, int]]:
    """Returns cause → decisions with it, and the tokens that they lost."""
    lost = decisions["best_tokens"] - decisions["cached_tokens"]
    which = [decisions["cause"] == code for code in range(1, len(CAUSES))]
    return {
        cause: (int(mask.sum()), int(lost[mask].sum()))
        for cause, mask in zip(CAUSES[1:], which, strict=True)
    }


def sent_to(each: Sequence[Columns]) -> dict[str, Any]:
    """Returns the requests to all replicas, one replica after the other, with what `in_flight`
    needs. In a prefill/decode split, those of the clients are in two of them."""
    names = "arrival_ns", "finish_ns"
    columns = {name: np.concatenate([requests[name] for requests in each]) for name in names}
    numbers = [len(requests["arrival_ns"]) for requests in each]
    return {**columns, "replica": np.repeat(np.arange(len(each)), numbers)}


def in_flight(requests: Columns, replicas: int) -> tuple[Ints, Ints]:
    """Returns instants, and for each replica the requests that it has from each instant on until
    the next."""
    sent = np.asarray(requests["arrival_ns"]) >= 0
    begin, end = (np.asarray(requests[name])[sent] for name in ("arrival_ns", "finish_ns"))
    replica = np.asarray(requests["replica"])[sent]
    over = end >= 0
    instants, places = np.unique(np.concatenate((begin, end[over])), return_inverse=True)
    changes = np.zeros((replicas, len(instants)), dtype=np.int64)
    np.add.at(changes, (replica, places[: len(begin)]), 1)
    np.add.at(changes, (replica[over], places[len(begin) :]), -1)
    return instants, changes.cumsum(axis=1)


def load_imbalance(requests: Columns, replicas: int) -> float | None:
    """Returns the requests in flight of the busiest replica, whichever it is, over those of the
    mean replica, both averaged over time: 1 if the load is always even."""
    instants, counts = in_flight(requests, replicas)
    spans = np.diff(instants).astype(float)
    # One by one: how a product of vectors adds depends on the processor.
    most, mean = (
        added((each[:-1] * spans).tolist()) for each in (counts.max(axis=0), counts.mean(axis=0))
    )
    return ratio(most, mean)


def routing_figures(decisions: Columns, requests: Columns) -> dict[str, Any]:
    """Returns the figures of this module; `requests` are those of the whole fleet, in the order of
    the trace."""
    noted = of_admitted(decisions, requests)
    prompt, hit = (int(noted[name].sum()) for name in ("input_length", "num_cached_tokens"))
    cached, best, together = (
        int(noted[name].sum()) for name in ("cached_tokens", "best_tokens", "eligible_tokens")
    )
    luck = float((noted["eligible_tokens"] / noted["eligible"]).sum())
    lost = regrets(noted)
    return {
        "decisions": len(noted["request"]),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "best_tokens": best,
        "regret_tokens": {cause: tokens for cause, (_, tokens) in lost.items()},
        "regret_decisions": {cause: number for cause, (number, _) in lost.items()},
        "regret_share": ratio(best - cached, prompt),
        "luck_tokens": luck,
        "affinity_tokens": cached - luck,
        "affinity_share": ratio(cached - luck, prompt),
        "hit_tokens": hit,
        "waiting_tokens": hit - cached,
        "duplicate_tokens": together - best,
        "duplicate_share": ratio(together - best, prompt),
    }


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
