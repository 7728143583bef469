"""Shows a run to several watchers at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.engine.batch import Batch
from kvsim.engine.loop import Watcher
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request


class Watchers:
    """A watcher of a replica that passes every call on to several watchers, in order."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def begin(self) -> None:
        """A run begins, or begins again."""
        for watcher in self._watchers:
            watcher.begin()

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """A step was composed."""
        for watcher in self._watchers:
            watcher.composed(batch, plan, now_ns, arrived)

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        """A step has ended."""
        for watcher in self._watchers:
            watcher.settled(batch, ended)
