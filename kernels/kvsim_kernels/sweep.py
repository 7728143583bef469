"""Measures a plan's samples one by one, each row on disk before the next is begun.

A session begins and ends with the same anchors; what a killed session has measured is not measured
again.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvsim_kernels.grid import Sample, anchors
from kvsim_kernels.measure import Bench
from kvsim_kernels.rows import RowStore
from kvsim_kernels.timing import Clock, Timing

Report = Callable[[int, int, str], None]
"""(done, of, what is measured now)."""


def missing(store: RowStore, samples: Sequence[Sample]) -> list[Sample]:
    """The samples that have no row yet."""
    return [sample for sample in samples if sample.row() not in store]


def sweep(
    bench: Bench,
    clock: Clock,
    store: RowStore,
    samples: Sequence[Sample],
    *,
    report: Report,
    deadline_s: float = float("inf"),
    facts: dict[str, Any] | None = None,
) -> bool:
    """Measures what is missing; False if `deadline_s` of `time.monotonic` came first.

    `facts` about the session (checks, compile time) are kept in a row of their own.
    """
    todo, session = missing(store, samples), store.sessions
    begin, end = (anchors(samples, split) for split in ("start", "end"))
    _note(store, session, "start", clock, facts or {})
    total, done = len(begin) + len(todo) + len(end), 0
    for sample in [*begin, *todo]:
        if time.monotonic() > deadline_s:
            break
        report(done, total, _title(sample))
        _add(store, sample, bench.time(sample), session)
        done += 1
    complete = done == len(begin) + len(todo)
    for sample in end:
        report(done, total, _title(sample))
        _add(store, sample, bench.time(sample), session)
        done += 1
    _note(store, session, "end", clock, {})
    report(done, total, "")
    return complete


def bar(done: int, of: int, what: str, *, started_s: float) -> None:
    """Progress on standard error: a line that is written over, or a line for every tenth. None
    under `kvsim --quiet`."""
    if os.environ.get("KVSIM_QUIET"):
        return
    share, width = done / max(of, 1), 24
    gone_s = time.monotonic() - started_s
    left = f"{gone_s / share - gone_s:.0f} s left" if share > 0.02 else ""
    if sys.stderr.isatty():
        line = f"{'#' * int(share * width):.<{width}} {done}/{of} {left:11} {what:.40}"
        sys.stderr.write(f"\r{line:<96}" if what else "\r" + " " * 96 + "\r")
    elif done and done * 10 // max(of, 1) > (done - 1) * 10 // max(of, 1):
        sys.stderr.write(f"kvsim: {done}/{of} measured, {gone_s:.0f} s, {left or 'begun'}\n")
    sys.stderr.flush()


def _title(sample: Sample) -> str:
    shape = " ".join(f"{key} {value}" for key, value in sample.shape.items() if key != "seed")
    return f"{sample.kernel} {sample.method}: {shape}"


def _add(store: RowStore, sample: Sample, timing: Timing, session: int) -> None:
    row = sample.row() | {key: round(value, 3) for key, value in asdict(timing).items()}
    if sample.split in ("start", "end"):
        row["session"] = session
    store.append(row)


def _note(store: RowStore, session: int, split: str, clock: Clock, facts: dict[str, Any]) -> None:
    """A row about the session itself."""
    note = {"kernel": "session", "method": "note", "split": split, "shape": {}, "us": 0.0}
    store.append(note | {"session": session, "state": clock.state()} | facts)
