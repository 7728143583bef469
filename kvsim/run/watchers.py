"""Who looks on while a run lasts, alone or several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request


class Watcher(Protocol):
    """An observer that sees every step in full. It must not change anything."""

    def begin(self) -> None:
        """Called when a run begins. Earlier calls belong to an attempt that was abandoned."""

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """Called when a step was composed, before it runs. `arrived` requests joined the queue
        before it."""

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        """Called when the step composed last is over. `ended` lists the requests that ended in it,
        in order."""


class Watchers:
    """A watcher of a replica that passes every call on to several watchers, in order."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def begin(self) -> None:
        for watcher in self._watchers:
            watcher.begin()

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        for watcher in self._watchers:
            watcher.composed(batch, plan, now_ns, arrived)

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        for watcher in self._watchers:
            watcher.settled(batch, ended)
