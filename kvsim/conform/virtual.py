"""Runs a scheduler on the virtual clock of the conformance corpus: every step takes 1.0.

No event loop, no cost model: what remains is every decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

from kvsim.conform.record import Record, finish_record, step_record
from kvsim.conform.tokens import RuleStream
from kvsim.errors import EngineStopped
from kvsim.request import Request
from kvsim.schedule.batch import Batch

STUCK_STEPS = 50
"""Empty steps in a row, with nobody left to arrive, that count as a deadlock."""


def corpus_requests(trace: list[dict[str, Any]]) -> list[tuple[float, Request]]:
    """(arrival, request) of a conformance trace, in order of arrival, ties in file order."""
    requests = []
    for index, row in enumerate(trace):
        n = int(row.get("n", 1))
        lengths = row.get("output_lens")
        tokens = row["prompt_token_ids"]
        stream = RuleStream(row["id"], tokens, n - 1 if n > 1 else None)
        request = Request(
            index,
            row["id"],
            len(tokens),
            max(lengths) if lengths else row["output_len"],
            stream,
            n=n,
            output_lengths=tuple(lengths) if lengths else None,
            priority=row.get("priority", 0),
        )
        request.arrival_ns = round(row["arrival"] * 1e9)
        requests.append((row["arrival"], request))
    requests.sort(key=lambda entry: entry[0])
    return requests


def replay(
    scheduler: Any,
    batch: Batch,
    arrivals: list[tuple[float, Request]],
    max_steps: int = 1_000_000,
    audit: Callable[[], None] | None = None,
) -> Iterator[Record]:
    """The step log of a run; an engine that dies or gets stuck ends it with an error record."""
    time = 0.0
    step = arrived = stuck = 0
    while arrived < len(arrivals) or len(batch):
        if not len(batch) and arrivals[arrived][0] > time:
            time = max(time, float(ceil(arrivals[arrived][0])))
        added = 0
        while arrived < len(arrivals) and arrivals[arrived][0] <= time:
            batch.arrive(arrivals[arrived][1])
            arrived += 1
            added += 1
        now_ns = round(time * 1e9)
        try:
            plan = scheduler.compose(batch, now_ns)
            record = step_record(batch, plan, step, time, added)
            scheduler.overlap(batch, now_ns)
            scheduler.settle(batch, plan, now_ns)
        except EngineStopped as stop:
            yield {"step": step, "time": time, "error": stop.rule}
            return
        yield finish_record(record, batch, batch.ended)
        batch.ended.clear()
        if audit is not None:
            audit()
        step += 1
        time += 1.0
        if step >= max_steps:
            yield {"step": step, "time": time, "error": "max_steps"}
            return
        stuck = stuck + 1 if plan.empty else 0
        if stuck >= STUCK_STEPS and arrived == len(arrivals):
            yield {"step": step, "time": time, "error": "deadlock"}
            return
