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
        tokens, ended = batch.tokens, batch.ended
        self.steps = steps = self.steps + taken
        if tokens == self._tokens and not ended:
            self._idle += taken
            return steps >= MOST_STEPS or self._idle >= self._progress.patience_steps
        self._tokens, self._idle = tokens, 0
        if ended:
            self.ended += ended
            batch.ended = []
            if self._listens:
                return True
        return steps >= MOST_STEPS

    def close(self) -> int:
        """Adds the steps to those of the run. Returns how many there were."""
        self._progress.steps += self.steps
        self._progress.idle_steps = self._idle
        return self.steps
