"""Every request is sent once or skipped, in order, and never more at once than allowed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from made import make_trace
from marks import examples

from kvsim.core.request import Request
from kvsim.settings.config import make_config
from kvsim.workload import Row
from kvsim.workload.clients import SKIPPED, Clients


class World:
    """A server that answers every request after a time of its own: the smallest event loop."""

    def __init__(
        self, rows: list[Row], release_ns: list[int], limit: int | None, rejected: set[int]
    ) -> None:
        self.requests = [Request(row.index, row.id, 4) for row in rows]
        settings = {} if limit is None else {"max_concurrency": limit}
        self.clients = Clients(self.requests, rows, release_ns, make_config(settings))
        self.sent: list[tuple[int, int]] = []
        """(time, index) in order of sending."""
        self.in_flight = self.most_in_flight = 0
        self._rejected = rejected
        self._events: list[tuple[int, int, int, Callable[[int], None]]] = []
        self._serial = 0

    def play(self, service_ns: list[int]) -> None:
        self._service_ns = service_ns
        for time, request in self.clients.start():
            self._at(time, 0, lambda now, r=request: self._offer(r, now))
        while self._events:
            time, *_, happen = heapq.heappop(self._events)
            happen(time)

    def _at(self, time: int, rank: int, happen: Callable[[int], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time, rank, self._serial, happen))

    def _offer(self, request: Request, now: int) -> None:
        if self.clients.offer(request, now):
            self._serve(request, now)

    def _serve(self, request: Request, now: int) -> None:
        assert request.arrival_ns == now
        self.sent.append((now, request.index))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._at(now + self._service_ns[request.index], 1, lambda end: self._end(request, end))

    def _end(self, request: Request, now: int) -> None:
        self.in_flight -= 1
        request.finish_ns = now
        if request.index in self._rejected:
            request.reason = "too-long"
        sent, later = self.clients.ended(request, now)
        for other in sent:
            self._serve(other, now)
        for time, other in later:
            assert time >= now
            self._at(time, 0, lambda at, r=other: self._offer(r, at))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[Row], list[int], list[int], int | None]:
    size = draw(st.integers(1, 12))
    times = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    release_ns, delays, service_ns = draw(times), draw(times), draw(times)
    rows = []
    for row in make_trace([(4, 4, None)] * size).rows:
        after = draw(st.integers(-1, row.index - 1))
        rows.append(replace(row, after=after, delay_ns=delays[row.index]))
    limit = draw(st.sampled_from([None, 1, 2, 3]))
    rejected = draw(st.sets(st.integers(0, size - 1), max_size=2))
    world = World(rows, release_ns, limit, rejected)
    return world, rows, release_ns, service_ns, limit


@settings(max_examples=examples(200))
@given(worlds())
def test_every_request_is_sent_once_or_skipped(
    case: tuple[World, list[Row], list[int], list[int], int | None],
) -> None:
    world, rows, release_ns, service_ns, limit = case
    world.play(service_ns)
    requests = world.requests
    sent = [index for _, index in world.sent]
    skipped = [request.index for request in world.clients.skipped]
    assert sorted(sent + skipped) == list(range(len(rows)))
    assert limit is None or world.most_in_flight <= limit
    for row in rows:
        request = requests[row.index]
        if row.index in skipped:
            assert request.reason == SKIPPED
            assert requests[row.after].reason, "only what waits for a failure is skipped"
            continue
        assert request.arrival_ns == request.released_ns + request.client_queue_ns
        if row.after < 0:
            assert request.released_ns == release_ns[row.index]
        else:
            assert not requests[row.after].reason
            assert request.released_ns == requests[row.after].finish_ns + row.delay_ns
        if limit is None:
            assert request.client_queue_ns == 0


@settings(max_examples=examples(200))
@given(worlds())
def test_the_gate_is_first_come_first_served(
    case: tuple[World, list[Row], list[int], list[int], int | None],
) -> None:
    world, _, _, service_ns, _ = case
    world.play(service_ns)
    waited = [world.requests[i] for _, i in world.sent if world.requests[i].client_queue_ns]
    order = [(request.released_ns, request.index) for request in waited]
    assert order == sorted(order)
    for request in waited:
        for _, index in world.sent:
            other = world.requests[index]
            if other.released_ns > request.released_ns:
                assert other.arrival_ns >= request.arrival_ns, "nobody jumps the queue"


def test_a_full_server_stays_full() -> None:
    """All released at 0 with two slots: each completion sends the next at the same instant."""
    rows = make_trace([(4, 4, None)] * 5).rows
    world = World(rows, [0] * 5, 2, set())
    world.play([10, 20, 30, 5, 5])
    assert world.sent == [(0, 0), (0, 1), (10, 2), (20, 3), (25, 4)]
    assert [request.client_queue_ns for request in world.requests] == [0, 0, 10, 20, 25]
    assert all(request.released_ns == 0 for request in world.requests)


def test_all_that_follows_a_rejected_request_is_skipped() -> None:
    rows = make_trace([(4, 4, None)] * 6).rows
    rows = [
        replace(row, after=after) for row, after in zip(rows, [-1, 0, 1, 1, -1, 4], strict=True)
    ]
    world = World(rows, [0] * 6, None, {0})
    world.play([1] * 6)
    assert sorted(request.index for request in world.clients.skipped) == [1, 2, 3]
    assert [request.reason for request in world.requests] == [
        "too-long",
        SKIPPED,
        SKIPPED,
        SKIPPED,
        "",
        "",
    ]
