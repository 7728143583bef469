"""Condenses a run into named figures.

Keys and definitions are those of the result file of `vllm bench serve` (vllm/benchmarks/serve.py)
wherever it has the figure; everything is counted in simulated time. Values are plain numbers, or
None where a figure is undefined; never NaN. What a run lacks (drafts, sessions) has no keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.schema import BLOCKED
from kvsim.results import timeline
from kvsim.results.ledger import KERNEL_LABELS, PROMPT_PARTS, TIME_PARTS
from kvsim.results.load import load_figures
from kvsim.results.plain import plain
from kvsim.results.statistics import (
    STATISTICS,
    Floats,
    Ints,
    completed,
    defined,
    describe,
    describe_counts,
    durations_ns,
    ints,
    ratio,
    weighted_mean,
)
from kvsim.results.timeline import Columns

NS_PER_MS = 1e6
NS_PER_S = 1e9


def summarise(
    steps: Columns,
    requests: Mapping[str, Any],
    itl_counts: Mapping[int, int],
    meta: Mapping[str, Any],
    *,
    ledger: bool = True,
) -> dict[str, Any]:
    """All figures of a run, or all but those of its `ledger`, with its provenance under `meta`.

    `steps` holds the columns of `schema.STEP_COLUMNS`; `requests` one entry per request in trace
    order; `itl_counts` how often each inter-token gap (ns) occurred. The result is unchanged by
    `json.loads(json.dumps(...))`.
    """
    end_ns = timeline.run_end_ns(steps, requests)
    rows = timeline.States(steps, end_ns, meta)
    held_ns = timeline.durations_ns(rows, end_ns)
    summary: dict[str, Any] = plain(
        {
            **summarise_requests(requests, itl_counts, end_ns, meta),
            **_preemptions(steps, requests),
            **_memory(rows, held_ns, meta),
            **_queues(rows, held_ns, steps),
            **_link(steps, end_ns),
            **draft_figures([steps]),
            **_stages(steps, meta),
            **(ledger_figures(steps, requests) if ledger else {}),
            "steps": len(steps["start_ns"]),
            "meta": meta,
        }
    )
    return summary


def summarise_requests(
    requests: Mapping[str, Any], itl_counts: Mapping[int, int], end_ns: int, meta: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of `summarise` that requests alone decide, up to `end_ns`."""
    durations = durations_ns(requests)
    figures: dict[str, Any] = plain(
        {
            **_requests(requests),
            **_throughput(requests, durations, end_ns, meta),
            **load_figures(requests),
            **_latencies(requests, durations, itl_counts),
            **_prefix_cache(requests, meta),
            **session_figures(requests),
        }
    )
    return figures


def _requests(requests: Mapping[str, Any]) -> dict[str, Any]:
    statuses = Counter(requests["status"])
    reasons = Counter(
        str(reason) or "unknown"
        for status, reason in zip(requests["status"], requests["reason"], strict=True)
        if status == "rejected"
    )
    total = sum(statuses.values())
    return {
        "num_requests": total,
        "completed": statuses["completed"],
        "failed": total - statuses["completed"],
        "rejected": statuses["rejected"],
        **({"aborted": statuses["aborted"]} if statuses["aborted"] else {}),
        "unfinished": total - sum(statuses[each] for each in ("completed", "rejected", "aborted")),
        "rejected_by_reason": dict(sorted(reasons.items())),
    }


def _throughput(
    requests: Mapping[str, Any],
    durations: Mapping[str, Floats],
    end_ns: int,
    meta: Mapping[str, Any],
) -> dict[str, Any]:
    """Rates of completed requests, over the time from the start of the client to the last event."""
    done = completed(requests)
    duration = end_ns / NS_PER_S
    tokens_in = int(ints(requests["input_length"])[done].sum())
    tokens_out = int(ints(requests["output_tokens"])[done].sum())
    good = good_requests(durations, meta.get("goodput"))
    return {
        "duration": duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": ratio(int(done.sum()), duration),
        "request_goodput": None if good is None else ratio(int(good.sum()), duration),
        "output_throughput": ratio(tokens_out, duration),
        "total_token_throughput": ratio(tokens_in + tokens_out, duration),
        "max_concurrent_requests": _peak(
            ints(requests["arrival_ns"])[done], ints(requests["finish_ns"])[done]
        ),
    }


def good_requests(
    durations: Mapping[str, Floats], goodput: Mapping[str, float] | None
) -> NDArray[np.bool_] | None:
    """Which requests completed within every limit, in ms; an undefined TPOT counts as 0.

    None without limits.
    """
    if not goodput:
        return None
    good: NDArray[np.bool_] = ~np.isnan(durations["e2el"])
    for metric, limit_ms in goodput.items():
        good &= np.nan_to_num(durations[metric]) <= float(limit_ms) * NS_PER_MS
    return good


def _peak(starts: Ints, ends: Ints) -> int:
    """Most requests at once; a request that ends when another starts does not overlap it."""
    instants = np.concatenate((starts, ends))
    changes = np.repeat((1, -1), len(starts))
    order = np.lexsort((changes, instants))
    return int(np.cumsum(changes[order]).max(initial=0))


def _latencies(
    requests: Mapping[str, Any], durations: Mapping[str, Floats], itl_counts: Mapping[int, int]
) -> dict[str, Any]:
    """Statistics of completed requests in milliseconds, and the means of their phases."""
    done = completed(requests)
    kinds = {
        name: describe(defined(durations[name][done]) / NS_PER_MS)
        for name in ("ttft", "tpot", "e2el", "queue")
    }
    itl = describe_counts(itl_counts)
    kinds["itl"] = {key: None if x is None else x / NS_PER_MS for key, x in itl.items()}
    figures = {
        f"{statistic}_{name}_ms": kinds[name][statistic]
        for name in ("ttft", "tpot", "itl", "e2el", "queue")
        for statistic in STATISTICS
    }
    for name, among in (("prefill", done), ("decode", done), ("client_queue", slice(None))):
        values = defined(durations[name][among])
        figures[f"mean_{name}_ms"] = describe(values / NS_PER_MS, ("mean",))["mean"]
    return figures


def _preemptions(steps: Columns, requests: Mapping[str, Any]) -> dict[str, Any]:
    by_mode = {mode: int(steps[f"preempted_{mode}"].sum()) for mode in ("recompute", "swap")}
    recomputed = int(ints(requests["recomputed_tokens"]).sum())
    parts = ("prefill_tokens", "decode_seqs", "draft_tokens")
    computed = sum(int(np.sum(steps[name])) for name in parts if name in steps)
    return {
        "num_preemptions": sum(by_mode.values()),
        "num_preemptions_by_mode": by_mode,
        "preempted_requests": int((ints(requests["num_preemptions"]) > 0).sum()),
        "recomputed_tokens": recomputed,
        "recompute_tax": ratio(recomputed, computed),
        "swapped_out_blocks": int(steps["swap_out_blocks"].sum()),
        "swapped_in_blocks": int(steps["swap_in_blocks"].sum()),
        "copied_blocks": int(steps["copied_blocks"].sum()),
    }


def _memory(
    rows: Mapping[str, Ints], held_ns: Ints, meta: Mapping[str, Any]
) -> dict[str, float | None]:
    """Shares of the pools, weighted by time over the whole run."""
    gpu, cpu = meta.get("num_gpu_blocks"), meta.get("num_cpu_blocks")
    # A state that lasted no time was never there.
    held = held_ns > 0

    def mean_and_most(column: str) -> tuple[float | None, int]:
        values = rows[column]
        return weighted_mean(values, held_ns), int(values.max(where=held, initial=0))

    used, most = mean_and_most("used_blocks")
    on_cpu, most_on_cpu = mean_and_most("cpu_used_blocks")
    empty, stranded = (mean_and_most(name)[0] for name in ("empty_slots", "stranded_blocks"))
    return {
        "kv_cache_usage_mean": ratio(used, gpu),
        "kv_cache_usage_max": ratio(most, gpu),
        "cpu_cache_usage_mean": ratio(on_cpu, cpu),
        "cpu_cache_usage_max": ratio(most_on_cpu, cpu),
        "internal_fragmentation": ratio(empty, used and used * meta.get("block_size", 0)),
        "external_fragmentation": ratio(stranded, gpu),
    }


def _prefix_cache(requests: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Hits under each definition in use; None where prefix caching is off.

    * `prefix_cache_hit_rate`: tokens, first admissions only: vLLM V1's `prefix_cache_hits` over
      `prefix_cache_queries` (vllm/v1/metrics/stats.py, `PrefixCacheStats`);
    * `prefix_cache_hit_rate_with_preempted`: adds the tokens that re-admissions after a recompute
      preemption hit to both sides, and those that they computed again to the second: a preempted
      request that finds its own blocks raises it;
    * `prefix_cache_block_hit_rate`: block look-ups, as the metric of vLLM 0.6.3 counts them
      (vllm/core/block/common.py, `CacheMetricData`);
    * `prefix_cache_request_hit_share`: requests with any hit at their first admission.
    """
    admitted = ints(requests["first_scheduled_ns"]) >= 0
    cached = ints(requests["num_cached_tokens"])[admitted]
    queries, hits = int(ints(requests["input_length"])[admitted].sum()), int(cached.sum())
    preempted_hits = int(ints(requests["recached_tokens"]).sum())
    lookups = meta.get("cache") or {}
    again = preempted_hits + int(ints(requests["recomputed_tokens"]).sum())
    rates = {
        "prefix_cache_hit_rate": ratio(hits, queries),
        "prefix_cache_hit_rate_with_preempted": ratio(hits + preempted_hits, queries + again),
        "prefix_cache_block_hit_rate": ratio(
            lookups.get("block_hits"), lookups.get("block_lookups")
        ),
        "prefix_cache_request_hit_share": ratio(int((cached > 0).sum()), len(cached)),
    }
    return {
        "prefix_cache_query_tokens": queries,
        "prefix_cache_hit_tokens": hits,
        "prefix_cache_preempted_hit_tokens": preempted_hits,
        **{f"tier{k}_hit_tokens": int(ints(requests[f"tier{k}_hit_tokens"]).sum()) for k in (1, 2)},
        **(rates if meta.get("prefix_caching") else dict.fromkeys(rates)),
    }


def _queues(rows: Mapping[str, Ints], held_ns: Ints, steps: Columns) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in ("waiting", "running", "swapped"):
        values = rows[name]
        figures[f"{name}_mean"] = weighted_mean(values, held_ns)
        figures[f"{name}_max"] = int(values.max(initial=0))
        del values  # Before the next one is made: a long run has many steps.
    causes = range(1, len(BLOCKED))
    numbers = np.bincount(steps["blocked"], minlength=len(BLOCKED)).tolist()
    blocked_steps, why = {BLOCKED[c]: numbers[c] for c in causes}, rows["blocked"]
    blocked_s = {BLOCKED[c]: int(held_ns[why == c].sum()) / NS_PER_S for c in causes}
    return {
        **figures,
        "head_blocked_steps": blocked_steps,
        "head_blocked_s": blocked_s,
        "watermark_wait_steps": blocked_steps["watermark"],
        "watermark_wait_s": blocked_s["watermark"],
    }


def _link(steps: Columns, end_ns: int) -> dict[str, Any]:
    return {
        "link_busy_share": ratio(int(steps["transfer_ns"].sum()), end_ns),
        "link_wait_s": int(steps["link_wait_ns"].sum()) / NS_PER_S,
        "flush_s": int(steps["flush_ns"].sum()) / NS_PER_S,
    }


def draft_figures(engines: Sequence[Columns]) -> dict[str, Any]:
    """Figures of speculative decoding from the steps of engines, as `vllm bench serve` counts them,
    which has the share as a percentage, `spec_decode_acceptance_rate`. The length has the token
    that every step yields. Nothing without drafts."""
    drafting = [steps for steps in engines if "draft_tokens" in steps]
    if not drafting:
        return {}
    names = ("verified_seqs", "draft_tokens", "accepted_tokens")
    drafts, tokens, accepted = (sum(int(np.sum(s[name])) for s in drafting) for name in names)
    rate, further = ratio(accepted, tokens), ratio(accepted, drafts)
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_accepted_share": rate,
        "spec_decode_acceptance_length": None if further is None else 1 + further,
    }


def _stages(steps: Columns, meta: Mapping[str, Any]) -> dict[str, float | None]:
    """The share of time in which the stages of a pipeline compute nothing, while any step is under
    way. Nothing without a pipeline."""
    if "stage_wait_ns" not in steps:
        return {}
    start, end = ints(steps["start_ns"]), ints(steps["end_ns"])
    computing = int((end - start).sum())
    for name in ("send_ns", "stage_wait_ns", "host_ns"):
        computing -= int(np.sum(steps[name]))
    # Steps overlap: of each, only what begins behind the end of the one before is further time.
    before = np.append(0, end[:-1])
    under_way = int(np.maximum(end - np.maximum(start, before), 0).sum())
    stages = meta["config"]["pipeline_parallel_size"]
    busy = ratio(computing, stages * under_way)
    return {"pipeline_bubble_share": None if busy is None else 1 - busy}


SHOWN = ("mean", "p50", "p99")
"""Statistics of each part by itself, over completed requests."""


def ledger_figures(steps: Mapping[str, Any], requests: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the ledger, for a summary.

    * `time_ledger_total_s`, `time_ledger_mean_ms`, `time_ledger_p50_ms`, `time_ledger_p99_ms`: by
      part; percentiles of different parts do not add up;
    * `time_ledger_requests`: for `p50` and `p99`, the completed request whose E2EL is the least
      that 50 % or 99 % of the requests do not exceed; its parts add up;
    * `step_time_s`: by kernel, all steps;
    * `prompt_ledger_tokens`: by part, requests that were ever admitted.
    """
    figures = _times(requests)
    sums = {name: int(np.sum(steps[name])) for name in KERNEL_LABELS if name in steps}
    figures["step_time_s"] = {bare(name): ns / NS_PER_S for name, ns in sums.items()}
    if PROMPT_PARTS[1] in requests:
        figures["prompt_ledger_tokens"] = {
            bare(name): int(np.sum(requests[name])) for name in PROMPT_PARTS
        }
    return figures


def request_at(requests: Mapping[str, Any], percent: float) -> int | None:
    """Index of the completed request at this percentile of E2EL; None if there is none.

    Of several requests with the same E2EL, the first in trace order.
    """
    done = np.flatnonzero(completed(requests))
    if not len(done):
        return None
    e2el = (np.asarray(requests["finish_ns"]) - np.asarray(requests["arrival_ns"]))[done]
    rank = max(math.ceil(percent / 100 * len(done)) - 1, 0)
    return int(done[np.flatnonzero(e2el == np.sort(e2el)[rank])[0]])


def parts_of(requests: Mapping[str, Any], index: int) -> dict[str, int]:
    """The time of one request in nanoseconds, by part."""
    return {name: int(requests[name][index]) for name in TIME_PARTS}


def _times(requests: Mapping[str, Any]) -> dict[str, Any]:
    done = completed(requests)
    total_s: dict[str, float] = {}
    figures: dict[str, Any] = {"time_ledger_total_s": total_s}
    figures |= {f"time_ledger_{statistic}_ms": {} for statistic in SHOWN}
    for name in TIME_PARTS:
        values = ints(requests[name])[done]
        total_s[bare(name)] = int(values.sum()) / NS_PER_S
        for statistic, ms in describe(values / NS_PER_MS, SHOWN).items():
            figures[f"time_ledger_{statistic}_ms"][bare(name)] = ms
    figures["time_ledger_requests"] = {
        f"p{percent}": _one(requests, request_at(requests, percent)) for percent in (50, 99)
    }
    return figures


def _one(requests: Mapping[str, Any], index: int | None) -> dict[str, Any] | None:
    if index is None:
        return None
    parts = parts_of(requests, index)
    return {
        "id": str(requests["id"][index]),
        "e2el_ms": sum(parts.values()) / NS_PER_MS,
        "parts_ms": {bare(name): ns / NS_PER_MS for name, ns in parts.items()},
    }


def bare(name: str) -> str:
    """The name of a part without its unit."""
    return name.rpartition("_")[0]


_SLOWEST = 0.1
TURNS = ((1, 1), (2, 9), (10, None))
"""First and last of the turns whose TTFT has a figure."""


def session_figures(requests: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the sessions; nothing where no session has a second turn.

    * `mean_s`, `p50_s`, `p90_s`: from when a client wants to send the first turn to the end of the
      last one, pauses included (job completion time), of sessions whose turns all completed;
    * `mean_served_s`: the time from when clients want to send turns to their ends;
      `slowest_tenth_served_s`: the mean of the tenth for which that is longest;
    * `mean_ttft_ms`: by turn;
    * `lost_in_pauses_tokens`: prompt tokens of later turns that were in the cache and evicted;
      `lost_between_sessions_tokens`: of first turns;
    * `computed_tokens`: prompt tokens that no hit saved, and those computed again.
    """
    names = np.asarray(requests["session"], dtype=object)
    which = np.flatnonzero(names.astype(bool))
    if len(which) == len(set(names[which])):
        return {}
    released = ints(requests["released_ns"])
    which = which[np.lexsort((which, released[which]))]
    turn: Ints = np.zeros(len(names), dtype=np.int64)
    members: dict[str, list[int]] = {}
    for index in which.tolist():
        turns = members.setdefault(names[index], [])
        turns.append(index)
        turn[index] = len(turns)
    done, finish = completed(requests), ints(requests["finish_ns"])
    whole = [turns for turns in members.values() if done[turns].all()]
    spans = np.array([finish[turns].max() - released[turns[0]] for turns in whole]) / NS_PER_S
    served = np.array([(finish[turns] - released[turns]).sum() for turns in whole]) / NS_PER_S
    # At least one, however few sessions there are.
    slowest = np.sort(served)[-max(1, round(_SLOWEST * len(served))) :]
    ttft_ms = (ints(requests["first_token_ns"]) - ints(requests["arrival_ns"])) / NS_PER_MS
    figures: dict[str, Any] = {
        "num": len(members),
        "completed": len(whole),
        "mean_s": _mean(spans),
        "p50_s": float(np.percentile(spans, 50)) if len(spans) else None,
        "p90_s": float(np.percentile(spans, 90)) if len(spans) else None,
        "mean_served_s": _mean(served),
        "slowest_tenth_served_s": _mean(slowest),
        "mean_ttft_ms": {
            label: _mean(ttft_ms[done & (turn >= first) & (turn <= (last or turn.max()))])
            for label, (first, last) in zip(("first", "early", "late"), TURNS, strict=True)
        },
        "computed_tokens": int(
            (ints(requests["input_length"]) - ints(requests["num_cached_tokens"]))[which].sum()
            + ints(requests["recomputed_tokens"])[which].sum()
        ),
    }
    if "evicted_tokens" in requests:
        lost = ints(requests["evicted_tokens"])
        figures["lost_in_pauses_tokens"] = int(lost[turn > 1].sum())
        figures["lost_between_sessions_tokens"] = int(lost[turn == 1].sum())
    return {"sessions": figures}


def _mean(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None
