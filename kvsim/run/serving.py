"""One engine at work in simulated time: its batch, its loop, and what it recorded."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import simpy

from kvsim.core.batch import Batch
from kvsim.core.host import NEVER_NS, Receiver, SimulatedTime
from kvsim.core.loop import NO_LISTENERS, NOBODY, Listeners, Loop
from kvsim.core.records import PackedColumns, transitions
from kvsim.core.request import ABORTED, Request
from kvsim.core.rows import RequestRows, StepRows
from kvsim.core.schema import REQUESTS, TEXT, Source
from kvsim.cost import checked_prices
from kvsim.cost.estimates import StagedCost
from kvsim.errors import EngineStopped
from kvsim.results.ledger.account import account_times
from kvsim.results.ledger.prompts import Rules, account_prompts
from kvsim.run.assembly import Parts
from kvsim.run.blame import blaming
from kvsim.run.replica.time import PipelineTime, Process, Ranks, RankTime
from kvsim.run.result import Books, Outcome, Result, provenance
from kvsim.workload.clients import Requests
from kvsim.workload.trace import Row, Rows, Trace, column

if TYPE_CHECKING:
    from kvsim.run.result import Columns


class Departures(Protocol):
    """Who gives up requests."""

    @property
    def next_ns(self) -> int:
        """When the next request in progress is given up; `NEVER_NS`: none is."""

    def begins(self, request: Request) -> None:
        """A request was sent."""

    def over(self, now_ns: int) -> list[Request]:
        """Takes out the requests in progress that are given up until now, in order."""


class Patience:
    """The requests in progress whose clients will not wait for ever."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._after_ns = column(rows, "abort_after_ns")
        self._due: list[tuple[int, int, Request]] = []
        """Heap of (when its client gives it up, index, request)."""

    def begins(self, request: Request) -> None:
        after_ns = self._after_ns[request.index]
        if after_ns is not None:
            heapq.heappush(self._due, (request.arrival_ns + after_ns, request.index, request))

    @property
    def next_ns(self) -> int:
        while self._due and self._due[0][2].finish_ns >= 0:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else NEVER_NS

    def over(self, now_ns: int) -> list[Request]:
        found = []
        while self.next_ns <= now_ns:
            found.append(heapq.heappop(self._due)[2])
        return found


class Serving:
    """The objects of one engine that change while a run lasts."""

    def __init__(
        self,
        env: simpy.Environment,
        parts: Parts,
        requests: Requests,
        inbox: Receiver,
        *,
        listeners: Listeners = NO_LISTENERS,
        refused: Mapping[str, str] = NOBODY,
        ranks: Ranks | None = None,
        departures: Departures | None = None,
    ) -> None:
        """`refused`: request id → why it is turned away. `ranks`: whose steps begin and end with
        its own. `departures`: who gives up requests, of rows that are not known in advance; a
        watcher then looks at no request that is over."""
        self.parts, self.inbox, self._requests = parts, inbox, requests
        self.archive = Archive(requests.rows, requests.let_go)
        self._host = host = self._host_of(env, ranks)
        forgets = listeners.watcher is None or departures is not None
        departures = departures or _patience(requests.rows)
        scheduler = parts.scheduler
        lengths = requests.output_lengths
        self.batch = Batch(parts.blocks, lengths.__getitem__, scheduler.longest_sequence)
        if parts.blocks.hears is not None:
            parts.blocks.hears.begins(self.batch)
        self.rows = StepRows(scheduler.gauged + host.gauged)
        self._loop = Loop(
            host,
            scheduler,
            self.batch,
            rows=self.rows,
            listeners=listeners,
            refused=refused,
            # Other watchers look at requests that are over.
            over=self.archive.figures.add if forgets else None,
            departures=departures if parts.scheduler.ends_early else None,
        )

    def _host_of(self, env: simpy.Environment, ranks: Ranks | None) -> SimulatedTime:
        """What lets time pass: alone, with the ranks of one engine, or on stages of a pipeline."""
        cost, transfer_ns = self.parts.cost, self.parts.link.transfer_ns
        if isinstance(cost, StagedCost):
            return PipelineTime(env, cost, transfer_ns, self.inbox)
        time = env, checked_prices(cost).step_ns, transfer_ns, self.inbox
        return SimulatedTime(*time) if ranks is None else RankTime(*time, ranks)

    def run(self) -> Process:
        """The engine's loop, for the event loop. Raises `EngineStopped`."""
        steps: Process = self._loop.run()
        return steps

    @property
    def now_ns(self) -> int:
        """When the engine last did anything, or a request came."""
        return self._host.now_ns

    def outcome(self, now_ns: int, stop: EngineStopped | None = None) -> Outcome:
        """Returns how the engine ended, by a stop or because nothing more can happen."""
        batch, steps = self.batch, len(self.rows)
        if stop is not None:
            return Outcome(
                *(stop.kind, now_ns, steps, stop.request_id),
                *(stop.explanation, stop.remedy, stop.rule),
            )
        # The audits of the loop are ever further apart; the last one is here.
        batch.audit()
        return _deadlock(batch, now_ns, steps) if len(batch) else Outcome("finished", now_ns, steps)

    def result(
        self,
        trace: Trace,
        outcome: Outcome,
        indexes: Sequence[int],
        errors: list[Outcome],
        command: str,
    ) -> Result:
        """Returns what the engine did; it must not be used any more.

        `indexes`: the requests that are not stored yet. `errors`: why earlier attempts ended.
        """
        parts, books = self.parts, self._record(outcome, indexes)
        meta = provenance(trace, len(self.indexes), parts, outcome, errors, command)
        if parts.offload is not None:
            meta |= parts.offload.describe()
        return Result(parts.config, meta, books, self.batch.token_gaps_ns, self._log)

    def _record(self, outcome: Outcome, indexes: Sequence[int]) -> Books:
        """Returns the columns of steps and requests, and where time and tokens went."""
        parts, requests, archive, rows = self.parts, self._requests, self.archive, self.rows
        # The last gaps wait to be counted.
        self.batch.count_gaps()
        for index in indexes:
            request = requests[index]
            if request.finish_ns < 0 and not request.reason:
                # It did not end by itself.
                request.reason = "not-served" if outcome.kind == "finished" else outcome.kind
            archive.figures.add(request)
        # The requests of a replica are numbered anew, as those of a trace of its own.
        self.indexes = own = archive.column("index")
        self._log = log = transitions(self.batch.noted)
        blocks, cost, in_flight = parts.blocks, parts.cost, parts.scheduler.in_flight
        config = parts.config
        drafts = parts.speculation and parts.speculation.log
        prompts = requests.streams if blocks.needs_keys else None
        rules = Rules(blocks.block_size, blocks.full_hit.withheld)
        if len(own) < len(requests):
            # A replica of a fleet serves some of the requests; its own are sorted.
            log["request"] = np.searchsorted(own, log["request"])
            prompts = prompts and prompts.picked(own.tolist())

        # Neither refers to a part that leads to the rows of the trace.
        def noted() -> Columns:
            with blaming(config):  # Gauges of a scheduler are read.
                steps = rows.columns()
            if drafts is not None:
                steps = drafts.added_to(steps)
            return steps, archive.columns() | {"index": np.arange(len(own))}

        def accounted(noted: Columns) -> Columns:
            made, columns = noted
            with blaming(config):  # A cost model explains its prices.
                steps, times = account_times(cost, made, columns, log, in_flight)
            if prompts is None:
                return steps, columns | times
            split = account_prompts(prompts, columns, log, rules)
            return steps, columns | times | split

        return Books(noted, accounted)


def _patience(rows: Sequence[Row]) -> Patience | None:
    """When clients give up requests; None: they never do."""
    given_up = column(rows, "abort_after_ns").count(None) < len(rows)
    return Patience(rows) if given_up else None


def _deadlock(batch: Batch, now_ns: int, step: int) -> Outcome:
    """Returns the outcome when nothing can be scheduled or arrive, naming the blocking request."""
    queue = "swapped" if batch.swapped else "waiting"
    head = (batch.swapped or batch.holding or batch.waiting or batch.running)[0]
    return Outcome(
        "deadlock",
        now_ns,
        step,
        head.id,
        f"request {head.id}, at the head of the {queue} queue, can never be scheduled, and nothing"
        f" is running that could free blocks; {len(batch)} requests wait behind it for ever",
        "give the engine more blocks (--num-gpu-blocks-override), a smaller --watermark, or a"
        " larger --max-num-batched-tokens",
    )


_OF_TRACE = Source.TRACE, Source.ADAPTERS
_TRACE = tuple(column for column in REQUESTS.columns if column.source in _OF_TRACE)

_STATUS = {"": "completed", ABORTED: ABORTED}
"""Reason of a request → its status; any other was rejected."""


class Archive:
    """The results of the requests made from some rows of a trace."""

    def __init__(
        self, rows: Sequence[Row], let_go: Callable[[Request], None] | None = None
    ) -> None:
        """`let_go` is called with each request whose results are stored."""
        self._rows = rows
        self.figures = RequestRows(let_go)
        self._said: dict[str, Any] = {}
        """Columns that come from the trace."""

    def missing(self) -> list[int]:
        """Returns the indexes of the rows whose requests are not stored yet."""
        absent = np.ones(len(self._rows), dtype=bool)
        absent[self._stored["index"]] = False
        return list(map(int, np.flatnonzero(absent)))

    def let_rows_go(self) -> None:
        """Takes over what the rows say of the requests stored, so that their memory may be freed.

        No more requests can be stored.
        """
        stored = np.sort(self._stored["index"]).tolist()
        for each in _TRACE:
            values = column(self._rows, each.name)
            if each.source is Source.ADAPTERS and not any(values):
                continue
            if len(stored) < len(self._rows):
                values = [values[index] for index in stored]
            if each.type == TEXT:
                self._said[each.name] = [value or "" for value in values]
            else:
                self._said[each.name] = np.array(values, np.int64)
        if not isinstance(self._rows, Rows):
            # Copies, so that the memory of the rows is free once nothing else needs them.
            self._said["id"] = [f"{each} "[:-1] for each in self._said["id"]]
        self._rows = ()

    def column(self, name: str) -> np.ndarray:
        """Returns one of the columns of numbers that requests have, in trace order."""
        stored = self._stored
        return stored[name][np.argsort(stored["index"])]

    def columns(self) -> dict[str, Any]:
        """Returns the columns of `REQUESTS` that neither files nor the ledger add, in trace order;
        -1 means null."""
        if not self._said:
            self.let_rows_go()
        stored = self._stored
        order = np.argsort(stored["index"])
        columns: dict[str, Any] = {name: stored[name][order] for name in stored}
        reasons = [self.figures.reasons.get(index, "") for index in columns["index"].tolist()]
        status = [_STATUS.get(reason, "rejected") for reason in reasons]
        return columns | self._said | {"status": status, "reason": reasons}

    @property
    def _stored(self) -> PackedColumns:
        """The figures of the requests stored so far, in the order in which they came."""
        self.figures.seal()
        stored: PackedColumns = self.figures.packed
        return stored
