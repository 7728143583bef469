"""The latencies of a measured run, and how far a replay is from them.

What was measured is in `Row.observed` of a trace: `ttft_s` and `e2e_s`, from the moment a request
arrived at the front end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import ConfigError
from kvsim.fleet.ranks import EngineResult
from kvsim.workload.trace import Row, Trace

METRICS = ("ttft", "tpot", "e2el")
STATISTICS = ("mean", "p50", "p90", "p99")

Floats = NDArray[np.float64]


class Latencies(NamedTuple):
    """Latencies in seconds: a row per request, a column for each of `METRICS`. `places` holds the
    requests' places in the trace."""

    places: NDArray[np.int64]
    seconds: Floats

    def of(self, places: NDArray[np.int64]) -> Floats:
        """Returns the rows of these requests, all of which must be present."""
        rows: Floats = self.seconds[np.searchsorted(self.places, places)]
        return rows


def observed(trace: Trace) -> Latencies:
    """Returns the measured latencies. Raises `ConfigError` if there are none."""
    rows = [row for row in trace.rows if _was_measured(row)]
    if not rows:
        raise ConfigError(
            f"{trace.path}: no request has measured times (observed: ttft_s and e2e_s, with more"
            " than one output token); give a result of vllm bench serve --save-detailed"
        )
    times = np.array([[row.observed[key] for key in ("ttft_s", "e2e_s")] for row in rows])  # type: ignore[index]
    gaps = np.array([row.output_length - 1 for row in rows])
    ttft, e2el = times.T
    return Latencies(
        np.array([row.index for row in rows]),
        np.column_stack([ttft, (e2el - ttft) / gaps, e2el]),
    )


def replayed(result: EngineResult) -> Latencies:
    """Returns the replay's latencies of the completed requests with more than one token."""
    columns = result.requests
    arrival, first, finish = (
        np.asarray(columns[name]) for name in ("arrival_ns", "first_token_ns", "finish_ns")
    )
    index, tokens = np.asarray(columns["index"]), np.asarray(columns["output_tokens"])
    done = np.flatnonzero((first >= 0) & (finish >= 0) & (tokens > 1))
    done = done[np.argsort(index[done])]
    arrival, first, finish = (column[done] / 1e9 for column in (arrival, first, finish))
    tpot = (finish - first) / (tokens[done] - 1)
    seconds = np.column_stack([first - arrival, tpot, finish - arrival])
    return Latencies(index[done].astype(np.int64), seconds)


def in_both(one: Latencies, other: Latencies) -> NDArray[np.int64]:
    """Returns the requests that both have, in trace order."""
    both: NDArray[np.int64] = np.intersect1d(one.places, other.places)
    return both


def errors_percent(ours: Floats, real: Floats) -> dict[str, float]:
    """How far the statistics of each metric are off, in percent: `ttft_mean` and so on."""
    found = {}
    for column, metric in enumerate(METRICS):
        pairs = zip(_statistics(ours[:, column]), _statistics(real[:, column]), strict=True)
        for name, (predicted, measured) in zip(STATISTICS, pairs, strict=True):
            found[f"{metric}_{name}"] = (predicted / measured - 1) * 100
    return found


def worst(errors: dict[str, float]) -> float:
    """Returns the greatest absolute error."""
    return max(map(abs, errors.values()))


def _statistics(seconds: Floats) -> Sequence[float]:
    return [float(seconds.mean()), *map(float, np.percentile(seconds, [50, 90, 99]))]


def _was_measured(row: Row) -> bool:
    times: dict[str, Any] = row.observed or {}
    known = all(isinstance(times.get(key), int | float) for key in ("ttft_s", "e2e_s"))
    return known and row.output_length > 1 and 0 < times["ttft_s"] < times["e2e_s"]
