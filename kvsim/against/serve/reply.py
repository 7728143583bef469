"""Sends an answer: as it comes, or in one piece once it is whole."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvsim.against.serve.options import Options
from kvsim.against.serve.protocol import Answer, Chat, Completion, Refused, StreamOptions, usage
from kvsim.against.serve.watch import Entry, nobody

ARRIVAL = "x-kvsim-arrival-s"
"""When a request arrives, in simulated seconds, where nobody waits for the wall clock."""
_STREAM = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


@dataclass(slots=True)
class _Sample:
    """One of the texts of a stream."""

    entry: Entry
    place: int
    before: bytes
    """What stands before new text in an event that says nothing else."""
    after: bytes
    sent: int = 0
    """Tokens that are sent."""


class Reply:
    """The answer to a request.

    A step that makes tokens sends them itself, without a task that it would have to wake, unless
    the client reads too slowly: that one gets several tokens at once, when it has read what was
    sent before, and nobody waits for it.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        answer: Answer,
        asked: Completion | Chat,
        entries: Sequence[Entry],
        options: Options,
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._answer, self._entries = answer, entries
        self._interval, self._virtual = options.stream_interval, options.virtual
        self._options = asked.stream_options or StreamOptions()
        self.error: Exception | None = None
        """Why it could not be sent."""
        self._task = asyncio.current_task()
        self._sending: asyncio.Future[None] | None = None
        """What waits for a slow client."""
        self._left: list[_Sample] = []
        self._head = b""
        self._streams = bool(asked.stream)
        for entry in entries:
            entry.client = self._changed
        if self._streams:
            self._left = [
                _Sample(entry, place, *answer.around(place)) for place, entry in enumerate(entries)
            ]
            self._head = answer.opening(len(entries))
            self._begin(send(_STREAM))

    def close(self) -> None:
        """The client is gone, or has everything."""
        if self._sending is not None:
            self._sending.cancel()

    def _changed(self) -> None:
        """There are new tokens, or ends."""
        if not self._streams:
            if all(entry.reason for entry in self._entries):
                self._begin(self._whole())
        elif self._sending is None and self._left and (body := self._events()):
            more = bool(self._left)
            self._begin(self._send({"type": "http.response.body", "body": body, "more_body": more}))

    def _begin(self, sending: Any) -> None:
        """Lets it run as far as it goes at once, which is to its end for all but slow clients."""
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        except Exception as error:
            self._fail(error)
            return
        self._sending = asyncio.ensure_future(_rest(sending, waits_for))
        self._sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Future[None]) -> None:
        self._sending = None
        if sending.cancelled():
            return
        if isinstance(error := sending.exception(), Exception):
            self._fail(error)
        elif self._streams:
            self._changed()

    def _fail(self, error: Exception) -> None:
        """Ends the task that waits for the client; the engine serves the others on."""
        self.error, self._left = error, []
        for entry in self._entries:
            entry.client = nobody
        if self._task is not None:
            self._task.cancel()

    def _events(self) -> bytes:
        """What a stream tells next."""
        events, often = [self._head], self._options.continuous_usage_stats
        for sample in self._left:
            entry, first = sample.entry, sample.sent
            if entry.tokens - first < (self._interval if first else 1) and not entry.reason:
                continue
            sample.sent = entry.tokens
            if often or entry.reason:
                events.append(self._event(entry, sample.place, first))
            else:
                events += (sample.before, entry.text(first), sample.after)
        if len(events) == 1:
            return b""
        self._head = b""
        self._left = [sample for sample in self._left if not sample.entry.reason]
        if not self._left:
            used = self._entries if self._options.include_usage else None
            events.append(self._answer.closing(used))
        return b"".join(events)

    def _event(self, entry: Entry, place: int, first: int) -> bytes:
        """What a sample gets that is not mere tokens."""
        if entry.error:
            return b"data: " + Refused(entry.error, 500).body() + b"\n\n"
        more: dict[str, Any] = {}
        if self._options.continuous_usage_stats:
            more["usage"] = usage([entry])
        if entry.reason and self._virtual:
            more["kvsim"] = times([entry])
        return self._answer.event(place, entry.text(first), entry.reason, **more)

    async def _whole(self) -> None:
        if error := next((each.error for each in self._entries if each.error), ""):
            response = Refused(error, 500).response()
        else:
            response = Response(self._answer.whole(self._entries), media_type="application/json")
        response.headers.update(times(self._entries))
        await response(self._scope, self._receive, self._send)


@types.coroutine
def _rest(begun: Any, waits_for: Any) -> Generator[Any, None, None]:
    """The rest of a coroutine that has begun, and waits for something."""
    yield waits_for
    yield from begun


def times(entries: Sequence[Entry]) -> dict[str, str]:
    """Simulated seconds of requests: the first arrival, the first token, the last end."""
    requests: list[Any] = [entry.request for entry in entries]
    firsts = [each.first_token_ns for each in requests if each.first_token_ns >= 0]
    found = {
        ARRIVAL: min(each.arrival_ns for each in requests),
        "x-kvsim-first-token-s": min(firsts, default=-1),
        "x-kvsim-finish-s": max(each.finish_ns for each in requests),
    }
    return {name: f"{ns / 1e9:.9f}" for name, ns in found.items() if ns >= 0}
