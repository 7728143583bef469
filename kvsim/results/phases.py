"""Splits the life of each request into the durations from which latency figures are computed.

```
released        arrival      first scheduled      first token        finish
   ├─ client queue ─┼─── queue ───┼───── prefill ──────┼──── decode ────┤
                    ├───────────── TTFT ───────────────┤
                    ├────────────────────── E2EL ───────────────────────┤
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
