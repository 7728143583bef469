"""Matches what was measured of each request with what a replay of the trace predicts for it.

What was measured is in `Row.observed`, where the readers of traces put it. A client counts from the
moment it sends a request; so does a replay without network and tokenizer. A replay may take other
times for its steps than its prices say (`with_change`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.cost import Cost
from kvsim.errors import ConfigError
from kvsim.fleet import EngineResult
from kvsim.results.statistics import Floats, completed, describe, durations_ns
from kvsim.run.assembly import Parts, assemble
from kvsim.settings.config import RunConfig
from kvsim.workload.source import shown
from kvsim.workload.trace import Row, Trace

if TYPE_CHECKING:
    from kvsim.core.plan import Plan


KINDS = ("queue", "ttft", "tpot", "e2el")
"""Times of a request, as in `kvsim.results.statistics`."""
FITTED = ("ttft", "tpot", "e2el")
"""The times that corrections and constants are fitted to."""
STATISTICS = ("mean", "p50", "p90", "p99")

_OBSERVED = {"queue": "queue_s", "ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s"}
_NS_PER_S = 1e9
_ROUNDED_S = 1e-9
"""A first token may seem to come so much later than the last one."""


class Matched(NamedTuple):
    """The requests that were measured, and that the replay completed, in trace order."""

    rows: NDArray[np.int64]
    """Positions in the trace; `places` are those in the columns of the replay."""
    places: NDArray[np.int64]
    measured_s: dict[str, Floats]
    """Seconds by `KINDS`; NaN where nothing was measured."""
    predicted_s: dict[str, Floats]
    gaps_s: Floats
    """Measured times between consecutive tokens, of all these requests."""

    def pairs(self, kind: str) -> tuple[Floats, Floats]:
        """Measured and predicted seconds of the requests that have both."""
        measured, predicted = self.measured_s[kind], self.predicted_s[kind]
        both = ~np.isnan(measured) & ~np.isnan(predicted)
        return measured[both], predicted[both]

    def has(self, kind: str) -> bool:
        """Whether any request has both."""
        return bool(len(self.pairs(kind)[0]))


def matched(trace: Trace, result: EngineResult) -> Matched:
    """What was measured, and what `result`, a replay of `trace`, predicts.

    Raises `ConfigError` if nothing was measured, or if the replay completed nothing of it.
    """
    require_measured(trace)
    requests = result.requests
    index = np.asarray(requests["index"], dtype=np.int64)
    done = completed(requests)
    known = np.fromiter((bool(trace.rows[i].observed) for i in index), dtype=bool, count=len(index))
    places = np.flatnonzero(done & known)
    if not len(places):
        raise ConfigError(
            f"{trace.path}: the replay completed none of the measured requests; `kvsim run` with"
            " the same settings says why"
        )
    rows = [trace.rows[i] for i in index[places]]
    predicted = durations_ns(requests)
    gaps = [gap for row in rows for gap in (row.observed or {}).get("itl_s", ())]
    return Matched(
        index[places],
        places,
        measured_seconds(trace.path, rows),
        {kind: predicted[kind][places] / _NS_PER_S for kind in KINDS},
        np.array(gaps, dtype=np.float64),
    )


def errors(pairs: Matched, rows: NDArray[np.int64] | None = None) -> dict[str, float]:
    """The logarithm of predicted by measured of each statistic of `FITTED` that has both:
    `ttft_mean` and so on. `rows`: the requests that count, by position in the trace; None: all."""
    counted, found = np.isin(pairs.rows, pairs.rows if rows is None else rows), {}
    for kind in FITTED:
        measured, predicted = pairs.measured_s[kind], pairs.predicted_s[kind]
        both = counted & ~np.isnan(measured + predicted)
        one, other = (describe(side[both], STATISTICS) for side in (measured, predicted))
        for name in STATISTICS:
            real, ours = one[name], other[name]
            if real and ours:
                found[f"{kind}_{name}"] = log(ours / real)
    return found


def require_measured(trace: Trace) -> None:
    """Raise `ConfigError` if no request of the trace says what was measured."""
    keys = _OBSERVED.values()
    if not any(key in (row.observed or {}) for row in trace.rows for key in keys):
        raise ConfigError(
            f"{trace.path}: no measured times; give a result of vllm bench serve"
            " --save-detailed, or the times with --measured FILE"
        )


def measured_seconds(path: str, rows: Sequence[Row]) -> dict[str, Floats]:
    """Measured seconds by kind, NaN where there are none, of rows of the trace with this path.

    TPOT is `(E2EL - TTFT) / (tokens - 1)`, as in `vllm bench serve`. Raises `ConfigError` for times
    that are none.
    """
    found = {kind: _column(path, rows, key) for kind, key in _OBSERVED.items()}
    gaps = np.array([row.output_length - 1 for row in rows], dtype=np.float64)
    decode = found["e2el"] - found["ttft"]
    for place in np.flatnonzero(decode < -_ROUNDED_S)[:1]:
        first, last = (found[kind][place] for kind in ("ttft", "e2el"))
        raise ConfigError(
            f"{path}: observed.ttft_s of request {rows[place].id}: {first:.9g} s is above its"
            f" observed.e2e_s, {last:.9g} s; fix them"
        )
    decode = np.maximum(decode, 0)
    tpot = np.divide(decode, gaps, out=np.full(len(rows), np.nan), where=gaps > 0)
    return {**found, "tpot": np.where(np.isnan(found["tpot"]), tpot, found["tpot"])}


def _column(path: str, rows: Sequence[Row], key: str) -> Floats:
    values = []
    for row in rows:
        value = (row.observed or {}).get(key)
        if value is not None and not (type(value) in (int, float) and 0 <= value < inf):
            raise ConfigError(
                f"{path}: observed.{key} of request {row.id}: {shown(value)} is not a time in"
                " seconds; fix it"
            )
        values.append(np.nan if value is None else float(value))
    return np.array(values)


class Change(NamedTuple):
    """A change of step times."""

    prompts: float = 1.0
    """Factor on the time of steps that compute prompt tokens; `decodes` is the factor on all
    others."""
    decodes: float = 1.0
    step_ns: float = 0.0
    """Nanoseconds added to every step."""
    start_ns: float = 0.0
    """Nanoseconds added to the first step."""


class Slowed:
    """A cost model whose times are changed."""

    def __init__(self, cost: Cost, change: Change) -> None:
        self._cost, self._change = cost, change
        self._start_ns = change.start_ns

    @property
    def kind(self) -> str:
        """The kind of the changed cost model."""
        return self._cost.kind

    @property
    def source(self) -> str:
        """The source of the changed cost model, and the change."""
        return f"{self._cost.source}, changed by {self._change}"

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        factor = self._change.prompts if plan.chunks else self._change.decodes
        start_ns, self._start_ns = self._start_ns, 0.0
        return round(self._cost.step_ns(plan) * factor + self._change.step_ns + start_ns)

    def describe(self) -> dict[str, Any]:
        """The description of the changed cost model, and the change."""
        return {**self._cost.describe(), "source": self.source, "change": self._change._asdict()}


def with_change(change: Change) -> Callable[[RunConfig], Parts]:
    """Returns the factory of a run's objects, for `simulate`, with changed step times."""

    def parts_of(config: RunConfig) -> Parts:
        parts = assemble(config)
        return parts._replace(cost=Slowed(parts.cost, change))

    return parts_of
