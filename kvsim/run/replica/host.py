"""Where the requests for an engine arrive in simulated time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kvsim.run.replica.events import Process


class Receiver(Protocol):
    """Where the requests for an engine arrive."""

    next_ns: float
    """When the next request with a fixed send time comes; infinite: never."""
    listens: bool
    """Whether something outside the engine depends on when a request ends."""

    def upcoming(self) -> tuple[float, float]:
        """Returns two times in nanoseconds, infinite for never: when the next request with a fixed
        send time comes, and when the next event outside the engine is due."""

    def collect(self, now_ns: int) -> None:
        """Lets requests arrive that are due until now."""

    def take(self) -> list[Any]:
        """Removes and returns the arrived requests, in order of (arrival, place in the trace)."""

    def release(self, ended: Iterable[Any]) -> None:
        """Tells whoever listens that these requests have ended."""

    def wait(self, until_ns: float) -> Process:
        """Waits until a request arrives, at most until `until_ns`."""
