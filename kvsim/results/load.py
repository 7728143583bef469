"""Says how much was offered, how much of it was served, and whether the engine kept up.

```
first release        middle                     last release
      ├─────────────────┼── late requests ──────────┤ ─ ─ ─ ─ the rest is served
                  queue, backlog              queue, backlog
```
*Offered* is the rate at which clients released requests: those after the first, over the time from
the first release to the last. *Served* are completed requests over the whole run (`duration`), so
the last outputs lower it even in a run that kept up. Whether a run kept up shows while requests
still come in, from the middle of the releases to the last one. The queue holds those released and
never yet scheduled; the backlog, all released and not yet over.

* *overloaded*: the queue grew by more than chance explains;
* *rejecting*: more than 1 % of the requests were rejected;
* *backlogged*: requests waited for longer than they were served, or would have come more than 10 %
  faster if none had waited;
* *never steady*: the backlog grew, the queue did not: what the run measures would go on to change.

Chance explains twice the square root of the late requests: two standard deviations of the number
that arrives in such a time, if arrivals are random. Clients whose turns wait for replies throttle
themselves, so that no queue of theirs grows. Their *demand* is the offered rate if each turn came
earlier by all the time that turns of its session before it waited.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, sqrt
from typing import Any, Literal

import numpy as np

from kvsim.results.numerals import count, show
from kvsim.results.statistics import Ints, ints

State = Literal["steady", "overloaded", "rejecting", "backlogged", "never steady", "unknown"]
OVERLOADED: State = "overloaded"
_CHANCE = 2.0
"""Standard deviations that chance explains."""
_FEW, _HELD_BACK = 0.01, 1.1
"""The share of requests that may be rejected, and the demand over the offered rate."""


def load_figures(requests: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Offered rates, and how queue and backlog grew; rates are None without two releases."""
    released = ints(requests["released_ns"])
    came = released >= 0
    first, last = (int(end(released[came])) if came.any() else 0 for end in (np.min, np.max))
    middle = first + (last - first) // 2
    number = int(came.sum())
    rate = (number - 1) * 1e9 / (last - first) if last > first else None

    def tokens_per_second(tokens: Ints) -> float | None:
        return None if rate is None else rate * float(tokens[came].mean())

    outputs = ints(requests["output_length"]) * ints(requests["n"])
    served = came & np.array([status != "rejected" for status in requests["status"]], dtype=bool)
    return {
        "request_rate": rate,
        "demand_rate": _demand(requests, released) or rate,
        "output_token_rate": tokens_per_second(outputs),
        "total_token_rate": tokens_per_second(ints(requests["input_length"]) + outputs),
        "late_requests": int((released > middle).sum()),
        "queue_growth": _growth(requests, served, "first_scheduled_ns", middle, last),
        "backlog_growth": _growth(requests, served, "finish_ns", middle, last),
    }


def state_of(figures: Mapping[str, Any]) -> State:
    """Whether the run with these figures kept up; unknown if all requests came at once."""
    rate, chance = figures.get("request_rate"), _CHANCE * sqrt(figures.get("late_requests") or 0)
    if rate is not None and figures["queue_growth"] > chance:
        return "overloaded"
    if figures.get("rejected", 0) > _FEW * figures.get("num_requests", 0):
        return "rejecting"
    if rate is None:
        return "unknown"
    waiting, running = (figures.get(f"{each}_mean") or 0 for each in ("waiting", "running"))
    if waiting > running or held_back(figures):
        return "backlogged"
    return "never steady" if figures["backlog_growth"] > chance else "steady"


def held_back(figures: Mapping[str, Any]) -> bool:
    """Whether waiting slows the clients down, because they wait for replies."""
    return bool((figures.get("demand_rate") or 0) > _HELD_BACK * (figures["request_rate"] or inf))


def rates_words(figures: Mapping[str, Any]) -> str:
    """`offered 3.40 req/s (2,390 tok/s), served 1.65 req/s (1,160 tok/s)`."""
    served = _pair(figures, "request_throughput", "total_token_throughput")
    if figures.get("request_rate") is None:
        return f"served {served}"
    return f"offered {_pair(figures, 'request_rate', 'total_token_rate')}, served {served}"


def load_words(figures: Mapping[str, Any]) -> str:
    """One sentence on offered and served load."""
    rates = rates_words(figures)
    state, late = state_of(figures), count(figures.get("late_requests") or 0)
    if state == "overloaded":
        grew = count(figures["queue_growth"])
        return f"{rates}; of the last {late} requests, {grew} piled up in the queue"
    if state == "never steady":
        grew = count(figures["backlog_growth"])
        return (
            f"{rates}; with the last {late} requests, those in progress rose by {grew}: give it a"
            " longer trace"
        )
    if state == "backlogged" and held_back(figures):
        demand = show(figures["demand_rate"], "requests/s")
        return f"{rates}; clients would send {demand} if none waited"
    if state == "backlogged":
        return f"{rates}; requests waited for longer than they were served"
    return rates


def _growth(requests: Mapping[str, Any], which: Any, leave: str, middle: int, last: int) -> int:
    """How many more requests were there at the last release than in the middle of all."""
    released, left = (ints(requests[name])[which] for name in ("released_ns", leave))

    def there(now_ns: int) -> int:
        return int((released <= now_ns).sum() - ((left >= 0) & (left <= now_ns)).sum())

    return there(last) - there(middle)


def _demand(requests: Mapping[str, Any], released: Ints) -> float | None:
    """The rate of releases if no turn had waited for those before it to wait; None where sessions
    do not wait for replies, or all would come at once."""
    if not any(requests["session"]):
        return None
    ended, begun = ints(requests["finish_ns"]), ints(requests["first_scheduled_ns"])
    waited = np.maximum(begun - released, 0)
    before: dict[str, tuple[int, int]] = {}
    would = []
    columns = (released.tolist(), ended.tolist(), waited.tolist())
    for session, sent_ns, end_ns, wait_ns in zip(requests["session"], *columns, strict=True):
        if sent_ns < 0:
            continue
        reply_ns, held_ns = before.get(session, (0, 0))
        # It did not wait for the reply before it, so waiting holds nobody back.
        if sent_ns < reply_ns:
            return None
        would.append(sent_ns - held_ns)
        if session:
            before[session] = end_ns, held_ns + wait_ns
    span_ns = max(would) - min(would) if would else 0
    return (len(would) - 1) * 1e9 / span_ns if span_ns else None


def _pair(figures: Mapping[str, Any], requests: str, tokens: str) -> str:
    rates = show(figures.get(requests), "requests/s"), show(figures.get(tokens), "tokens/s")
    return f"{rates[0]} ({rates[1]})"
