"""Condenses what several replicas did into named figures: also what a router's decisions cost.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from kvsim.core.schema import CAUSES
from kvsim.core.vectors import added
from kvsim.explain.cache_curve import lru_tokens, optimum_tokens
from kvsim.fleet.result import FleetResult, Replica, handover_figures
from kvsim.results.statistics import Ints, ratio
from kvsim.results.summary import draft_figures, summarise_requests
from kvsim.run.result import Result
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, Reuse, find_reuse
from kvsim.workload.trace import Row, Trace

OF_A_REPLICA = (
    "num_requests",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "prefix_cache_hit_rate",
    "num_preemptions",
    "kv_cache_usage_mean",
    "kv_cache_usage_max",
    "waiting_mean",
    "running_mean",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "p99_tpot_ms",
)
"""Figures of a run (`kvsim.results.summary`) that are set side by side."""


def summarise_fleet(result: FleetResult, bounds: Bounds | None = None) -> dict[str, Any]:
    """All figures of a run of several replicas.

    Those of requests stand at the top, under the keys of a run; `replicas` has a table for each
    replica. `input_imbalance` is the greatest number of prompt tokens that a replica was sent, over
    the mean. `routing` explains the decisions, if they were noted, and has the `bounds`, if given.
    A prefill/decode split has `handovers`, too (`kvsim.fleet.result`), and no imbalance of its
    unequal replicas.
    """
    meta = _provenance(result, [replica.summary for replica in result.replicas])
    known = None if bounds is None else bounds.record()
    return fleet_figures(
        result.replicas,
        result.requests,
        result.decisions,
        result.token_gaps_ns,
        meta,
        known,
        result.handovers,
    )


def fleet_figures(
    replicas: Sequence[Result | Replica],
    requests: Mapping[str, Any],
    decisions: Mapping[str, Any] | None,
    gaps: Mapping[int, int],
    meta: Mapping[str, Any],
    bounds: Mapping[str, int] | None,
    handovers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The figures of `summarise_fleet`, from tables. `gaps`: time between tokens → how often."""
    each = [replica.summary for replica in replicas]
    end_ns = max(round(summary["duration"] * 1e9) for summary in each)
    figures = summarise_requests(requests, gaps, end_ns, meta)
    sent = [int(replica.requests["input_length"].sum()) for replica in replicas]
    routing = None
    if decisions is not None:
        routing = {**routing_figures(decisions, requests), "bounds": bounds}
    return {
        **figures,
        **joined_figures(each, [replica.steps for replica in replicas]),
        "input_imbalance": None if handovers else ratio(max(sent) * len(sent), sum(sent)),
        "load_imbalance": None if handovers else load_imbalance(requests, len(each)),
        "replicas": [
            {
                **{key: summary[key] for key in OF_A_REPLICA},
                "outcome": summary["meta"]["outcome"]["kind"],
            }
            for summary in each
        ],
        "routing": routing,
        **({"handovers": handover_figures(handovers)} if handovers else {}),
        "meta": meta,
    }


def _provenance(result: FleetResult, each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What made the run. Settings are those of the first replica; each folder has its own."""
    metas = [summary["meta"] for summary in each]
    first = metas[0]
    outcomes = [meta["outcome"] for meta in metas]
    stopped = (outcome for outcome in outcomes if outcome["kind"] != "finished")
    kept = (
        *("kvsim_version", "core", "command", "config", "assumed", "seed", "cost", "goodput"),
        *("engine", "model", "hardware", "block_size", "num_gpu_blocks"),
    )
    return {
        **{key: first[key] for key in kept},
        "trace": {**first["trace"], "requests": len(result.chosen)},
        "router": {"name": result.router, "args": result.router_args},
        "replicas": len(metas),
        **({"roles": list(result.ways.roles)} if result.ways else {}),
        "cost_sources": [meta["cost"]["source"] for meta in metas],
        "prefix_caching": any(meta["prefix_caching"] for meta in metas),
        "cache": joined_lookups(metas),
        "outcome": next(stopped, outcomes[0]),
    }


SUMMED = (
    "num_preemptions",
    "preempted_requests",
    "recomputed_tokens",
    "swapped_out_blocks",
    "swapped_in_blocks",
    "copied_blocks",
    "link_wait_s",
    "flush_s",
    "steps",
)
SUMMED_TABLES = "num_preemptions_by_mode", "head_blocked_s"
GREATEST = "kv_cache_usage_max", "cpu_cache_usage_max", "waiting_max", "running_max", "swapped_max"
"""The highest value of any replica."""
HELD = "waiting_mean", "running_mean", "swapped_mean"
"""Requests of all replicas together, on average over the whole time."""
SHARES = (
    "kv_cache_usage_mean",
    "cpu_cache_usage_mean",
    "internal_fragmentation",
    "external_fragmentation",
    "link_busy_share",
)
"""The mean of the replicas, each over its own time."""


def joined_figures(
    each: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The figures of a run that steps decide, for all replicas together: from the summary and the
    steps of each."""
    longest_s = max(summary["duration"] for summary in each)
    computed = sum(int(own["prefill_tokens"].sum() + own["decode_seqs"].sum()) for own in steps)
    recomputed = sum(summary["recomputed_tokens"] for summary in each)
    return {
        **{key: added(summary[key] for summary in each) for key in SUMMED},
        **{key: _summed([summary[key] for summary in each]) for key in SUMMED_TABLES},
        **{key: max(_known(each, key), default=None) for key in GREATEST},
        **{key: _held(each, key, longest_s) for key in HELD},
        **{key: fmean(known) if (known := _known(each, key)) else None for key in SHARES},
        "recompute_tax": ratio(recomputed, computed),
        **draft_figures(steps),
    }


def joined_lookups(metas: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The look-ups of blocks and their hits; empty for different engines, which have no definition
    in common."""
    if len({meta["engine"] for meta in metas}) > 1:
        return {}
    names = "block_lookups", "block_hits"
    return {name: sum(meta["cache"][name] for meta in metas) for name in names}


def _summed(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: added(table[key] for table in tables) for key in tables[0]}


def _known(each: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [summary[key] for summary in each if summary[key] is not None]


def _held(each: Sequence[Mapping[str, Any]], key: str, longest_s: float) -> float | None:
    spent_s = added((summary[key] or 0.0) * summary["duration"] for summary in each)
    return ratio(spent_s, longest_s)


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
    # Cause 0: the best one was chosen.
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
    # Added up by instant: who leaves and who comes at once cancel out.
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
    # In the order in which they were routed, of equal times in that of the trace.
    order = np.argsort(noted["time_ns"], kind="stable")
    rows = [trace.rows[place] for place in noted["request"][order]]
    prompts, counting = streams(trace), Counting(sizes.pop(), outputs=True)
    pools = [int(meta["num_gpu_blocks"]) for meta in metas]

    def reuse_of(some: Sequence[Row]) -> Reuse:
        return find_reuse(some, [prompts[row.index] for row in some], counting)

    whole = reuse_of(rows)
    return Bounds(
        _apart(rows, pools, result.chosen, reuse_of),
        _apart(rows, pools, _by_session(rows, pools, len(trace.rows)), reuse_of),
        lru_tokens(whole, [sum(pools)])[0],
        optimum_tokens(whole, [sum(pools)])[0],
        whole.ceiling_tokens,
    )


def _apart(
    rows: Sequence[Row],
    pools: Sequence[int],
    replica_of: Sequence[int],
    reuse_of: Callable[[Sequence[Row]], Reuse],
) -> int:
    """Hits of replicas with caches of their own."""
    total = 0
    for replica, pool in enumerate(pools):
        own = [row for row in rows if replica_of[row.index] == replica]
        total += lru_tokens(reuse_of(own), [pool])[0]
    return total


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
