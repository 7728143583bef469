"""Estimates from one exact replay how two runs differ on the traffic that the trace samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvsim.explain.attribution import Pairs, pair
from kvsim.explain.certainty.estimates import Estimate, Floats
from kvsim.explain.certainty.stretches import Figure, together
from kvsim.explain.certainty.verdicts import Comparison, Pair, judge_pairs
from kvsim.results.metrics import HEADLINES, METRICS, value

Runs = Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]

_NS_PER_MS = 1e6
_LATENCIES = ("ttft", "e2el", "queue", "tpot")
_PERCENTILES = (50, 90, 99)
_PHASES = ("prefill", "decode", "client_queue")
_SUMS = {
    "num_preemptions": "num_preemptions",
    "recomputed_tokens": "recomputed_tokens",
    "swapped_out_blocks": "swapped_out_blocks",
    "swapped_in_blocks": "swapped_in_blocks",
    "prefix_cache_hit_tokens": "num_cached_tokens",
}
"""Key of a summary → column of requests that it sums up."""


def compare_replay(runs: Runs, *, level: float, margin: float) -> Comparison:
    """Verdicts on the figures that are computed from requests; all other figures have none.

    Each run is (name, summary, requests). Requests that both runs of a pair completed are paired.
    """
    names = tuple(name for name, *_ in runs)
    values = {
        metric.key: tuple((value(summary, metric.key),) for _, summary, _ in runs)
        for metric in METRICS
        if any(value(summary, metric.key) for _, summary, _ in runs)
    }
    estimates: dict[Pair, Estimate] = {}
    for first in range(len(runs)):
        for other in range(first + 1, len(runs)):
            pairs = pair(runs[first][2], runs[other][2])
            if pairs is not None and pairs.number > 1:
                found = _estimates(pairs, runs[first][2], runs[other][2])
                estimates |= {
                    Pair(key, first, other): estimate
                    for key, estimate in found.items()
                    if key in values and (first == 0 or key in HEADLINES)
                }
    verdicts = judge_pairs(estimates, values, HEADLINES, level=level, margin=margin)
    return Comparison(names, "stretches", (), (), 0, level, margin, values, verdicts)


def _estimates(
    pairs: Pairs, first: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, Estimate]:
    everyone = {
        key: Figure(
            np.asarray(first[column], dtype=float)[pairs.first_rows],
            np.asarray(other[column], dtype=float)[pairs.other_rows],
            partial(np.sum, axis=-1),
        )
        for key, column in _SUMS.items()
    }
    for kind in (*_LATENCIES[:-1], *_PHASES):
        everyone |= _durations(pairs, kind)
    # A TPOT is defined only for outputs of two tokens or more.
    return {**together(everyone), **together(_durations(pairs, "tpot"))}


def _durations(pairs: Pairs, kind: str) -> dict[str, Figure]:
    before, after = pairs.first_ns[kind] / _NS_PER_MS, pairs.other_ns[kind] / _NS_PER_MS
    there = ~(np.isnan(before) | np.isnan(after))
    before, after = before[there], after[there]
    if len(before) < 2:
        return {}
    figures = {f"mean_{kind}_ms": Figure(before, after, _mean)}
    if kind in _LATENCIES:
        for p in _PERCENTILES:
            statistic = partial(np.percentile, q=p, axis=-1)
            figures[f"p{p}_{kind}_ms"] = Figure(before, after, statistic)
    return figures


def _mean(values: Floats) -> Floats:
    return np.asarray(values.mean(axis=-1))
