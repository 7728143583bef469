"""The rule of every run: it ends, its books balance, and done again it is the same."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from kvsim.errors import ConfigError, PolicyError
from kvsim.run.result import Result
from kvsim.run.serving import Serving
from kvsim.run.simulation import simulate
from kvsim.workload import Trace

LIMIT_S = 10.0
"""CPU seconds after which a run counts as one that never ends; these runs take milliseconds."""
NO_PROGRESS_STEPS = 2_000
"""Steps without progress that are a livelock here, so that one is found soon."""


class NeverEndsError(Exception):
    """A run took more than its share of time."""


class Run(NamedTuple):
    """What came of a run: a result, or else the exception."""

    result: Result | None
    error: BaseException | None = None

    @property
    def kind(self) -> str:
        """`refused`, the class of another exception, or the kind of the outcome."""
        if self.result is None:
            return "refused" if isinstance(self.error, ConfigError) else type(self.error).__name__
        return str(self.result.meta["outcome"]["kind"])


def assert_equal_runs(
    trace: Trace | str,
    settings: Mapping[str, Any],
    where: str,
    *,
    may_crash: bool = False,
    balanced: bool = True,
    limit_s: float = LIMIT_S,
    notes: list[Any] | None = None,
) -> Run:
    """A run of `settings` and the same done again are equal, row by row; returns the first.

    `where` opens every message. `may_crash`: an exception counts as equal to one of the same class,
    as a policy that breaks promises may raise it; `balanced`: the books must balance, as they do
    unless a policy miscounts on purpose. `notes`: a list in which a policy writes down what it
    sees, which is the same in both runs.
    """
    notes = [] if notes is None else notes
    notes.clear()
    first = run(trace, settings, limit_s)
    seen = tuple(notes)
    notes.clear()
    second = run(trace, settings, limit_s)
    where = f"{where}\nsettings: {dict(settings)}"
    for name, each in (("run", first), ("run done again", second)):
        crashed = each.error is not None and each.kind != "refused"
        if crashed and (not may_crash or isinstance(each.error, NeverEndsError)):
            raise AssertionError(f"{name} raises {_shown(each)}; {where}") from each.error
    if first.result is None or second.result is None:
        told = _told(first) == _told(second)
        assert told, f"run: {_shown(first)}; done again: {_shown(second)}; {where}"
        return first
    found = difference(first.result, second.result) or _notes_differ(seen, notes)
    assert not found, f"{found}; {where}"
    if balanced:
        for result in (first.result, second.result):
            found = imbalance(result)
            assert not found, f"{found}; {where}"
    return first


def run(trace: Trace | str, settings: Mapping[str, Any], limit_s: float = LIMIT_S) -> Run:
    """A run with all its books, or the exception that it raises."""
    try:
        with limited(limit_s), quick_livelocks():
            result = simulate(trace, settings)
            assert result.steps is not None
            assert result.summary is not None
    except PolicyError as error:  # What the policy raised, or made kvsim raise.
        return Run(None, error.__cause__)
    except Exception as error:
        return Run(None, error)
    return Run(result)


def difference(first: Result, second: Result) -> str:
    """The first thing in which two runs differ, the most telling ones first; empty: nothing."""
    tables = {
        "steps": (first.steps, second.steps),
        "transitions": (first.transitions, second.transitions),
        "requests": (first.requests, second.requests),
    }
    for name, (ours, theirs) in tables.items():
        found = columns_differ(ours, theirs)
        if found:
            return f"{name}: {found}"
    for key in sorted(first.meta.keys() | second.meta.keys()):
        if first.meta.get(key) != second.meta.get(key):
            return f"meta: {key}: {first.meta.get(key)}, done again {second.meta.get(key)}"
    if dict(first.token_gaps_ns) != dict(second.token_gaps_ns):
        return "token gaps"
    for key in sorted((first.summary.keys() | second.summary.keys()) - {"meta"}):
        ours, theirs = first.summary.get(key), second.summary.get(key)
        if ours != theirs and not (ours != ours and theirs != theirs):
            return f"summary: {key}: {ours}, done again {theirs}"
    return ""


def imbalance(result: Result) -> str:
    """What is wrong with the books of one run; empty: nothing."""
    requests, steps = result.requests, result.steps
    summary, outcome = result.summary, result.meta["outcome"]["kind"]
    ended = summary["completed"] + summary["rejected"] + summary.get("aborted", 0)
    if ended != len(requests["id"]):
        return "requests are neither completed, nor rejected, nor aborted"
    pool = steps["used_blocks"] + steps["cached_blocks"] + steps["free_blocks"]
    if not (pool == result.meta["num_gpu_blocks"]).all():
        return "used, cached and free blocks are not the pool"
    starts, ends = steps["start_ns"], steps["end_ns"]
    # The stages of a pipeline work on several steps at once.
    in_turn = "send_ns" in steps or (ends[:-1] <= starts[1:]).all()
    if not ((starts <= ends).all() and in_turn):
        return "steps overlap"
    for name, column in steps.items():
        if (np.asarray(column) < 0).any():
            return f"steps: {name} is negative"
    done = np.array(requests["status"]) == "completed"
    for before, after in (
        ("arrival_ns", "first_scheduled_ns"),
        ("first_scheduled_ns", "first_token_ns"),
        ("first_token_ns", "finish_ns"),
    ):
        if not (requests[before][done] <= requests[after][done]).all():
            return f"{after} is before {before}"
    preempted = steps["preempted_recompute"].sum() + steps["preempted_swap"].sum()
    if outcome == "finished" and preempted != requests["num_preemptions"].sum():
        return "preemptions of steps and of requests disagree"
    return ""


def columns_differ(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    if list(ours) != list(theirs):
        return f"columns {list(ours)}, done again {list(theirs)}"
    first: tuple[int, str] | None = None
    for name in ours:
        left, right = list(ours[name]), list(theirs[name])
        if left == right:
            continue
        places = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
        place = next(places, min(len(left), len(right)))
        if first is None or place < first[0]:
            first = place, f"{name}[{place}]: {_at(left, place)}, done again {_at(right, place)}"
    return "" if first is None else first[1]


def _notes_differ(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    for place, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        if left != right:
            return f"the policy sees: {left}, done again {right}, note {place}"
    if len(ours) != len(theirs):
        return f"the policy is asked {len(ours)} times, done again {len(theirs)}"
    return ""


def _at(column: list[Any], place: int) -> str:
    return str(column[place]) if place < len(column) else "no row"


def _told(each: Run) -> tuple[str, str]:
    """The text of a refusal is for the user, that of a crash is not."""
    return each.kind, str(each.error) if each.kind == "refused" else ""


def _shown(each: Run) -> str:
    """How a run ended, and where it raised what it raised."""
    error = each.error
    if error is None or each.kind == "refused":
        return f"{each.kind} {error or ''}".strip()
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, NeverEndsError):
        return text
    while error.__cause__ is not None:  # simpy raises a copy
        error = error.__cause__
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(last.filename).name}, {last.name})"


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raises `NeverEndsError` where this takes more CPU time; without signals there is no limit."""
    main = threading.current_thread() is threading.main_thread()
    if not (hasattr(signal, "setitimer") and main):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise NeverEndsError(f"still running after {limit_s:g} CPU seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def quick_livelocks() -> Iterator[None]:
    """Lowers the number of steps that count as a livelock."""
    usual = Serving._host_of

    def impatient(*given: Any) -> Any:
        host = usual(*given)
        host.patience_steps = NO_PROGRESS_STEPS
        return host

    Serving._host_of = impatient  # type: ignore[method-assign]
    try:
        yield
    finally:
        Serving._host_of = usual  # type: ignore[method-assign]
