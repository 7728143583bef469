"""Condenses the ledger of a run: where time and prompt tokens went, in total and for one request.

The meaning of the parts: `kvsim.results.ledger`. Keys are absent if a run has no such ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.results.ledger import KERNEL_LABELS, KERNELS, PROMPT_PARTS, TIME_PARTS
from kvsim.results.phases import completed
from kvsim.results.statistics import describe

SHOWN = ("mean", "p50", "p99")
"""Statistics of each part by itself, over completed requests."""

NS_PER_MS = 1e6
NS_PER_S = 1e9


def ledger_figures(steps: Mapping[str, Any], requests: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the ledger, for a summary.

    * `time_ledger_total_s`, `time_ledger_mean_ms`, `time_ledger_p50_ms`, `time_ledger_p99_ms`: by
      part; percentiles of different parts do not add up;
    * `time_ledger_requests`: for `p50` and `p99`, the completed request whose E2EL is the least
      that 50 % or 99 % of the requests do not exceed; its parts add up;
    * `step_time_s`: by kernel, all steps;
    * `prompt_ledger_tokens`: by part, requests that were ever admitted.
    """
    figures: dict[str, Any] = {}
    if TIME_PARTS[0] in requests:
        figures |= _times(requests)
    if KERNELS[0] in steps:
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
    values: dict[str, NDArray[np.int64]] = {
        name: np.asarray(requests[name], dtype=np.int64)[done] for name in TIME_PARTS
    }
    described = {name: describe(each / NS_PER_MS) for name, each in values.items()}
    figures: dict[str, Any] = {
        "time_ledger_total_s": {
            bare(name): int(each.sum()) / NS_PER_S for name, each in values.items()
        }
    }
    for statistic in SHOWN:
        figures[f"time_ledger_{statistic}_ms"] = {
            bare(name): each[statistic] for name, each in described.items()
        }
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
