"""The HTTP interface: routes of vLLM's, each answer the course of requests through a session."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf, log
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvsim.against.serve.clock import Clock
from kvsim.against.serve.protocol import Answer, Chat, Completion, StreamOptions, Tokenize, usage
from kvsim.against.serve.session import Ask, Session
from kvsim.against.serve.watch import Entry

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
ASGI = Callable[[Any, Any, Any], Awaitable[None]]

_MOST_BYTES = 1 << 26
"""Of a request's body: a prompt of eight million token ids."""
ARRIVAL = "x-kvsim-arrival-s"
"""When a request arrives, in simulated seconds, where nobody waits for the wall clock."""
_ANSWERED: dict[str, type[Completion] | type[Chat]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": Chat,
}
_STREAM = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
_ERRORS = {404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """A request that is answered by an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def body(self) -> bytes:
        """The error, as vLLM writes it."""
        kind = _ERRORS.get(self.status, "BadRequestError")
        error = {"message": str(self), "type": kind, "param": None, "code": self.status}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """The answer."""
        return Response(self.body(), self.status, media_type="application/json")


class Changed:
    """Lets the one task of an answer wait until something has changed: an event, but faster."""

    def __init__(self) -> None:
        self._next = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        """Something has changed."""
        if not self._next.done():
            self._next.set_result(None)

    async def wait(self) -> None:
        """Waits for what has changed since the last call."""
        await self._next
        self._next = asyncio.get_running_loop().create_future()


class Front:
    """What the routes share."""

    def __init__(
        self,
        session: Session,
        clock: Clock,
        model_name: str,
        *,
        mean_output_tokens: float = 256.0,
        stream_interval: int = 1,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`mean_output_tokens`: of answers that no client made as long as `max_tokens`.
        `stream_interval`: tokens from one event of a stream to the next, after the first.
        `adapters`: the path of each, by the name with which clients ask for it."""
        self.session, self.clock = session, clock
        self.registry = CollectorRegistry()
        self._models = {model_name: model_name, **(adapters or {})}
        self._model, self._interval, self._mean = model_name, stream_interval, mean_output_tokens
        self._random = random.Random(session.parts.config.seed)
        assert isinstance(session.parts.config.max_model_len, int)
        self._longest = session.parts.config.max_model_len

    def app(self) -> ASGI:
        """The routes. Streams go past Starlette's wrappers, which would double their cost."""
        others = Starlette(
            routes=[
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/ping", self.health, methods=["GET", "POST"]),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
            ]
        )

        async def app(scope: Any, receive: Any, send: Any) -> None:
            kind = _ANSWERED.get(scope["path"]) if scope.get("method") == "POST" else None
            if kind is None:
                await others(scope, receive, send)
            else:
                await self.answer(kind, scope, receive, send)

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
        """The model, and its adapters."""
        told = {"object": "model", "created": int(time.time()), "owned_by": "vllm"}
        models = [
            {"id": name, **told, "root": root, "parent": parent, "permission": []}
            for name, root in self._models.items()
            for parent in [None if name == self._model else self._model]
        ]
        models[0]["max_model_len"] = self._longest
        return _json({"object": "list", "data": models})

    async def tokenize(self, request: Request) -> Response:
        """How a text is counted."""
        try:
            tokens = (await asked_of(request, Tokenize)).tokens()
        except (Refused, ValueError) as error:
            return Refused(400, str(error)).response()
        found = {"count": len(tokens), "max_model_len": self._longest, "tokens": tokens}
        return _json({**found, "token_strs": None})

    async def answer(self, kind: Any, scope: Any, receive: Receive, send: Send) -> None:
        """Lets the engine answer a request, and gives it up when its client goes away."""
        request, changed = Request(scope, receive), Changed()
        try:
            asked = await asked_of(request, kind)
            id = request.headers.get("x-request-id") or asked.request_id or ""
            id = f"{asked.prefix}-{id or f'{random.getrandbits(128):032x}'}"
            asks, at_ns = self.asks(asked, id), self.arrival_ns(request.headers.get(ARRIVAL))
        except Refused as error:
            return await error.response()(scope, receive, send)  # type: ignore[arg-type]
        except ClientDisconnect:
            return None
        entries = [self.session.send(ask, at_ns, changed.set) for ask in asks]
        for place, entry in enumerate(entries):
            first = place - place % (asked.n or 1)
            entry.family = entries[first : first + (asked.n or 1)]
        self.clock.came()
        answer = Answer(kind is Chat, id, int(time.time()), asked.model or self._model)
        gone = asyncio.ensure_future(self._gone(receive, entries))
        try:
            if asked.stream:
                return await self._stream(send, answer, asked, entries, changed)
            while not all(entry.reason for entry in entries):
                await changed.wait()
        finally:
            gone.cancel()
        errors = [Refused(500, entry.error) for entry in entries if entry.error]
        response = errors[0].response() if errors else _json(None, answer.whole(entries))
        response.headers.update(times(entries))
        return await response(scope, receive, send)  # type: ignore[arg-type]

    async def _stream(
        self,
        send: Send,
        answer: Answer,
        asked: Completion | Chat,
        entries: Sequence[Entry],
        changed: Changed,
    ) -> None:
        """Sends tokens when they come. A client that reads slowly gets several at once, and nothing
        waits for it but its own stream."""
        options = asked.stream_options or StreamOptions()
        often, sent = options.continuous_usage_stats, [0] * len(entries)
        around, left = [*map(answer.around, range(len(entries)))], [*range(len(entries))]
        await send(_STREAM)
        events = [answer.opening(len(entries))]
        while left:
            await changed.wait()
            for place in [*left]:
                entry, first = entries[place], sent[place]
                if entry.tokens - first < (self._interval if first else 1) and not entry.reason:
                    continue
                sent[place] = entry.tokens
                if not (entry.reason or often):
                    before, after = around[place]
                    events += (before, entry.text(first).encode(), after)
                    continue
                more: dict[str, Any] = {"usage": usage([entry])} if often else {}
                if entry.reason:
                    left.remove(place)
                    more |= {"kvsim": times([entry])} if self.clock.virtual else {}
                if entry.error:
                    events.append(b"data: " + Refused(500, entry.error).body() + b"\n\n")
                else:
                    events.append(answer.event(place, entry.text(first), entry.reason, **more))
            if not left:
                events.append(answer.closing(entries if options.include_usage else None))
            if events:
                body = b"".join(events)
                await send({"type": "http.response.body", "body": body, "more_body": bool(left)})
                events = []

    def asks(self, asked: Completion | Chat, id: str) -> list[Ask]:
        """What is asked of the engine: each prompt, as often as its samples. Raises `Refused`."""
        if asked.model not in (None, *self._models):
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
        samples = asked.n or 1
        adapter = None if asked.model in (None, self._model) else asked.model
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
            for _ in range(samples):
                length = most if asked.ignore_eos else self._drawn(asked.min_tokens, most)
                place = f"{id}-{len(found)}" if len(prompts) * samples > 1 else id
                wishes = (asked.ignore_eos, asked.priority, asked.cache_salt, adapter)
                found.append(Ask(place, prompt, length, most, *wishes))
        return found

    def _drawn(self, least: int, most: int) -> int:
        """Tokens until an answer is over: each may be the last one."""
        if self._mean == inf:
            return most
        ends = -1 / log(1 - 1 / self._mean) if self._mean > 1 else 0
        drawn = 1 + int(self._random.expovariate(1) * ends)
        return min(max(drawn, least), most)

    def arrival_ns(self, given: str | None) -> int:
        """When a request arrives. Raises `Refused`."""
        if given is None:
            return self.clock.now_ns()
        try:
            at_ns = round(float(given) * 1e9)
        except (ValueError, OverflowError):
            raise Refused(400, f"{ARRIVAL}: {given!r} is no time") from None
        if not self.clock.virtual or not self.session.now_ns <= at_ns < 1 << 62:
            raise Refused(
                400,
                f"{ARRIVAL}: the time cannot be chosen (it is {self.session.now_ns / 1e9} s);"
                " give a later one, and start kvsim serve with --as-fast-as-possible",
            )
        return at_ns

    async def _gone(self, receive: Receive, entries: Sequence[Entry]) -> None:
        """Gives requests up when their client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        for entry in entries:
            self.session.cancel(entry, self.clock.now_ns())
        self.clock.wake()


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


async def asked_of(request: Request, kind: Any) -> Any:
    """What a request asks for. Raises `Refused`, `ClientDisconnect`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise Refused(413, f"body: above the limit of {_MOST_BYTES:,} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"{error}") from None


def _json(content: Any, encoded: bytes = b"") -> Response:
    return Response(encoded or msgspec.json.encode(content), media_type="application/json")
