"""Condenses what several replicas did into named figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

from kvsim.core.sums import added
from kvsim.fleet.result import FleetResult, handover_figures
from kvsim.fleet.routing import Bounds, load_imbalance, routing_figures
from kvsim.results.statistics import ratio
from kvsim.results.summary import draft_figures, summarise_requests

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
    the mean. `routing` explains the decisions (`kvsim.fleet.routing`), if they were noted, and
    has the `bounds`, if given. A prefill/decode split has `handovers`, too
    (`kvsim.fleet.result`), and no imbalance of its unequal replicas.
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


class Served(Protocol):
    """What a replica did: a `Result`, or what was read from its folder."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """The figures of a run."""

    @property
    def requests(self) -> Mapping[str, Any]:
        """The requests that it was sent."""

    @property
    def steps(self) -> Mapping[str, Any]:
        """Its steps."""


def fleet_figures(
    replicas: Sequence[Served],
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
    kept = ("kvsim_version", "core", "command", "config", "assumed", "seed", "cost", "goodput")
    return {
        **{key: first[key] for key in kept},
        **{
            key: first[key]
            for key in ("engine", "model", "hardware", "block_size", "num_gpu_blocks")
        },
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
