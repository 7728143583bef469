"""Tells why the slowest requests of a run are slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvsim.errors import OutputError
from kvsim.explain.attribution import LABELS, has_ledger
from kvsim.results.ledger import TIME_PARTS
from kvsim.results.metrics import LATENCIES
from kvsim.results.numerals import count, percent, plural, seconds
from kvsim.results.phases import completed, durations_ns, ints

_NAMED = 3
"""Parts of their time that are named."""


def tail_words(requests: Mapping[str, Any], metric: str) -> tuple[str, list[str]]:
    """The completed request whose latency `metric` (a key of `LATENCIES` but `itl`) is the least
    that 99 % do not exceed, and why it and those above are slow, beside all requests. Raises
    `OutputError` where no request has the latency, or the run no ledger."""
    if not has_ledger(requests):
        raise OutputError("the results have no ledger: written by an older kvsim; run it again")
    latency = np.where(completed(requests), durations_ns(requests)[metric], np.nan)
    everyone = np.flatnonzero(~np.isnan(latency))
    if not len(everyone):
        raise OutputError(f"--p99 {metric}: no request was completed")
    order = everyone[np.argsort(latency[everyone], kind="stable")]
    place = -(-99 * len(order) // 100) - 1
    slow, id, label = order[place:], str(requests["id"][order[place]]), LATENCIES[metric]
    at, median = latency[order[place]] / 1e9, float(np.median(latency[everyone])) / 1e9
    parts = {
        part: ints(requests[part])
        for part in TIME_PARTS
        if metric == "e2el" or part.startswith("waiting_") != (metric == "tpot")
    }
    if metric == "tpot":  # from the first token on
        del parts["own_prefill_ns"]
    if metric == "ttft":
        parts["first_step_ns"] = ints(requests["first_token_ns"]) - ints(
            requests["first_scheduled_ns"]
        )
    means = {part: (ns[slow].mean() / 1e9, ns[everyone].mean() / 1e9) for part, ns in parts.items()}
    largest = sorted(means, key=lambda part: -means[part][0])[:_NAMED]
    named = (
        f"{LABELS[part]} {seconds(means[part][0])} ({seconds(means[part][1])})"
        for part in largest
        if means[part][0]
    )
    arrived = ints(requests["arrival_ns"])[slow] / 1e9
    prompt, cached = ints(requests["input_length"]), ints(requests["num_cached_tokens"])
    alike = (
        f"{count(prompt[rows].mean())} prompt tokens, {percent(hits / max(prompt[rows].sum(), 1))}"
        f" of them found in the cache"
        for rows in (slow, everyone)
        for hits in [int(cached[rows].sum())]
    )
    return id, [
        f"{label} p99: {seconds(at)}, p50: {seconds(median)}. {plural(len(slow), 'request')} of"
        f" {count(len(everyone))} take that long; request {id} is the first of them.",
        f"Where their time goes, on average (in brackets: of all requests): {', '.join(named)}.",
        f"They arrived from {arrived.min():,.1f} s to {arrived.max():,.1f} s, with"
        f" {next(alike)}; all requests have {next(alike)}.",
    ]
