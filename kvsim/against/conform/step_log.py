"""Writes the step log of any run, record by record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from kvsim.against.conform.record import Record, finish_record, step_record
from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.writing import replacing


class StepLog:
    """A file of step records; it appears under its name only when the run is over.

    A context manager, and a watcher of a replica. `time` is in simulated seconds. Raises
    `OutputError` where the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._record: Record = {}
        self._step = 0

    def __enter__(self) -> StepLog:
        with ExitStack() as opened:
            partial = opened.enter_context(replacing(self._path))
            self._file = opened.enter_context(partial.open("w", encoding="utf-8", newline="\n"))
            self._opened = opened.pop_all()
        return self

    def begin(self) -> None:
        """Start over: what was written belongs to an attempt that was given up."""
        self._file.seek(0)
        self._file.truncate()
        self._step = 0

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """Take down a step that has just been composed."""
        self._record = step_record(batch, plan, self._step, now_ns / 1e9, arrived)

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        """Complete the record and write it."""
        finish_record(self._record, batch, ended)
        self._file.write(json.dumps(self._record, separators=(",", ":")) + "\n")
        self._step += 1

    def stopped(self, outcome: Mapping[str, Any]) -> None:
        """The run is over; if the engine died or got stuck, the last record says so."""
        if outcome["kind"] != "finished":
            text = outcome["rule"] or outcome["kind"]
            record = {"step": self._step, "time": outcome["time_s"], "error": text}
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)
