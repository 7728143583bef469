"""inference-perf's `per_request_lifecycle_metrics.json`: a list of requests and their times.

The traps: times are of a clock without a date; counts and times of tokens are in `info`, and in its
`response_metrics` from later versions on; requests with an `error` are left out. `request` is what
was sent, as a text, so nothing is shared. `Row.observed` has `ttft_s` and `e2e_s`.
"""

from __future__ import annotations

from typing import Any

from kvsim.workload.gather import Gathered
from kvsim.workload.head import Head
from kvsim.workload.served import Record, add_served, records
from kvsim.workload.source import Source
from kvsim.workload.trace import Trace

_TIMES = ("start_time", "first_token_time", "end_time")
_NAMES = ("id", "session_id", "model")


def recognises(head: Head) -> bool:
    """Whether this is a list of requests with their times and an `info`."""
    return head.text.lstrip().startswith("[") and all(
        f'"{key}"' in head.text for key in ("start_time", "end_time", "info", "input_tokens")
    )


def read(source: Source) -> Trace:
    """The requests of a benchmark, each when it was sent. Raises `TraceError`."""
    gathered = Gathered(source, "inference-perf")
    for table, where in records(source):
        info = table.get("info")
        if table.get("error") or not isinstance(info, dict):
            gathered.drop("they failed")
            continue
        later = info.get("response_metrics")
        metrics: dict[str, Any] = {**info, **(later if isinstance(later, dict) else {})}
        times = metrics.get("output_token_times")
        first = times[0] if isinstance(times, list) and times else None
        counts = (metrics.get("input_tokens"), metrics.get("output_tokens"))
        timed = Record({**table, "first_token_time": first}, where)
        add_served(source, gathered, timed, counts, _TIMES, _NAMES)
    return gathered.trace()
