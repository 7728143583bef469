"""Joins what each replica's steps say into figures of them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvsim.core.sums import added
from kvsim.results.statistics import ratio
from kvsim.results.summary import draft_figures

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
