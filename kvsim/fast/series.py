"""Counts the steps that a short cut takes, as the loop counts those that it takes one by one."""

from __future__ import annotations

from kvsim.engine.batch import Batch
from kvsim.engine.loop import Progress
from kvsim.engine.request import Request

MOST_STEPS = 10_000
"""Most steps taken at once, so that a progress display is updated regularly."""


class Series:
    """Steps taken at once."""

    def __init__(self, batch: Batch, progress: Progress, listens: bool) -> None:
        """`listens` says whether a client waits for a request to end."""
        self._batch, self._progress, self._listens = batch, progress, listens
        self._idle, self._tokens = progress.idle_steps, batch.tokens
        self.steps = 0
        self.ended: list[Request] = []
        """The requests that ended, in order."""

    def count(self, taken: int) -> bool:
        """Counts steps just taken. Returns whether the loop has to act: it tells clients of ends,
        shows progress, and stops a run that makes none."""
        batch = self._batch
        self.steps += taken
        if batch.tokens != self._tokens or batch.ended:
            self._tokens, self._idle = batch.tokens, 0
        else:
            self._idle += taken
        if batch.ended:
            self.ended += batch.ended
            batch.ended = []
            if self._listens:
                return True
        return self.steps >= MOST_STEPS or self._idle >= self._progress.patience_steps

    def close(self) -> int:
        """Adds the steps to those of the run. Returns how many there were."""
        self._progress.steps += self.steps
        self._progress.idle_steps = self._idle
        return self.steps
