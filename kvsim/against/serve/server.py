"""The HTTP interface: vLLM's routes, each answer the course of requests through a session, served
until a signal ends it. A clock lets the session keep pace with the wall clock, and measures how
late it is.
"""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf, log
from typing import Any

import msgspec
import numpy as np
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvsim.against.serve.kv_events import KVEvents, KVEventsConfig, Publisher
from kvsim.against.serve.metrics import EngineMetrics
from kvsim.against.serve.protocol import ARRIVAL, Answer, Chat, Completion, Refused, Reply, Tokenize
from kvsim.against.serve.session import Options, Session
from kvsim.against.serve.watch import Entry, Step
from kvsim.core.batch import Batch
from kvsim.core.host import NEVER_NS
from kvsim.errors import ConfigError
from kvsim.workload.trace import Row, TokenContent

_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_KEPT = 100_000
"""Latest steps whose lateness is kept."""
_AT_ONCE_NS = 10_000_000
"""Wall time after which a session that is behind lets others be heard."""

_ANSWERED: dict[str, type[Completion] | type[Chat]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": Chat,
}
_MOST_BYTES = 1 << 26
"""Of a request's body: a prompt of eight million token ids."""

_GRACE_S = 5
"""Seconds that slow readers have to take the rest once the server is told to end."""


class Clock:
    """Simulated time as the wall's times a speed, or as fast as possible.

    Lateness is the wall time from when the tokens of a step were due until all streams whose
    clients read fast enough have them. What is late is sent at once, several tokens together.
    """

    def __init__(self, session: Session, options: Options, registry: CollectorRegistry) -> None:
        self.hold = options.hold
        """Requests that have to come until the time goes on."""
        self.closing = False
        self._session, self._speed, self._virtual = session, options.speed, options.virtual
        self._origin_ns = time.monotonic_ns()
        self._wake = asyncio.Event()
        self._due_ns: list[int] = []
        """When the tokens that are not sent yet were due, by step."""
        self._late_s: deque[float] = deque(maxlen=_KEPT)
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self._histogram = Histogram(
            "kvsim:lateness_seconds",
            "Wall time by which tokens were sent later than the simulated step ended.",
            registry=registry,
            buckets=_BOUNDS,
        )
        session.steps.listeners.append(self._stepped)

    def now_ns(self) -> int:
        """The simulated time at which something that happens now happens."""
        if self._virtual:
            return self._session.now_ns
        return max(self._session.now_ns, self._reached_ns())

    def wake(self) -> None:
        """A request is given up, or all are."""
        self._wake.set()

    def came(self) -> None:
        """A client has sent what it wants."""
        self.hold = max(0, self.hold - 1)
        self.wake()

    async def play(self) -> None:
        """Lets the session go on until it is closed."""
        session = self._session
        while not self.closing:
            self._wake.clear()
            now_ns = -1 if self.hold else NEVER_NS - 1 if self._virtual else self._reached_ns()
            until_ns = time.monotonic_ns() + _AT_ONCE_NS
            # As fast as possible means, too, that clients hear of each step before the next one.
            while session.next_ns <= now_ns and not (self._virtual and self._due_ns):
                session.step()
                if time.monotonic_ns() > until_ns:
                    break  # Others are heard, however far behind it is.
            if self._due_ns:
                session.steps.tell_clients()
                await asyncio.sleep(0)  # The event loop sends what streams wrote,
                await asyncio.sleep(0)  # and hears what comes.
                self._sent()
            elif session.next_ns > now_ns:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._left_s()):
                        await self._wake.wait()
            else:
                await asyncio.sleep(0)

    def report(self) -> list[str]:
        """How late the session was, for people."""
        if self._virtual or not self._late_s:
            return []
        late, step = np.percentile(self._late_s, [50, 99]), float(np.median(self._steps_s))
        said = (
            f"{len(self._late_s):,} steps, tokens late by {late[0] * 1e3:.1f} ms (p50),"
            f" {late[1] * 1e3:.1f} ms (p99); a step took {step * 1e3:.1f} ms (p50)"
        )
        if late[1] <= step:
            return [said]
        return [said, "p99 lateness exceeds a step: times that clients saw are not to be trusted;"
                " give a lower --speed, fewer streams or a faster machine"]  # fmt: skip

    def _reached_ns(self) -> int:
        return int((time.monotonic_ns() - self._origin_ns) * self._speed)

    def _left_s(self) -> float | None:
        """Wall time until something is due; None: nothing is."""
        if self.hold or self._session.next_ns == NEVER_NS:
            return None
        return max(0.0, (self._session.next_ns - self._reached_ns()) / 1e9 / self._speed)

    def _stepped(self, batch: Batch, step: Step) -> None:
        self._due_ns.append(step.now_ns)
        if not self._virtual:
            before_ns = next((each.last_ns for each, _ in step.tokens if each.last_ns >= 0), -1)
            if before_ns >= 0:
                self._steps_s.append((step.now_ns - before_ns) / 1e9 / self._speed)

    def _sent(self) -> None:
        due_ns, self._due_ns = self._due_ns, []
        if not self._virtual:
            for each in due_ns:
                late_s = (self._reached_ns() - each) / 1e9 / self._speed
                self._late_s.append(late_s)
                self._histogram.observe(late_s)


class Front:
    """What the routes share."""

    def __init__(
        self,
        session: Session,
        clock: Clock,
        model_name: str,
        options: Options,
        registry: CollectorRegistry,
    ) -> None:
        self.session, self.clock, self._registry = session, clock, registry
        self._models = {model_name: model_name, **options.adapters}
        self._model, self._options = model_name, options
        self._random = random.Random(session.parts.config.seed)
        assert isinstance(session.parts.config.max_model_len, int)
        self._longest = session.parts.config.max_model_len

    def app(self) -> ASGIApp:
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

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
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
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

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
        except Refused as error:
            return error.response()
        found = {"count": len(tokens), "max_model_len": self._longest, "tokens": tokens}
        return _json({**found, "token_strs": None})

    async def answer(self, kind: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets the engine answer a request, and gives it up when its client goes away."""
        request = Request(scope, receive)
        try:
            asked = await asked_of(request, kind)
            given = request.headers.get("x-request-id") or asked.request_id
            id = f"{asked.prefix}-{given or f'{random.getrandbits(128):032x}'}"
            rows = self.rows(asked, id, self.arrival_ns(request.headers.get(ARRIVAL)))
        except Refused as error:
            return await error.response()(scope, receive, send)
        except ClientDisconnect:
            return None
        entries = self._sent(rows, asked.n or 1)
        answer = Answer(kind is Chat, id, int(time.time()), asked.model or self._model)
        reply = Reply(scope, receive, send, answer, asked, entries, self._options)
        self.clock.came()
        try:
            while (await receive())["type"] != "http.disconnect":
                pass  # Which comes, too, when all is sent.
        except asyncio.CancelledError:
            if reply.error is not None:
                raise reply.error from None
            raise
        finally:
            reply.close()
            for entry in entries:
                self.session.cancel(entry, self.clock.now_ns())
            self.clock.wake()

    def _sent(self, rows: list[Row], samples: int) -> list[Entry]:
        """The entries of rows that the engine gets; samples of a prompt know each other."""
        entries = [self.session.send(row) for row in rows]
        for place, entry in enumerate(entries):
            first = place - place % samples
            entry.family = entries[first : first + samples]
        return entries

    def rows(self, asked: Completion | Chat, id: str, at_ns: int) -> list[Row]:
        """What is asked of the engine: each prompt, as often as its samples. Raises `Refused`."""
        if asked.model not in (None, *self._models):
            raise Refused(f"The model `{asked.model}` does not exist.", 404)
        if self.session.stopped is not None:
            raise Refused(str(self.session.stopped), 500)
        if self.clock.closing:
            raise Refused("The server is shutting down.", 503)
        prompts = [prompt for prompt in asked.prompts() for _ in range(asked.n or 1)]
        found: list[Row] = []
        for place, prompt in enumerate(prompts):
            most = self._most(asked, len(prompt))
            row = Row(
                index=place,
                id=f"{id}-{place}" if len(prompts) > 1 else id,
                line=0,
                arrival_ns=at_ns,
                input_length=len(prompt),
                output_length=most if asked.ignore_eos else self._drawn(asked.min_tokens, most),
                content=TokenContent(tuple(prompt)),
                salt=asked.cache_salt,
                priority=asked.priority,
                max_new_tokens=most,
                ignore_eos=asked.ignore_eos,
                lora=None if asked.model == self._model else asked.model,
            )
            found.append(row)
        return found

    def _most(self, asked: Completion | Chat, prompt_tokens: int) -> int:
        """The most tokens that an answer may have. Raises `Refused`."""
        room = self._longest - prompt_tokens
        if room < 1:
            raise Refused(
                f"This model's maximum context length is {self._longest} tokens. However, your"
                f" request has {prompt_tokens} input tokens. Please reduce the length of the"
                " input messages."
            )
        most = room if asked.most is None else min(asked.most, room)
        if most < 1 or asked.min_tokens > most:
            raise Refused(f"max_tokens must be at least 1 and min_tokens, got {asked.most}")
        return most

    def _drawn(self, least: int, most: int) -> int:
        """Tokens until an answer is over: each may be the last one."""
        mean = self._options.mean_output_tokens
        if mean == inf:
            return most
        # What is exponential and cut to whole tokens is geometric: each token is the last with
        # chance 1 / mean.
        ends = -1 / log(1 - 1 / mean) if mean > 1 else 0
        drawn = 1 + int(self._random.expovariate(1) * ends)
        return min(max(drawn, least), most)

    def arrival_ns(self, given: str | None) -> int:
        """When a request arrives. Raises `Refused`."""
        if given is None:
            return self.clock.now_ns()
        try:
            at_ns = round(float(given) * 1e9)
        except (ValueError, OverflowError):
            raise Refused(f"{ARRIVAL}: {given!r} is no time") from None
        if not self._options.virtual or not self.session.now_ns <= at_ns < 1 << 62:
            raise Refused(
                f"{ARRIVAL}: the time cannot be chosen (it is {self.session.now_ns / 1e9} s);"
                " give a later one, and start kvsim serve with --as-fast-as-possible"
            )
        return at_ns


async def asked_of(request: Request, kind: Any) -> Any:
    """What a request asks for. Raises `Refused`, `ClientDisconnect`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise Refused(f"body: above the limit of {_MOST_BYTES:,} bytes", 413)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"{error}") from None


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


class Server:
    """A session with its front, clock, metrics and events."""

    def __init__(self, session: Session, model_name: str, options: Options) -> None:
        """Raises `ConfigError`."""
        if options.adapters and not session.parts.config.enable_lora:
            raise ConfigError(
                "--lora-modules: there are no adapters without --enable-lora; give both"
            )
        self.session, self._options = session, options
        registry = CollectorRegistry()
        metrics = EngineMetrics(session.parts, model_name, self._seconds)
        registry.register(metrics)
        self.clock = Clock(session, options, registry)
        self.front = Front(session, self.clock, model_name, options, registry)
        self.publisher: Publisher | None = None
        session.steps.listeners.append(metrics)
        if options.kv_events is not None and options.kv_events.enable_kv_cache_events:
            self._publish(options.kv_events)

    def _publish(self, config: KVEventsConfig) -> None:
        blocks, asked = self.session.parts.blocks, self.session.asked
        version, loras = self.session.parts.config.vllm_version, [*self._options.adapters]
        events = KVEvents(int(blocks.block_size), asked.of, version, loras)
        if self.session.parts.offload is not None or not blocks.report(events):
            raise ConfigError(
                "--kv-events-config: this engine publishes none; use vllm-v1 or sglang with prefix"
                " caching, all layers in one group and no offloading, or leave it out"
            )
        self.publisher = publisher = Publisher(config)

        def publish(_: Batch, step: Step) -> None:
            if (batch := events.batch(self._seconds(step.now_ns))) is not None:
                publisher.publish(batch)

        self.session.steps.listeners.append(publish)

    def _seconds(self, now_ns: int) -> float:
        """What the outside is told as the time."""
        return now_ns / 1e9 if self._options.virtual else time.time()

    async def run(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        """Serves until a signal comes, or the engine raises an error. `ready` is called once
        requests are heard."""
        settings = uvicorn.Config(
            self.front.app(),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        http = _Http(settings, self)
        # What is there by now stays to the end: no collection has to look at it again.
        gc.freeze()
        playing = asyncio.ensure_future(self.clock.play())
        playing.add_done_callback(lambda _: setattr(http, "should_exit", True))
        asyncio.get_running_loop().call_soon(ready)
        try:
            await http.serve(sockets=[listening])
        finally:
            self.close()
            await playing
            if self.publisher is not None:
                self.publisher.close()

    def close(self) -> None:
        """Ends all requests, and takes no more."""
        if not self.clock.closing:
            self.clock.closing = True
            self.session.close()
            self.session.steps.tell_clients()
            self.clock.wake()


class _Http(uvicorn.Server):
    """uvicorn, which does not die of the signal that ends it, and ends all streams before it waits
    for them."""

    def __init__(self, config: uvicorn.Config, served: Server) -> None:
        super().__init__(config)
        self._served = served

    def handle_exit(self, sig: int, frame: Any) -> None:
        # The second signal ends it without waiting for streams.
        self.force_exit, self.should_exit = self.should_exit, True

    async def on_tick(self, counter: int) -> bool:
        """Answers those who ask for events again, ten times a second."""
        if self._served.publisher is not None:
            self._served.publisher.answer()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._served.close()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Raises `ConfigError` if the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port: {host}:{port}: {error}; give another one") from None
