"""Condenses what several replicas did into named figures."""

from __future__ import annotations

from typing import Any

from kvsim.fleet.fleet import FleetResult
from kvsim.fleet.joined import joined_figures
from kvsim.records.tally import Tally
from kvsim.report.statistics import ratio
from kvsim.report.summary import summarise_requests

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
"""Figures of a run (`kvsim.report.summary`) that are set side by side."""


def summarise_fleet(result: FleetResult) -> dict[str, Any]:
    """All figures of a run of several replicas.

    Those of requests stand at the top, under the keys of a run; `replicas` has a table for each
    replica. `input_imbalance` is the greatest number of prompt tokens that a replica was sent, over
    the mean.
    """
    each = [replica.summary for replica in result.replicas]
    metas = [summary["meta"] for summary in each]
    end_ns = max(round(summary["duration"] * 1e9) for summary in each)
    gaps = Tally()
    for replica in result.replicas:
        for number, times in zip(*replica.token_gaps_ns.arrays(), strict=True):
            gaps.add(int(number), int(times))
    caching = any(meta["prefix_caching"] for meta in metas)
    meta = {"goodput": metas[0]["goodput"], "prefix_caching": caching}
    if len({meta["engine"] for meta in metas}) == 1:
        # Look-ups of blocks have no definition that all engines share.
        names = "block_lookups", "block_hits"
        meta["cache"] = {name: sum(each["cache"][name] for each in metas) for name in names}
    figures = summarise_requests(result.requests, gaps, end_ns, meta)
    sent = [int(replica.requests["input_length"].sum()) for replica in result.replicas]
    return {
        **figures,
        **joined_figures(result.replicas),
        "input_imbalance": ratio(max(sent) * len(sent), sum(sent)),
        "replicas": [
            {
                **{key: summary[key] for key in OF_A_REPLICA},
                "outcome": summary["meta"]["outcome"]["kind"],
            }
            for summary in each
        ],
        "meta": {
            "kvsim_version": metas[0]["kvsim_version"],
            "command": metas[0]["command"],
            "router": {"name": result.router, "args": result.router_args},
            "trace": {**metas[0]["trace"], "requests": len(result.chosen)},
            "seed": metas[0]["seed"],
            "cost": [meta["cost"]["source"] for meta in metas],
        },
    }
