"""Lists the figures of a summary that are shown, each with its unit and its better direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from kvsim.core.schema import BLOCKED

Better = Literal["lower", "higher", ""]


class Metric(NamedTuple):
    """One figure of a summary."""

    key: str
    """Key of the summary; `a.b` is key `b` of table `a`."""
    label: str
    unit: str
    """A key of `numerals.UNITS`."""
    better: Better
    """Empty if neither direction is better."""
    group: str

    @property
    def always(self) -> bool:
        """Whether every run of one engine has the figure, be it undefined."""
        return self.key != "aborted" and self.group not in _OF_SOME_RUNS

    @property
    def whole(self) -> bool:
        """Whether the figure is a count."""
        return self.unit in ("requests", "tokens", "blocks", "steps", "preemptions")

    @property
    def extreme(self) -> bool:
        """Whether it is a percentile or a maximum, which few values decide."""
        start, _, end = self.key.partition("_")
        return (start[:1] == "p" and start[1:].isdigit()) or end.endswith("max")


def value(summary: Mapping[str, Any], key: str) -> float | None:
    """The figure with this key; None if it is undefined or absent."""
    found: Any = summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, int | float) else None


LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL", "queue": "Queue"}
"""Labels of the latencies that have full statistics."""

BLOCKED_BY = {
    "slots": "max_num_seqs reached",
    "tokens": "max_num_batched_tokens used up",
    "blocks": "too few free blocks",
    "watermark": "held by the watermark",
    "swapped": "swapped requests go first",
    "preempted": "a preemption in this step",
    "loras": "max_loras reached",
}
"""Why the head of the waiting queue was refused: labels for people."""

_OF_SOME_RUNS = ("Speculative decoding", "Pipeline", "Routing", "Sessions")
"""Groups of figures that only runs with such a feature have."""
_SHOWN = ("mean", "p50", "p90", "p99")


_GROUPS: dict[str, tuple[tuple[str, str, str, Better], ...]] = {
    "Requests": (
        ("completed", "Completed", "requests", "higher"),
        ("rejected", "Rejected", "requests", "lower"),
        ("aborted", "Aborted", "requests", ""),
        ("unfinished", "Unfinished", "requests", "lower"),
    ),
    "Throughput": (
        ("duration", "Duration", "s", "lower"),
        ("request_rate", "Offered requests", "requests/s", ""),
        ("total_token_rate", "Offered tokens", "tokens/s", ""),
        ("request_throughput", "Request throughput", "requests/s", "higher"),
        ("request_goodput", "Request goodput", "requests/s", "higher"),
        ("output_throughput", "Output token throughput", "tokens/s", "higher"),
        ("total_token_throughput", "Total token throughput", "tokens/s", "higher"),
        ("max_concurrent_requests", "Peak concurrent requests", "requests", ""),
    ),
    "Latency": (
        *(
            (f"{statistic}_{kind}_ms", f"{label} {statistic}", "ms", "lower")
            for kind, label in LATENCIES.items()
            for statistic in _SHOWN
        ),
        ("mean_prefill_ms", "Prefill mean", "ms", "lower"),
        ("mean_decode_ms", "Decode mean", "ms", "lower"),
        ("mean_client_queue_ms", "Client queue mean", "ms", "lower"),
    ),
    "Preemption": (
        ("num_preemptions", "Preemptions", "preemptions", "lower"),
        ("num_preemptions_by_mode.recompute", "Preemptions by recompute", "preemptions", "lower"),
        ("num_preemptions_by_mode.swap", "Preemptions by swap", "preemptions", "lower"),
        ("preempted_requests", "Requests preempted", "requests", "lower"),
        ("recomputed_tokens", "Tokens computed again", "tokens", "lower"),
        ("recompute_tax", "Recompute tax", "share", "lower"),
        ("swapped_out_blocks", "Blocks swapped out", "blocks", "lower"),
        ("swapped_in_blocks", "Blocks swapped in", "blocks", "lower"),
        ("copied_blocks", "Blocks copied on write", "blocks", "lower"),
        ("link_busy_share", "Link busy", "share", ""),
        ("link_wait_s", "Waiting for the link", "s", "lower"),
        ("flush_s", "Waiting for flushed stores", "s", "lower"),
    ),
    "Memory": (
        ("kv_cache_usage_mean", "KV cache usage mean", "share", ""),
        ("kv_cache_usage_max", "KV cache usage max", "share", ""),
        ("cpu_cache_usage_mean", "CPU pool usage mean", "share", ""),
        ("cpu_cache_usage_max", "CPU pool usage max", "share", ""),
        ("internal_fragmentation", "Internal fragmentation", "share", "lower"),
        ("external_fragmentation", "External fragmentation", "share", "lower"),
    ),
    "Prefix cache": (
        ("prefix_cache_hit_tokens", "Hit tokens", "tokens", "higher"),
        ("prefix_cache_preempted_hit_tokens", "Hit tokens after preemption", "tokens", ""),
        ("tier1_hit_tokens", "Hit tokens from CPU memory", "tokens", ""),
        ("tier2_hit_tokens", "Hit tokens from the tier below", "tokens", ""),
        ("prefix_cache_hit_rate", "Hit rate", "share", "higher"),
        ("prefix_cache_hit_rate_with_preempted", "Hit rate with preempted", "share", ""),
        ("prefix_cache_block_hit_rate", "Hit rate of block look-ups", "share", ""),
        ("prefix_cache_request_hit_share", "Requests with a hit", "share", "higher"),
    ),
    "Sessions": (
        ("sessions.mean_s", "Session mean, pauses included", "s", "lower"),
        ("sessions.p50_s", "Session p50", "s", "lower"),
        ("sessions.p90_s", "Session p90", "s", "lower"),
        ("sessions.mean_served_s", "Session at the engine", "s", "lower"),
        ("sessions.slowest_tenth_served_s", "Slowest tenth at the engine", "s", "lower"),
        ("sessions.mean_ttft_ms.first", "TTFT mean of first turns", "ms", "lower"),
        ("sessions.mean_ttft_ms.early", "TTFT mean of turns 2 to 9", "ms", "lower"),
        ("sessions.mean_ttft_ms.late", "TTFT mean of turns from 10 on", "ms", "lower"),
        ("sessions.lost_in_pauses_tokens", "Hits lost in pauses", "tokens", "lower"),
        ("sessions.lost_between_sessions_tokens", "Hits lost by first turns", "tokens", "lower"),
        ("sessions.computed_tokens", "Prompt tokens computed", "tokens", "lower"),
    ),
    "Speculative decoding": (
        ("spec_decode_draft_tokens", "Drafts verified", "tokens", ""),
        ("spec_decode_accepted_tokens", "Drafts accepted", "tokens", ""),
        ("spec_decode_acceptance_length", "Acceptance length", "", "higher"),
    ),
    "Pipeline": (("pipeline_bubble_share", "Pipeline bubbles", "share", "lower"),),
    "Routing": (
        ("load_imbalance", "Load imbalance", "", "lower"),
        ("input_imbalance", "Imbalance of prompt tokens", "", "lower"),
        ("routing.regret_share", "Regret of the router", "share", "lower"),
        ("routing.affinity_share", "Hits by affinity", "share", "higher"),
        ("routing.duplicate_share", "Cached in further replicas", "share", ""),
    ),
    "Queues": (
        ("waiting_mean", "Waiting mean", "", "lower"),
        ("waiting_max", "Waiting max", "requests", "lower"),
        ("running_mean", "Running mean", "", ""),
        ("running_max", "Running max", "requests", ""),
        ("swapped_mean", "Swapped mean", "", "lower"),
        ("swapped_max", "Swapped max", "requests", "lower"),
        *(
            (f"head_blocked_s.{cause}", f"Head waits: {BLOCKED_BY[cause]}", "s", "lower")
            for cause in BLOCKED[1:]
        ),
        ("steps", "Steps", "steps", ""),
    ),
}

METRICS = tuple(Metric(*metric, name) for name, group in _GROUPS.items() for metric in group)
"""Every figure that a comparison shows, in order."""
NAMED = {metric.key: metric for metric in METRICS}
"""Key → figure."""

HEADLINES = (
    "output_throughput",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p99_tpot_ms",
    "p99_e2el_ms",
    "num_preemptions",
    "recompute_tax",
    "kv_cache_usage_mean",
    "prefix_cache_hit_rate",
)
"""Keys of the figures that a comparison opens with."""
