"""Puts what was measured of each request beside what a replay of the trace predicts for it.

What was measured is in `Row.observed`, where the readers of traces put it. A client counts from the
moment it sends a request; so does a replay without network and tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import ConfigError
from kvsim.fleet.ranks import EngineResult
from kvsim.results.phases import Floats, completed, durations_ns
from kvsim.workload.source import shown
from kvsim.workload.trace import Row, Trace

KINDS = ("queue", "ttft", "tpot", "e2el")
"""Times of a request, as in `kvsim.results.phases`."""

_OBSERVED = {"queue": "queue_s", "ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s"}
_NS_PER_S = 1e9
_ROUNDED_S = 1e-9
"""A first token may seem to come so much later than the last one."""


class Beside(NamedTuple):
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


def beside(trace: Trace, result: EngineResult) -> Beside:
    """What was measured beside what `result`, a replay of `trace`, predicts.

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
    predicted = {kind: ns[places] / _NS_PER_S for kind, ns in durations_ns(requests).items()}
    gaps = [gap for row in rows for gap in (row.observed or {}).get("itl_s", ())]
    return Beside(
        index[places],
        places,
        _measured(trace.path, rows),
        {kind: predicted[kind] for kind in KINDS},
        np.array(gaps, dtype=np.float64),
    )


def require_measured(trace: Trace) -> None:
    """Raise `ConfigError` if no request of the trace says what was measured."""
    keys = _OBSERVED.values()
    if not any(key in (row.observed or {}) for row in trace.rows for key in keys):
        raise ConfigError(
            f"{trace.path}: no measured times; give a result of vllm bench serve"
            " --save-detailed, or the times with --measured FILE"
        )


def _measured(path: str, rows: Sequence[Row]) -> dict[str, Floats]:
    """Seconds by kind. TPOT is `(E2EL - TTFT) / (tokens - 1)`, as in `vllm bench serve`."""
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
