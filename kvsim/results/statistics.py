"""Durations of requests; mean, median, deviation and percentiles, the same on every machine.

```
released        arrival      first scheduled      first token        finish
   ├─ client queue ─┼─── queue ───┼───── prefill ──────┼──── decode ────┤
                    ├───────────── TTFT ───────────────┤
                    ├────────────────────── E2EL ───────────────────────┤
```
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.records import Tally

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PERCENTILES = (50, 90, 95, 99)
STATISTICS = ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))
"""Prefixes of result keys, as in `vllm bench serve`."""
LISTED = tuple(name for name in STATISTICS if name != "median")
"""Those that tables list; the median is there as p50."""


def durations_ns(requests: Mapping[str, Any]) -> dict[str, Floats]:
    """Durations of every request in nanoseconds, NaN where undefined.

    Keys: `client_queue`, `queue`, `prefill`, `ttft`, `decode`, `tpot`, `e2el`. TPOT is `decode /
    (tokens - 1)` and undefined for outputs of one token, as in `vllm bench serve`
    (vllm/benchmarks/serve.py, `calculate_metrics`). Tokens are the generated ones; with several
    samples, their mean. Decode includes the time that a preempted request waited to resume.
    """
    arrival, scheduled, token, finish = (
        _instants(requests[name])
        for name in ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
    )
    finish = np.where(completed(requests), finish, np.nan)
    gaps = np.asarray(requests["output_tokens"], dtype=np.float64) / requests["n"] - 1
    decode = finish - token
    return {
        "client_queue": np.where(
            np.isnan(arrival), np.nan, np.asarray(requests["client_queue_ns"], dtype=np.float64)
        ),
        "queue": scheduled - arrival,
        "prefill": token - scheduled,
        "ttft": token - arrival,
        "decode": decode,
        "tpot": np.divide(decode, gaps, out=np.full(len(gaps), np.nan), where=gaps > 0),
        "e2el": finish - arrival,
    }


def completed(requests: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which requests ran to their last token."""
    ran: NDArray[np.bool_] = np.asarray(requests["status"], dtype=object) == "completed"
    return ran


def defined(values: Floats) -> Floats:
    """The values that are not NaN."""
    return values[~np.isnan(values)]


def ints(column: Any) -> Ints:
    """A column as integers of 64 bits."""
    return np.asarray(column, dtype=np.int64)


def _instants(column: Any) -> Floats:
    """Instants as floats (exact below 2**53 ns, 104 days); NaN where the event never happened."""
    values = np.asarray(column, dtype=np.float64)
    return np.where(values < 0, np.nan, values)


def describe(values: Floats, asked: Sequence[str] = STATISTICS) -> dict[str, float | None]:
    """`STATISTICS` of plain values, or those asked for: numpy's linear percentiles, population
    deviation.

    All are None if there are no values. Sums are exactly rounded, so they do not depend on the
    order in which a processor adds.
    """
    if not len(values):
        return dict.fromkeys(asked)
    if not values.any():
        return dict.fromkeys(asked, 0.0)
    mean = _sum(values) / len(values)
    deviation = math.sqrt(_sum((values - mean) ** 2) / len(values)) if "std" in asked else None
    named = _named(mean, deviation, percentiles(values, PERCENTILES))
    return {statistic: named[statistic] for statistic in asked}


def describe_counts(counts: Mapping[int, int]) -> dict[str, float | None]:
    """`STATISTICS` of values given as `{value: how many}`, equal to those of the expanded list."""
    if isinstance(counts, Tally):
        given, weights = counts.arrays()
    else:
        given = np.array(sorted(counts), dtype=np.int64)
        weights = np.array([counts[value] for value in sorted(counts)], dtype=np.int64)
    values = given[weights > 0].astype(float)
    weights = weights[weights > 0]
    if not len(values):
        return dict.fromkeys(STATISTICS)
    total = int(weights.sum())
    mean = _sum(values * weights) / total
    deviation = math.sqrt(_sum((values - mean) ** 2 * weights) / total)
    ends = np.cumsum(weights)
    return _named(mean, deviation, (_percentile(values, ends, p) for p in PERCENTILES))


def weighted_mean(values: NDArray[np.int64], weights: NDArray[np.int64]) -> float | None:
    """The weighted mean; None if the weights add up to 0."""
    total = int(weights.sum())
    if not total:
        return None
    most = max(int(values.max()), -int(values.min()))
    if most * int(weights.max()) < 1 << 53 and most * total < 1 << 63:
        # Every product is exact as a float, so this sum is equal to the exact one, and faster.
        return float(int(values @ weights)) / total
    return _sum(values.astype(float) * weights) / total


def _sum(values: Floats) -> float:
    """The sum, exactly rounded as that of `math.fsum`, which takes longer.

    Each value is a whole number of 53 bits times a power of two. Numbers with the same power are
    added in halves, whose sums are exact as floats.
    """
    fractions, powers = np.frexp(values)
    least = min(int(powers.min()), 53)
    whole, places = (fractions * 2.0**53).astype(np.int64), powers - least
    total = 0
    for half, bits in ((whole >> 27, 27), (whole & (1 << 27) - 1, 0)):
        for place, part in enumerate(np.bincount(places, half).tolist()):
            total += int(part) << place + bits
    return total / (1 << 53 - least)


def ratio(part: float | None, whole: float | None) -> float | None:
    """`part / whole`; None if either is missing or `whole` is 0."""
    return part / whole if part is not None and whole else None


def _percentile(values: Floats, ends: NDArray[np.int64], percent: float) -> float:
    """Linear percentile of `values[i]` repeated up to rank `ends[i]`."""
    position = (int(ends[-1]) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, int(ends[-1]) - 1)
    # Rank r is of the first value that ends behind it.
    pair = values[np.searchsorted(ends, [low, high], side="right")]
    return percentiles(pair, ((position - low) * 100,))[0]


def percentiles(values: Floats, percents: Sequence[float]) -> list[float]:
    """The same floats as `np.percentile` (linear), which takes longer and imports `numpy.ma`.

    Source: numpy 2, lib/_function_base_impl.py, `_lerp`.
    """
    positions = [(len(values) - 1) * (percent / 100) for percent in percents]
    pairs = [(int(each), min(int(each) + 1, len(values) - 1)) for each in positions]
    ordered = np.partition(values, sorted({place for pair in pairs for place in pair}))
    cuts = []
    for position, (low, high) in zip(positions, pairs, strict=True):
        share, below, above = position - low, float(ordered[low]), float(ordered[high])
        step = above - below
        cuts.append(below + step * share if share < 0.5 else above - step * (1 - share))
    return cuts


def _named(mean: float, deviation: float | None, cuts: Iterable[float]) -> dict[str, float | None]:
    percentiles = dict(zip((f"p{p}" for p in PERCENTILES), cuts, strict=True))
    return {"mean": mean, "median": percentiles["p50"], "std": deviation, **percentiles}
