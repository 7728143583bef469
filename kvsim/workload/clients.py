"""When each request is released, and which is sent next.

Each comes at its time, which is recorded or drawn, after another request, or when a slot is free.

```
 release time reached ──offer──► slot free? ──yes──► sent ──► ended ──► its next turn, later
                                     └─no─► gate (first released, first sent) ◄─ a slot is free
```
This is pure data: the event loop calls it and keeps the time. A client releases a request at
`released_ns` and sends it at `arrival_ns`; the two differ only under `max_concurrency`.
"""

from __future__ import annotations

import heapq
import zlib
from array import array
from collections.abc import Iterator, Sequence
from math import inf, isinf
from typing import TYPE_CHECKING, Any, NamedTuple

from mypy_extensions import mypyc_attr

from kvsim.core.request import ABORTED, PLAIN, PREFILL, Options, Request
from kvsim.errors import ConfigError
from kvsim.workload.source import MAX_NS, NS_PER_S
from kvsim.workload.trace import Row, Rows, Trace, bare, column

if TYPE_CHECKING:
    import numpy as np

    from kvsim.settings.config import RunConfig


def release_times(rows: Sequence[Row], config: RunConfig) -> list[int]:
    """When each row's client wants to send it, in nanoseconds from the start of the run.

    With `request_rate`: a random process in file order, exactly as `vllm bench serve` draws it
    (vLLM `benchmarks/serve.py`, `get_request`). Otherwise: the recorded arrivals, spread if
    `spread_ties` is set, then scaled. Rows that wait for another row (`waits_for`) are left out;
    their entries are 0. Without times and a rate, all are sent at once, as by a rate of inf.
    """
    free = [index for index, after in enumerate(waits_for(rows, config)) if after < 0]
    if config.request_rate is None:
        recorded = column(rows, "arrival_ns")
        drawn = _recorded_times([recorded[index] for index in free], config)
    else:
        drawn = _random_times(len(free), config.request_rate, config)
    if len(free) == len(rows):
        return drawn
    times = [0] * len(rows)
    for index, time in zip(free, drawn, strict=True):
        times[index] = time
    return times


def waits_for(rows: Sequence[Row], config: RunConfig) -> Sequence[int]:
    """For each row the index of the row whose completion releases it, or -1.

    Raises `ConfigError` if closed sessions are asked for and no row names a predecessor.
    """
    if config.sessions == "recorded":
        return [-1] * len(rows)
    after: Sequence[int] = column(rows, "after")
    if config.sessions == "closed" and max(after, default=-1) < 0:
        raise ConfigError(
            "sessions: closed needs a trace whose rows say `after`; use --sessions recorded"
        )
    return after


def think_times(rows: Sequence[Row], config: RunConfig) -> list[int]:
    """For each row the nanoseconds from that completion to its release, scaled, then capped.

    Raises `ConfigError` for times without end.
    """
    scale = config.think_time_scale
    cap_ns = inf if config.max_think_time_s is None else config.max_think_time_s * NS_PER_S
    delays_ns: Sequence[int] = column(rows, "delay_ns")
    longest_ns = max(delays_ns, default=0)
    if isinf(scale) or min(longest_ns * scale, cap_ns) >= MAX_NS:
        raise ConfigError(f"think_time_scale: {scale:g} makes the run last for centuries; lower it")
    return [round(min(delay_ns * scale, cap_ns)) for delay_ns in delays_ns]


def missing_arrivals(rows: Sequence[Row], config: RunConfig) -> list[str]:
    """A note, if neither the trace nor the settings say when requests are sent."""
    if config.request_rate is not None or not rows or rows[0].arrival_ns is not None:
        return []
    return [
        "the trace has no arrival times: all requests are sent at once, as with --request-rate inf;"
        " give a rate for anything else"
    ]


def random_stream(seed: int, use: str) -> np.random.Generator:
    """The random numbers for one use, independent of all other uses of the same seed."""
    import numpy as np

    return np.random.default_rng([seed, zlib.crc32(use.encode())])


def _recorded_times(recorded: Sequence[int | None], config: RunConfig) -> list[int]:
    times = [time for time in recorded if time is not None]
    if len(times) < len(recorded):
        times = [0] * len(recorded)
    if config.spread_ties:
        times = _spread(times, config.seed)
    if config.time_scale == 1:
        return times
    if times and times[-1] * config.time_scale >= MAX_NS:
        raise ConfigError(
            f"time_scale: {config.time_scale:g} makes the trace last for centuries; lower it"
        )
    return [round(time * config.time_scale) for time in times]


def _random_times(count: int, rate: float, config: RunConfig) -> list[int]:
    """Cumulative gaps of mean 1/rate; the first request waits one gap, the last is at n/rate."""
    import numpy as np

    if not count or isinf(rate):
        return [0] * count
    if count / rate * NS_PER_S >= MAX_NS:
        raise ConfigError(f"request_rate: {rate:g} makes the run last for centuries; raise it")
    if isinf(config.burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        shape = config.burstiness
        gaps = random_stream(config.seed, "arrivals").gamma(shape, 1 / (rate * shape), count)
    times = np.cumsum(gaps)
    if not np.isfinite(times[-1]):
        raise ConfigError(f"burstiness: {config.burstiness:g} is too small; raise it")
    if times[-1] > 0:
        # As vLLM does: the drawn gaps are stretched so that the whole has the rate.
        times *= count / rate / times[-1]
    nanoseconds: list[int] = np.rint(times * NS_PER_S).astype(np.int64).tolist()
    return nanoseconds


def _spread(times: list[int], seed: int) -> list[int]:
    """Move requests that share a time by uniform offsets below the gap to the next time.

    The last group takes the median gap. Sorted in file order, so no request overtakes another.
    """
    import numpy as np

    recorded = np.array(times, dtype=np.int64)
    distinct, group, size = np.unique(recorded, return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        raise ConfigError(
            "spread_ties: the recorded times are all the same; give --request-rate instead"
        )
    gaps = np.diff(distinct)
    gaps = np.append(gaps, int(np.median(gaps)))
    share = random_stream(seed, "spread-ties").random(len(recorded))
    offsets = np.where(size[group] > 1, np.floor(share * gaps[group]), 0).astype(np.int64)
    spread: list[int] = np.sort(recorded + offsets).tolist()
    return spread


SKIPPED = "predecessor-rejected"
"""Reason of a request whose predecessor was never served, so that its prompt does not exist."""


class Released(NamedTuple):
    """The requests that one completion releases."""

    sent: list[Request]
    """Requests that leave the gate now; they are sent, and their times are set."""
    later: list[tuple[int, Request]]
    """Next turns as (release time in ns, request), by time; offer each at its time."""


NOTHING = Released([], [])


class Clients:
    """Every request of a run until it is sent: waiting for its time, its turn or a slot.

    A request whose predecessor was rejected is never sent. It gets the reason `SKIPPED` and is
    listed in `skipped`, and so are all requests that follow it.
    """

    def __init__(
        self,
        requests: Requests | Sequence[Request],
        rows: Sequence[Row],
        release_ns: Sequence[int],
        config: RunConfig,
    ) -> None:
        self.skipped: list[Request] = []
        self.left = len(rows)
        """Requests that are not over."""
        self._requests = requests
        self._release_ns = release_ns
        self._released = bytearray(len(rows))
        """1 for a row that was released, or never will be."""
        self._next: dict[int, list[int]] = {}
        """Row → rows that its completion releases."""
        self._after = waits_for(rows, config)
        first = [index for index, after in enumerate(self._after) if after < 0]
        if len(first) < len(rows):
            for index, after in enumerate(self._after):
                assert after < index, "a row waits for an earlier one"
                if after >= 0:
                    self._next.setdefault(after, []).append(index)
        self._think_ns = think_times(rows, config) if self._next else []
        self._arrival_ns = column(rows, "arrival_ns") if self._next else []
        first.sort(key=release_ns.__getitem__)
        self._first = array("q", first)
        """Rows that wait only for their time, in order."""
        self._slots = len(requests) if config.max_concurrency is None else config.max_concurrency
        self._gate: list[tuple[int, int]] = []
        """Heap of (release time, index) of the requests that wait for a slot."""
        self._expected: dict[int, int] = {}
        """Answers of `expected_ns` that hold until a request is released or time passes."""
        self._asked_ns = -1
        self.listen = bool(self._next) or config.max_concurrency is not None
        """Whether the clients need to hear of ended requests, because sending depends on them."""

    def start(self) -> Iterator[tuple[int, Request]]:
        """Requests that wait only for their time, as (release time in ns, request).

        They are ordered by (release time, position in the trace). Offer each at its time.
        """
        times, requests = self._release_ns.__getitem__, self._requests.__getitem__
        return zip(map(times, self._first), map(requests, self._first), strict=True)

    def expected_ns(self, index: int, now_ns: int) -> int:
        """When a row will be released. If it waits for another one: as if that one ended now, or
        took as long as in the trace if it has not been released yet. A turn that was released or
        will never be is expected last."""
        if now_ns != self._asked_ns:
            self._expected, self._asked_ns = {}, now_ns
        found = self._expected.get(index)
        if found is None:
            found = self._expected[index] = self._foreseen_ns(index, now_ns)
        return found

    def _foreseen_ns(self, index: int, now_ns: int) -> int:
        if self._released[index]:
            return self._release_ns[index] if self._after[index] < 0 else MAX_NS
        before, span_ns = self._after[index], 0
        # Back to a row that was released, or that waits for its time alone.
        while before >= 0 and not self._released[before]:
            span_ns += max(self._think_ns[index], self._recorded_ns(index, before))
            index, before = before, self._after[before]
        if before < 0:
            return self._release_ns[index] + span_ns
        return now_ns + self._think_ns[index] + span_ns

    def _recorded_ns(self, index: int, before: int) -> int:
        """The recorded time between the releases of two rows; 0 if it is unknown."""
        later_ns, earlier_ns = self._arrival_ns[index], self._arrival_ns[before]
        return 0 if later_ns is None or earlier_ns is None else later_ns - earlier_ns

    def offer(self, request: Request, now_ns: int) -> bool:
        """Try to send `request` now: True if it is sent, False if it waits at the gate.

        `ended` returns a waiting request when it is sent.
        """
        request.released_ns = now_ns
        self._released[request.index] = 1
        self._asked_ns = -1
        # Whoever waits at the gate was released earlier and goes first.
        if self._slots and not self._gate:
            self._slots -= 1
            request.arrival_ns = now_ns
            return True
        heapq.heappush(self._gate, (now_ns, request.index))
        return request in self._open_gate(now_ns)

    def ended(self, request: Request, now_ns: int) -> Released:
        """The requests that `request` releases, completed or rejected (it has a reason). What was
        given up releases them, too: their prompts are in the trace."""
        # A rejected request had a slot, too.
        self._slots += 1
        self.left -= 1
        if not self._gate and request.index not in self._next:
            return NOTHING
        later: list[tuple[int, Request]] = []
        for index in self._next.get(request.index, ()):
            if request.reason not in ("", ABORTED):
                self._skip(index)
            else:
                later.append((now_ns + self._think_ns[index], self._requests[index]))
        # Stable: turns of one moment stay in the order of the trace.
        later.sort(key=lambda turn: turn[0])
        return Released(self._open_gate(now_ns), later)

    def _open_gate(self, now_ns: int) -> list[Request]:
        """Send the requests that have waited longest, while there are slots."""
        sent = []
        while self._slots and self._gate:
            released_ns, index = heapq.heappop(self._gate)
            request = self._requests[index]
            request.arrival_ns = now_ns
            request.client_queue_ns = now_ns - released_ns
            self._slots -= 1
            sent.append(request)
        return sent

    def _skip(self, index: int) -> None:
        """Give up a row and all rows that follow it."""
        waiting = [index]
        while waiting:
            index = waiting.pop()
            self._requests[index].reason = SKIPPED
            self._released[index], self._asked_ns = 1, -1
            self.skipped.append(self._requests[index])
            self.left -= 1
            waiting += self._next.get(index, ())


@mypyc_attr(allow_interpreted_subclasses=True)
class Requests:
    """New requests for the rows of a trace, in order; `let_go` drops a request that is over."""

    def __init__(
        self,
        rows: Sequence[Row],
        streams: Any,
        *,
        n: int = 1,
        ignore_eos: bool = False,
        kv_transfer: str = "",
    ) -> None:
        """`streams`: block identities of each row of the trace (`Streams`), or None; `n`: samples
        of each request; `ignore_eos`: clients announce how long outputs become, as benchmarks
        do; `kv_transfer`: as in `Options`. A prefill engine is asked for one token."""
        self._ignore_eos = ignore_eos
        self._kv_transfer = kv_transfer
        self.rows: Sequence[Row] = rows
        self._row = bare(rows)
        lengths = column(rows, "output_length")
        # A column of a long trace is not copied: each replica of a fleet has requests of its own.
        self.output_lengths = lengths if isinstance(lengths, array) else array("q", lengths)
        """Tokens that each sample of a request generates."""
        if kv_transfer == PREFILL:
            self.output_lengths = array("q", [1]) * len(rows)
        self._samples = n
        self._lengths: Sequence[int] = ()
        """Tokens of the prompts, if no row has wishes: it need not be looked at."""
        self._first = 0
        if isinstance(rows, Rows) and n == 1 and not (ignore_eos or kv_transfer):
            self._lengths, self._first = column(rows, "input_length"), rows.first
        self.streams = streams
        self._held: list[Request | None] = [None] * len(rows)
        self._over = bytearray(len(rows))
        """1 for a request that was dropped."""

    def __len__(self) -> int:
        return len(self._over)

    def __getitem__(self, index: int) -> Request:
        held = self._held[index]
        if held is not None:
            return held
        if self._lengths:
            number = self._first + index
            stream = None if self.streams is None else self.streams[number]
            request = Request(number, str(number), self._lengths[index], stream)
        else:
            request = self._wished(self._row(index))
        self._held[index] = request
        return request

    def _wished(self, row: Row) -> Request:
        """A new request as its row asks for it."""
        stream = None if self.streams is None else self.streams[row.index]
        announced = row.output_length if self._ignore_eos else row.max_new_tokens
        plain = not (row.lora or self._kv_transfer)
        return Request(
            row.index,
            row.id,
            row.input_length,
            stream,
            n=self._samples,
            priority=row.priority,
            session=row.session,
            max_new_tokens=1 if self._kv_transfer == PREFILL else announced,
            ignore_eos=self._ignore_eos or row.ignore_eos,
            options=PLAIN if plain else Options(lora=row.lora or "", kv_transfer=self._kv_transfer),
            extra=_known_of(row),
        )

    def admitted(self, index: int) -> bool:
        """Whether a request has been given blocks, or is over."""
        held = self._held[index]
        return bool(self._over[index]) if held is None else held.first_scheduled_ns >= 0

    def let_go(self, request: Request) -> None:
        """Drop a request that is over."""
        self._held[request.index] = None
        self._over[request.index] = 1

    def let_all_go(self) -> None:
        """Drop all requests and their rows, which nothing looks up any more."""
        self._held, self.rows, self._row = [], (), ().__getitem__


def _known_of(row: Row) -> dict[str, Any]:
    """What a trace tells policies of a request, beyond what engines know."""
    if row.extra is None and row.tags is None and row.deadline_ns is None:
        return {}
    deadline = {} if row.deadline_ns is None else {"deadline_s": row.deadline_ns / NS_PER_S}
    return {**(row.tags or {}), **deadline, **(row.extra or {})}


def make_requests(
    trace: Trace,
    rows: Sequence[Row],
    *,
    n: int = 1,
    keyed: bool = True,
) -> list[Request]:
    """All requests of `Requests` in a list."""
    # Here, as whoever draws random numbers imports this module, and numpy takes long.
    from kvsim.workload.keys import streams

    requests = Requests(rows, streams(trace) if keyed else None, n=n)
    return [requests[index] for index in range(len(rows))]
