"""Replays a measured run and condenses what was measured and predicted into one record."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from kvsim.against.check.corrections import corrections, misfit
from kvsim.against.check.remarks import verdict
from kvsim.against.check.suspects import Bench, Signs
from kvsim.against.matched import KINDS, STATISTICS, Matched, require_measured
from kvsim.errors import ConfigError
from kvsim.fleet import EngineResult, simulate_engine
from kvsim.results.phases import Floats
from kvsim.results.plain import plain
from kvsim.results.statistics import describe, describe_counts, ratio
from kvsim.settings.config import RunConfig
from kvsim.version import __version__
from kvsim.workload.trace import Trace

FEWEST = 10
"""The fewest requests without a queue from which prefills are judged."""


Table = dict[str, Any]


def residual(pairs: Matched, requests: dict[str, Any]) -> Table | None:
    """Where the difference of the mean E2EL comes from, over the requests whose TTFT and E2EL were
    measured: parts that add up to it, and how the queue was told from the prefill, in words. None
    if there are no such requests.

    `requests`: the columns of the replay.
    """
    measured, predicted = pairs.measured_s, pairs.predicted_s
    told = ~np.isnan(measured["ttft"] + measured["e2el"] + predicted["ttft"])
    if not told.any():
        return None
    real, ours = (
        {kind: seconds[told] for kind, seconds in side.items()} for side in (measured, predicted)
    )
    queue, method = _queue(real, ours, _unhindered(requests, pairs)[told])
    parts = [_part("first token", real["ttft"], ours["ttft"])]
    if queue is not None:
        prefill = _part("prefill", real["ttft"] - queue, ours["ttft"] - ours["queue"])
        parts = [_part("queue", queue, ours["queue"]), prefill]
    parts.append(_part("decode", real["e2el"] - real["ttft"], ours["e2el"] - ours["ttft"]))
    largest = max(parts, key=lambda part: abs(part["difference_ms"]))
    return {"parts": parts, "largest": largest["name"], "method": method}


def _queue(
    real: dict[str, Floats], ours: dict[str, Floats], unhindered: np.ndarray
) -> tuple[Floats | None, str]:
    """How long each request waited in reality: measured, estimated, or None if unknown."""
    if not np.isnan(real["queue"]).any():
        return real["queue"], "The server measured how long requests waited."
    number = int(unhindered.sum())
    if number < FEWEST:
        return None, (
            f"Queue and prefill cannot be told apart: only {number} requests are predicted to find"
            " no queue."
        )
    ratio = real["ttft"][unhindered].sum() / ours["ttft"][unhindered].sum()
    queue = real["ttft"] - ratio * (ours["ttft"] - ours["queue"])
    return queue, (
        f"Queue and prefill are told apart by the {number:,} requests that are predicted to find no"
        f" queue: their TTFT is {ratio:.2f} times the predicted one."
    )


def _unhindered(requests: dict[str, Any], pairs: Matched) -> np.ndarray:
    """Which requests wait for nothing but the step under way in the replay."""
    waited = requests["first_scheduled_ns"] - requests["arrival_ns"]
    step: np.ndarray = (waited == requests["waiting_step_ns"])[pairs.places]
    return step


def _part(name: str, measured_s: Floats, predicted_s: Floats) -> Table:
    """A part of the mean request's time; the difference is predicted minus measured."""
    measured_ms, predicted_ms = (1e3 * float(each.mean()) for each in (measured_s, predicted_s))
    return {
        "name": name,
        "measured_ms": measured_ms,
        "predicted_ms": predicted_ms,
        "difference_ms": predicted_ms - measured_ms,
    }


SCHEMA = "kvsim.against.check/1"
NEAR = 0.01
"""If no figure is farther off than this, nothing needs a correction."""


def check(
    trace: Trace,
    config: RunConfig,
    *,
    tolerance: float | None = None,
    correct: bool = True,
    command: str = "",
    done: Callable[[int], None] = lambda number: None,
) -> Table:
    """Replay `trace` and compare the prediction with what was measured of its requests.

    The record is made of plain values. Its figures have the keys of the result of `vllm bench
    serve`, each with `measured`, `predicted` and `error` (predicted / measured - 1). `tolerance`:
    the largest error with which the check passes; None: any. With `correct`, corrections are
    tried where a figure is more than `NEAR` off; `done` is called with 1 after each run.

    Raises `ConfigError` if nothing was measured, or if nothing of it could be replayed.
    """
    require_measured(trace)
    result = simulate_engine(trace, config, command=command)
    done(1)
    bench = Bench(trace, config, result, done)
    pairs = bench.base.pairs
    figures = {**_latencies(pairs, result), **_whole(trace, result, pairs)}
    if not figures:
        raise ConfigError(f"{trace.path}: all measured times are 0; give times in seconds")
    worst = max(abs(figure["error"]) for figure in figures.values())
    found = corrections(bench) if correct and worst > NEAR else []
    record: Table = {
        "schema": SCHEMA,
        "kvsim_version": __version__,
        "requests": {
            "measured": sum(bool(row.observed) for row in trace.rows),
            "compared": len(pairs.rows),
        },
        "figures": figures,
        "worst_error": worst,
        "tolerance": tolerance,
        "passed": tolerance is None or worst <= tolerance,
        "spread": {kind: _spread(pairs, kind) for kind in KINDS if pairs.has(kind)},
        "residual": residual(pairs, result.requests),
        "signs": _sides(bench.base.signs),
        "misfit": misfit(pairs),
        "corrections": [each._asdict() for each in found],
        "points": _points(trace, pairs),
        "meta": bench.base.figures["meta"],
    }
    remarks = verdict(record, _tokens_missing(trace, pairs))
    record["verdict"] = [remark._asdict() for remark in remarks]
    checked: Table = plain(record)
    return checked


def _latencies(pairs: Matched, result: EngineResult) -> dict[str, Table]:
    """`mean_ttft_ms` and so on, of the requests that have both."""
    sides = {
        kind: tuple(describe(1e3 * seconds) for seconds in pairs.pairs(kind))
        for kind in KINDS
        if pairs.has(kind)
    }
    if len(pairs.gaps_s):
        ours = describe_counts(result.token_gaps_ns)
        predicted = {name: None if x is None else x / 1e6 for name, x in ours.items()}
        sides["itl"] = describe(1e3 * pairs.gaps_s), predicted
    found = {
        f"{name}_{kind}_ms": _figure(sides[kind][0][name], sides[kind][1][name])
        for kind in ("ttft", "tpot", "itl", "e2el", "queue")
        if kind in sides
        for name in STATISTICS
    }
    return {key: figure for key, figure in found.items() if figure["error"] is not None}


def _whole(trace: Trace, result: EngineResult, pairs: Matched) -> dict[str, Table]:
    """Duration and throughput, from the first arrival to the last token of these requests."""
    rows = [trace.rows[i] for i in pairs.rows]
    ends = pairs.measured_s["e2el"]
    if np.isnan(ends).any() or any(row.arrival_ns is None for row in rows):
        return {}
    sent = np.array([row.arrival_ns for row in rows]) / 1e9
    arrived, finished = (
        np.asarray(result.requests[name])[pairs.places] / 1e9
        for name in ("arrival_ns", "finish_ns")
    )
    lengths = [(row.input_length, row.output_length) for row in rows]
    tokens_in, tokens_out = (sum(column) for column in zip(*lengths, strict=True))
    durations = (
        float((sent + ends).max() - sent.min()),
        float(finished.max() - arrived.min()),
    )
    amounts = {
        "request_throughput": len(rows),
        "output_throughput": tokens_out,
        "total_token_throughput": tokens_in + tokens_out,
    }
    rates = {
        key: _figure(*(ratio(amount, each) for each in durations))
        for key, amount in amounts.items()
    }
    return {"duration": _figure(*durations), **rates}


def _figure(measured: float | None, predicted: float | None) -> Table:
    error = None if predicted is None or not measured else predicted / measured - 1
    if error == inf:  # What was measured is next to nothing.
        error = None
    return {"measured": measured, "predicted": predicted, "error": error}


def _spread(pairs: Matched, kind: str) -> Table:
    """How far single requests are off: the median and p90 of their relative errors' sizes."""
    measured, predicted = pairs.pairs(kind)
    there = measured >= 1e-9  # No clock shows less.
    sizes = np.abs(predicted[there] / measured[there] - 1)
    if not len(sizes):
        return {"requests": 0, "median": None, "p90": None}
    median, p90 = np.percentile(sizes, [50, 90])
    return {"requests": len(sizes), "median": float(median), "p90": float(p90)}


def _sides(found: tuple[Signs, Signs] | None) -> Table | None:
    if found is None:
        return None
    return {name: x._asdict() for name, x in zip(("measured", "predicted"), found, strict=True)}


def _points(trace: Trace, pairs: Matched) -> Table:
    """Every request: its id, and its measured and predicted milliseconds."""
    columns: Table = {"id": [trace.rows[i].id for i in pairs.rows]}
    for kind in KINDS:
        if pairs.has(kind):
            columns[kind] = {
                "measured_ms": _listed(pairs.measured_s[kind]),
                "predicted_ms": _listed(pairs.predicted_s[kind]),
            }
    return columns


def _listed(seconds: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(1e3 * value) for value in seconds]


def _tokens_missing(trace: Trace, pairs: Matched) -> float:
    """Share of the gaps between tokens that the client did not see one by one."""
    expected = sum(
        trace.rows[i].output_length - 1
        for i in pairs.rows
        if "itl_s" in (trace.rows[i].observed or {})
    )
    return 1 - len(pairs.gaps_s) / expected if expected else 0.0
