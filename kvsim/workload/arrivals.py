"""When each request is released: as recorded, or by a random process."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import islice
from math import inf, isinf
from operator import eq
from typing import TYPE_CHECKING

from kvsim.errors import ConfigError
from kvsim.workload.source import MAX_NS, NS_PER_S
from kvsim.workload.trace import Row, column

if TYPE_CHECKING:
    import numpy as np

    from kvsim.settings.config import RunConfig

_SUSPICIOUS_RATE = 1000


def release_times(rows: Sequence[Row], config: RunConfig) -> list[int]:
    """When each row's client wants to send it, in nanoseconds from the start of the run.

    With `request_rate`: a random process in file order, exactly as `vllm bench serve` draws it
    (vLLM `benchmarks/serve.py`, `get_request`). Otherwise: the recorded arrivals, spread if
    `spread_ties` is set, then scaled. Rows that wait for another row (`waits_for`) are left out;
    their entries are 0. Without times and a rate, all are sent at once, as by a rate of inf.
    """
    free = [index for index, after in enumerate(waits_for(rows, config)) if after < 0]
    if config.request_rate is None:
        recorded = column(rows, "arrival_ns")
        drawn = _recorded_times([recorded[index] for index in free], config)
    else:
        drawn = _random_times(len(free), config.request_rate, config)
    if len(free) == len(rows):
        return drawn
    times = [0] * len(rows)
    for index, time in zip(free, drawn, strict=True):
        times[index] = time
    return times


def waits_for(rows: Sequence[Row], config: RunConfig) -> Sequence[int]:
    """For each row the index of the row whose completion releases it, or -1.

    Raises `ConfigError` if closed sessions are asked for and no row names a predecessor.
    """
    if config.sessions == "recorded":
        return [-1] * len(rows)
    after: Sequence[int] = column(rows, "after")
    if config.sessions == "closed" and max(after, default=-1) < 0:
        raise ConfigError(
            "sessions: closed needs a trace whose rows say `after`; use --sessions recorded"
        )
    return after


def think_times(rows: Sequence[Row], config: RunConfig) -> list[int]:
    """For each row the nanoseconds from that completion to its release, scaled, then capped.

    Raises `ConfigError` for times without end.
    """
    scale = config.think_time_scale
    cap_ns = inf if config.max_think_time_s is None else config.max_think_time_s * NS_PER_S
    delays_ns: Sequence[int] = column(rows, "delay_ns")
    longest_ns = max(delays_ns, default=0)
    if isinf(scale) or min(longest_ns * scale, cap_ns) >= MAX_NS:
        raise ConfigError(f"think_time_scale: {scale:g} makes the run last for centuries; lower it")
    return [round(min(delay_ns * scale, cap_ns)) for delay_ns in delays_ns]


def arrival_notes(rows: Sequence[Row]) -> list[str]:
    """Warnings about recorded times: a coarse grid, or a rate that suggests the wrong unit."""
    times = [time for time in column(rows, "arrival_ns") if time is not None]
    if len(times) < 2:
        return []
    notes = []
    gaps, span_ns = len(times) - 1, times[-1] - times[0]
    ties = sum(map(eq, times, islice(times, 1, None)))
    if ties * 2 > gaps:
        notes.append(
            f"{100 * ties / gaps:.1f} % of the gaps between arrivals are 0: each recorded time is"
            " an artificial batch; --spread-ties spreads it over the gap that follows"
        )
    if gaps * NS_PER_S > _SUSPICIOUS_RATE * span_ns > 0:
        rate = gaps * NS_PER_S / span_ns
        notes.append(f"{rate:,.0f} requests/s on average: is the unit of the times right?")
    return notes


def missing_arrivals(rows: Sequence[Row], config: RunConfig) -> list[str]:
    """A note, if neither the trace nor the settings say when requests are sent."""
    if config.request_rate is not None or not rows or rows[0].arrival_ns is not None:
        return []
    return [
        "the trace has no arrival times: all requests are sent at once, as with --request-rate inf;"
        " give a rate for anything else"
    ]


def random_stream(seed: int, use: str) -> np.random.Generator:
    """The random numbers for one use, independent of all other uses of the same seed."""
    import numpy as np

    return np.random.default_rng([seed, zlib.crc32(use.encode())])


def _recorded_times(recorded: Sequence[int | None], config: RunConfig) -> list[int]:
    times = [time for time in recorded if time is not None]
    if len(times) < len(recorded):
        times = [0] * len(recorded)
    if config.spread_ties:
        times = _spread(times, config.seed)
    if config.time_scale == 1:
        return times
    if times and times[-1] * config.time_scale >= MAX_NS:
        raise ConfigError(
            f"time_scale: {config.time_scale:g} makes the trace last for centuries; lower it"
        )
    return [round(time * config.time_scale) for time in times]


def _random_times(count: int, rate: float, config: RunConfig) -> list[int]:
    """Cumulative gaps of mean 1/rate; the first request waits one gap, the last is at n/rate."""
    import numpy as np

    if not count or isinf(rate):
        return [0] * count
    if count / rate * NS_PER_S >= MAX_NS:
        raise ConfigError(f"request_rate: {rate:g} makes the run last for centuries; raise it")
    if isinf(config.burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        shape = config.burstiness
        gaps = random_stream(config.seed, "arrivals").gamma(shape, 1 / (rate * shape), count)
    times = np.cumsum(gaps)
    if not np.isfinite(times[-1]):
        raise ConfigError(f"burstiness: {config.burstiness:g} is too small; raise it")
    if times[-1] > 0:
        times *= count / rate / times[-1]
    nanoseconds: list[int] = np.rint(times * NS_PER_S).astype(np.int64).tolist()
    return nanoseconds


def _spread(times: list[int], seed: int) -> list[int]:
    """Move requests that share a time by uniform offsets below the gap to the next time.

    The last group takes the median gap. Sorted in file order, so no request overtakes another.
    """
    import numpy as np

    recorded = np.array(times, dtype=np.int64)
    distinct, group, size = np.unique(recorded, return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        raise ConfigError(
            "spread_ties: the recorded times are all the same; give --request-rate instead"
        )
    gaps = np.diff(distinct)
    gaps = np.append(gaps, int(np.median(gaps)))
    share = random_stream(seed, "spread-ties").random(len(recorded))
    offsets = np.where(size[group] > 1, np.floor(share * gaps[group]), 0).astype(np.int64)
    spread: list[int] = np.sort(recorded + offsets).tolist()
    return spread
