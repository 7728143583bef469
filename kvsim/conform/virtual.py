"""Runs a scheduler on the virtual clock of the conformance corpus: every step takes 1.0.

No event loop, no cost model: what remains is every decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

from kvsim.batch.batch import Batch
from kvsim.conform.record import Record, finish_record, step_record
from kvsim.conform.tokens import RuleStream
from kvsim.errors import EngineStopped
from kvsim.plan import Plan
from kvsim.request import Request

STUCK_STEPS = 50
"""Empty steps in a row, with nobody left to arrive, that count as a deadlock."""


def corpus_requests(trace: list[dict[str, Any]]) -> list[tuple[float, Request]]:
    """(arrival, request) of a conformance trace, in order of arrival, ties in file order."""
    requests = []
    for index, row in enumerate(trace):
        n = int(row.get("n", 1))
        lengths = row.get("output_lens")
        tokens = row["prompt_token_ids"]
        stream = RuleStream(row["id"], tokens, n - 1 if n > 1 else None, lengths)
        request = Request(
            index,
            row["id"],
            len(tokens),
            max(lengths) if lengths else row["output_len"],
            stream,
            n=n,
            output_lengths=tuple(lengths) if lengths else None,
            priority=row.get("priority", 0),
            prefix_pos=row.get("prefix_pos") or 0,
        )
        request.arrival_ns = round(row["arrival"] * 1e9)
        requests.append((row["arrival"], request))
    requests.sort(key=lambda entry: entry[0])
    return requests


def stalled(record: Record) -> bool:
    """Whether a step did nothing at all."""
    return not any(record[kind] for kind in ("prefill", "decode", "ignored", "preempted"))


def idled(record: Record) -> bool:
    """Whether a step served nobody: nobody came, ran or finished (a preemption is no service)."""
    return not any(record[kind] for kind in ("added", "prefill", "decode", "finished"))


def replay(
    scheduler: Any,
    batch: Batch,
    arrivals: list[tuple[float, Request]],
    max_steps: int = 1_000_000,
    audit: Callable[[], None] | None = None,
    stuck: Callable[[Record], bool] = stalled,
) -> Iterator[Record]:
    """The step log of a run; an engine that dies or gets stuck ends it with an error record.

    `stuck`: which steps count towards a deadlock.
    """
    clock = _Clock(scheduler, batch, arrivals)
    idle = 0
    while clock.unfinished:
        try:
            record = clock.step()
        except EngineStopped as stop:
            yield clock.error(stop.rule)
            return
        yield record
        if audit is not None:
            audit()
        if "drain" in record:
            continue
        if clock.number >= max_steps:
            yield clock.error("max_steps")
            return
        idle = idle + 1 if stuck(record) else 0
        if idle >= STUCK_STEPS and not clock.expects:
            yield clock.error("deadlock")
            return


class _Clock:
    """Hands requests over, lets the engine step, and keeps up to `in_flight` steps unsettled.

    A scheduler without `in_flight` has one step in flight: it composes, and settles at once. With
    two, step i + 1 is composed before step i is settled, and time passes only when one is settled.
    When nothing is left to compose, the last one is *drained*.
    """

    def __init__(self, scheduler: Any, batch: Batch, arrivals: list[tuple[float, Request]]) -> None:
        self._scheduler = scheduler
        self._batch = batch
        self._arrivals = deque(arrivals)
        self._arrive = getattr(scheduler, "arrive", Batch.arrive)
        self._in_flight: int = getattr(scheduler, "in_flight", 1)
        self._unsettled: deque[Plan] = deque()
        self._news = False
        """Whether requests finished that the engine's workers have not been told of: they hear of
        it with the next composed step."""
        self.number = 0
        self.time = 0.0

    @property
    def expects(self) -> bool:
        """Whether somebody has still to arrive."""
        return bool(self._arrivals)

    @property
    def unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._arrivals or len(self._batch) or self._unsettled)

    def error(self, text: str) -> Record:
        """The record that ends a log early."""
        return {"step": self.number, "time": self.time, "error": text}

    def step(self) -> Record:
        """One scheduling call, or a drain."""
        added, refused = self._hand_over()
        now_ns = round(self.time * 1e9)
        batch, unsettled = self._batch, self._unsettled
        if unsettled and not len(batch) and not self._news:
            record: Record = {
                "step": self.number,
                "time": self.time,
                "drain": True,
                "ignored": refused,
            }
            waits = True
        else:
            plan = self._scheduler.compose(batch, now_ns)
            record = step_record(batch, plan, self.number, self.time, added)
            record["ignored"] = refused + record["ignored"]
            self._scheduler.overlap(batch, now_ns)
            unsettled.append(plan)
            waits = len(unsettled) >= self._in_flight or not (plan.computes or len(batch))
        if waits:
            self._scheduler.settle(batch, unsettled.popleft(), now_ns)
            self.time += 1.0
        finish_record(record, batch, batch.ended)
        batch.ended.clear()
        self._news = bool(record["finished"])
        self.number += 1
        return record

    def _hand_over(self) -> tuple[int, list[str]]:
        """Let requests arrive; answers how many did, and who was turned away."""
        arrivals, batch = self._arrivals, self._batch
        if not len(batch) and not self._unsettled and arrivals[0][0] > self.time:
            self.time = max(self.time, float(ceil(arrivals[0][0])))
        handed = 0
        while arrivals and arrivals[0][0] <= self.time:
            self._arrive(batch, arrivals.popleft()[1])
            handed += 1
        refused = [request.id for request in batch.ended]
        return handed - len(refused), refused
