"""The HTTP server: routes of vLLM's, each answer the course of requests through a session."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from math import inf, log
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvsim.against.serve.clock import Clock
from kvsim.against.serve.protocol import Answer, Chat, Completion, Tokenize, usage
from kvsim.against.serve.session import Ask, Session
from kvsim.against.serve.watch import Entry

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
ASGI = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

_MOST_BYTES = 1 << 26
"""Of a request's body: a prompt of eight million token ids."""
ARRIVAL = "x-kvsim-arrival-s"
"""When a request arrives, in simulated seconds, where nobody waits for the wall clock."""


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """A request that is answered by an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Front:
    """What the routes share."""

    def __init__(
        self, session: Session, clock: Clock, model_name: str, mean_output_tokens: float
    ) -> None:
        """`mean_output_tokens`: of answers that no client made as long as `max_tokens`."""
        self.session, self.clock, self.model_name = session, clock, model_name
        self.registry = CollectorRegistry()
        self._mean = mean_output_tokens
        self._random = random.Random(session.parts.config.seed)
        assert isinstance(session.parts.config.max_model_len, int)
        self._longest = session.parts.config.max_model_len

    def app(self) -> ASGI:
        """The routes. Streams go past Starlette's wrappers, which would double their cost."""
        answering: dict[str, ASGI] = {
            "/v1/completions": Answering(self, Completion),
            "/v1/chat/completions": Answering(self, Chat),
        }
        others: Any = Starlette(
            routes=[
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/ping", self.health, methods=["GET", "POST"]),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
            ]
        )

        async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
            found = answering.get(scope["path"]) if scope.get("method") == "POST" else None
            await (found or others)(scope, receive, send)

        return app

    async def health(self, request: Request) -> Response:
        """Whether the engine lives."""
        return Response(status_code=200 if self.session.stopped is None else 503)

    async def version(self, request: Request) -> Response:
        """The release of vLLM whose decisions these are."""
        return _json({"version": self.session.parts.config.vllm_version or "0.33.0"})

    async def metrics(self, request: Request) -> Response:
        """What Prometheus scrapes."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """The one model."""
        model = {
            "id": self.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.model_name,
            "parent": None,
            "max_model_len": self._longest,
            "permission": [],
        }
        return _json({"object": "list", "data": [model]})

    async def tokenize(self, request: Request) -> Response:
        """How a text is counted."""
        try:
            tokens = decoded(await request.body(), Tokenize).tokens()
        except (Refused, ValueError) as error:
            return _error(Refused(400, str(error)))
        found = {"count": len(tokens), "max_model_len": self._longest, "tokens": tokens}
        return _json({**found, "token_strs": None})

    def asks(self, asked: Completion | Chat, id: str) -> list[Ask]:
        """What is asked of the engine: each prompt, as often as its samples. Raises `Refused`."""
        if asked.model not in (None, self.model_name):
            raise Refused(404, f"The model `{asked.model}` does not exist.")
        if self.session.stopped is not None:
            raise Refused(500, str(self.session.stopped))
        if self.clock.closing:
            raise Refused(503, "The server is shutting down.")
        try:
            prompts = asked.prompts()
        except ValueError as error:
            raise Refused(400, str(error)) from None
        found: list[Ask] = []
        for prompt in prompts:
            room = self._longest - len(prompt)
            if room < 1:
                raise Refused(
                    400,
                    f"This model's maximum context length is {self._longest} tokens. However, your"
                    f" request has {len(prompt)} input tokens. Please reduce the length of the"
                    " input messages.",
                )
            most = room if asked.most is None else min(asked.most, room)
            if most < 1 or asked.min_tokens > most:
                raise Refused(
                    400, f"max_tokens must be at least 1 and min_tokens, got {asked.most}"
                )
            for _ in range(asked.n or 1):
                length = most if asked.ignore_eos else self._drawn(asked.min_tokens, most)
                place = f"{id}-{len(found)}" if len(prompts) * (asked.n or 1) > 1 else id
                found.append(
                    Ask(
                        *(place, prompt, length, most, asked.ignore_eos),
                        *(asked.priority, asked.cache_salt),
                    )
                )
        return found

    def _drawn(self, least: int, most: int) -> int:
        """Tokens until an answer is over: each may be the last one."""
        if self._mean == inf:
            return most
        ends = -1 / log(1 - 1 / self._mean) if self._mean > 1 else 0
        drawn = 1 + int(self._random.expovariate(1) * ends)
        return min(max(drawn, least), most)

    def arrival_ns(self, headers: dict[bytes, bytes]) -> int:
        """When a request arrives. Raises `Refused`."""
        given = headers.get(ARRIVAL.encode())
        if given is None:
            return self.clock.now_ns()
        try:
            at_ns = round(float(given) * 1e9)
        except (ValueError, OverflowError):
            raise Refused(400, f"{ARRIVAL}: {given.decode('latin-1')!r} is no time") from None
        if not self.clock.virtual or not self.session.now_ns <= at_ns < 1 << 62:
            raise Refused(
                400,
                f"{ARRIVAL}: the time cannot be chosen (it is {self.session.now_ns / 1e9} s);"
                " give a later one, and start kvsim serve with --as-fast-as-possible",
            )
        return at_ns


class Answering:
    """A route whose requests go through the engine; as an ASGI application, so that it hears at
    once of clients that go away."""

    def __init__(self, front: Front, kind: type[Completion] | type[Chat]) -> None:
        self._front, self._kind = front, kind

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        front, headers, changed = self._front, dict(scope["headers"]), asyncio.Event()
        chat = self._kind is Chat
        try:
            asked = decoded(await body_of(receive), self._kind)
            given = headers.get(b"x-request-id", b"").decode("latin-1") or asked.request_id
            id = f"{'chatcmpl' if chat else 'cmpl'}-{given or f'{random.getrandbits(128):032x}'}"
            asks, at_ns = front.asks(asked, id), front.arrival_ns(headers)
        except Refused as error:
            await _error(error)(scope, receive, send)  # type: ignore[arg-type]
            return
        except OSError:  # The client went away before it had asked.
            return
        entries = [front.session.send(ask, at_ns, changed.set) for ask in asks]
        for first in range(0, len(entries), samples := asked.n or 1):
            for entry in entries[first : first + samples]:
                entry.family = entries[first : first + samples]
        front.clock.hold = max(0, front.clock.hold - 1)
        front.clock.wake()
        answer = Answer(chat, id, int(time.time()), front.model_name)
        gone = asyncio.ensure_future(self._gone(receive, entries))
        try:
            if asked.stream:
                await self._stream(send, answer, asked, entries, changed)
            else:
                await self._whole(send, answer, entries, changed)
        except OSError:
            self._cancel(entries)
        finally:
            gone.cancel()

    async def _whole(
        self, send: Send, answer: Answer, entries: Sequence[Entry], changed: asyncio.Event
    ) -> None:
        while not all(entry.reason for entry in entries):
            await changed.wait()
            changed.clear()
        error = next((entry.error for entry in entries if entry.error), "")
        body = _failure(500, error) if error else answer.whole(entries)
        await send(_start(500 if error else 200, b"application/json", len(body), times(entries)))
        await send({"type": "http.response.body", "body": body})

    async def _stream(
        self,
        send: Send,
        answer: Answer,
        asked: Completion | Chat,
        entries: Sequence[Entry],
        changed: asyncio.Event,
    ) -> None:
        """Sends tokens when they come. A client that reads slowly gets several at once, and nothing
        waits for it but its own stream."""
        options, sent = asked.stream_options, [0] * len(entries)
        open_places = [*range(len(entries))]
        around = [answer.around(place, entry) for place, entry in enumerate(entries)]
        often = options is not None and options.continuous_usage_stats
        await send(_start(200, b"text/event-stream; charset=utf-8"))
        if answer.chat:
            opening = b"".join(answer.opening(place) for place in range(len(entries)))
            await send({"type": "http.response.body", "body": opening, "more_body": True})
        while open_places:
            await changed.wait()
            changed.clear()
            events: list[bytes] = []
            for place in [*open_places]:
                entry = entries[place]
                if not (entry.reason or often):
                    if entry.tokens > sent[place]:
                        before, after = around[place]
                        events += (before, entry.text(sent[place]).encode(), after)
                        sent[place] = entry.tokens
                    continue
                if entry.reason:
                    open_places.remove(place)
                if entry.error:
                    events.append(b"data: " + _failure(500, entry.error) + b"\n\n")
                elif entry.reason or entry.tokens > sent[place]:
                    ended = entry.reason and self._front.clock.virtual
                    more = {"kvsim": times([entry])} if ended else {}
                    said = usage([entry]) if often else None
                    events.append(answer.chunk(place, entry, sent[place], said, **more))
                    sent[place] = entry.tokens
            if not open_places:
                events.append(
                    answer.closing(entries if options and options.include_usage else None)
                )
            if events:
                await send(
                    {
                        "type": "http.response.body",
                        "body": b"".join(events),
                        "more_body": bool(open_places),
                    }
                )

    async def _gone(self, receive: Receive, entries: Sequence[Entry]) -> None:
        """Gives the requests up when their client goes away."""
        with suppress(OSError):
            while (await receive())["type"] != "http.disconnect":
                pass
        self._cancel(entries)

    def _cancel(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._front.session.cancel(entry, self._front.clock.now_ns())
        self._front.clock.wake()


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


def decoded(body: bytes, kind: Any) -> Any:
    """A request's body. Raises `Refused`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"{error}") from None


async def body_of(receive: Receive) -> bytes:
    """Raises `Refused`, `OSError`."""
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise OSError("the client went away")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _MOST_BYTES:
            raise Refused(413, f"body: above the limit of {_MOST_BYTES:,} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


def _start(
    status: int, kind: bytes, length: int | None = None, more: dict[str, str] | None = None
) -> dict[str, Any]:
    headers = [(b"content-type", kind)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    headers += [(name.encode(), value.encode()) for name, value in (more or {}).items()]
    return {"type": "http.response.start", "status": status, "headers": headers}


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


_KINDS = {404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


def _failure(status: int, message: str) -> bytes:
    """An error, as vLLM writes it."""
    kind = _KINDS.get(status, "BadRequestError")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return msgspec.json.encode({"error": error})


def _error(error: Refused) -> Response:
    return Response(_failure(error.status, str(error)), error.status, media_type="application/json")
