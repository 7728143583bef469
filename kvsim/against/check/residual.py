"""Splits the difference between predicted and measured times into queue, prefill and decode.

```
E2EL = queue + prefill + decode        TTFT = queue + prefill
```
A server's log says how long a request waited; a client cannot. Then requests that the replay lets
wait for nothing but the step under way show how far off prefills are, and what remains of the
others' TTFT is the queue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvsim.against.check.beside import Beside
from kvsim.results.phases import Floats

FEWEST = 10
"""The fewest requests without a queue from which prefills are judged."""


class Part(NamedTuple):
    """A part of the mean request's time, in milliseconds."""

    name: str
    """`queue`, `prefill`, `decode`, or `first token` for queue and prefill together."""
    measured_ms: float
    predicted_ms: float

    @property
    def difference_ms(self) -> float:
        """Predicted minus measured."""
        return self.predicted_ms - self.measured_ms


class Residual(NamedTuple):
    """Where the difference of the mean E2EL comes from; parts add up to it."""

    parts: tuple[Part, ...]
    method: str
    """How the queue was told from the prefill, in words."""

    @property
    def largest(self) -> Part:
        """The part with the largest difference."""
        return max(self.parts, key=lambda part: abs(part.difference_ms))


def residual(pairs: Beside, requests: dict[str, Any]) -> Residual | None:
    """The split over the requests whose TTFT and E2EL were measured; None if there are none.

    `requests`: the columns of the replay.
    """
    measured, predicted = pairs.measured_s, pairs.predicted_s
    told = ~np.isnan(measured["ttft"] + measured["e2el"] + predicted["ttft"])
    if not told.any():
        return None
    real, ours = (
        {kind: seconds[told] for kind, seconds in side.items()} for side in (measured, predicted)
    )
    decode = _part("decode", real["e2el"] - real["ttft"], ours["e2el"] - ours["ttft"])
    queue, method = _queue(real, ours, _unhindered(requests, pairs)[told])
    if queue is None:
        return Residual((_part("first token", real["ttft"], ours["ttft"]), decode), method)
    prefill = _part("prefill", real["ttft"] - queue, ours["ttft"] - ours["queue"])
    return Residual((_part("queue", queue, ours["queue"]), prefill, decode), method)


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


def _unhindered(requests: dict[str, Any], pairs: Beside) -> np.ndarray:
    """Which requests wait for nothing but the step under way in the replay."""
    waited = requests["first_scheduled_ns"] - requests["arrival_ns"]
    step: np.ndarray = (waited == requests["waiting_step_ns"])[pairs.places]
    return step


def _part(name: str, measured_s: Floats, predicted_s: Floats) -> Part:
    return Part(name, 1e3 * float(measured_s.mean()), 1e3 * float(predicted_s.mean()))
