"""Serves a session over HTTP until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import gc
import shlex
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from types import FrameType
from typing import NamedTuple

import uvicorn

from kvsim.against.serve.app import Front
from kvsim.against.serve.clock import Clock
from kvsim.against.serve.kv_events import KVEvents, KVEventsConfig, Publisher, layout_of
from kvsim.against.serve.metrics import EngineMetrics, served
from kvsim.against.serve.session import Session
from kvsim.against.serve.watch import Step
from kvsim.core.batch import Batch
from kvsim.errors import ConfigError

_GRACE_S = 5
"""Seconds that slow readers have to take the rest once the server is told to end."""
_REPLAY_S = 0.05
"""How often somebody looks for those who ask for events again."""


class Said(NamedTuple):
    """What `vllm serve` is told of its front; None or empty: nothing."""

    model: str | None = None
    host: str | None = None
    port: int | None = None
    kv_events_config: str | None = None


def front_of(command: str | None) -> Said:
    """The address and names in the text of a command, whose settings others read."""
    if command is None:
        return Said()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--served-model-name", nargs="+")
    for flag in ("--model", "--host", "--kv-events-config"):
        parser.add_argument(flag)
    parser.add_argument("--port", type=int)
    try:
        known, rest = parser.parse_known_args(shlex.split(command))
    except (argparse.ArgumentError, ValueError) as error:
        raise ConfigError(f"--vllm: {error}") from None
    named = rest[rest.index("serve") + 1 :][:1] if "serve" in rest else []
    model = (known.served_model_name or [known.model or "".join(named)])[0]
    return Said(model or None, known.host, known.port, known.kv_events_config)


class Server:
    """A session with its front, clock, metrics and events."""

    def __init__(
        self,
        session: Session,
        model_name: str,
        *,
        speed: float = 1.0,
        hold: int = 0,
        mean_output_tokens: float = 256.0,
        kv_events: KVEventsConfig | None = None,
        layout: str | None = None,
    ) -> None:
        """`speed`, `hold`: as for `Clock`; `mean_output_tokens`: as for `Front`. Raises
        `ConfigError`."""
        self.session = session
        self.clock = Clock(session, speed, hold)
        self.front = Front(session, self.clock, model_name, mean_output_tokens)
        metrics = EngineMetrics(served(session.parts, model_name))
        self.front.registry.register(metrics)
        self.front.registry.register(self.clock)
        self.publisher: Publisher | None = None
        session.steps.listeners.append(metrics)
        if kv_events is not None and kv_events.enable_kv_cache_events:
            self._publish(kv_events, layout)

    def _publish(self, config: KVEventsConfig, layout: str | None) -> None:
        blocks, asked = self.session.parts.blocks, self.session.asked
        layout = layout or layout_of(self.session.parts.config.vllm_version)
        events = KVEvents(int(blocks.block_size), asked.of, layout)
        if self.session.parts.offload is not None or not blocks.report(events):
            raise ConfigError(
                "--kv-events-config: this engine publishes none; use vllm-v1 or sglang with prefix"
                " caching, all layers in one group and no offloading, or leave it out"
            )
        self.publisher = publisher = Publisher(config)

        def publish(_: Batch, step: Step) -> None:
            now_s = step.now_ns / 1e9 if self.clock.virtual else time.time()
            if (batch := events.batch(now_s)) is not None:
                publisher.publish(batch)

        self.session.steps.listeners.append(publish)

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
            timeout_keep_alive=5,
            timeout_graceful_shutdown=_GRACE_S,
        )
        http = _Http(settings, self.close)
        gc.freeze()
        playing = asyncio.ensure_future(self.clock.play())
        playing.add_done_callback(lambda _: http.end())
        replaying = asyncio.ensure_future(self._replay())
        asyncio.get_running_loop().call_soon(ready)
        try:
            await http.serve(sockets=[listening])
        finally:
            self.close()
            replaying.cancel()
            await playing
            if self.publisher is not None:
                self.publisher.close()

    def close(self) -> None:
        """Ends all requests, and takes no more."""
        if not self.clock.closing:
            self.clock.closing = True
            self.session.close()
            self.clock.wake()

    async def _replay(self) -> None:
        while self.publisher is not None and self.publisher.replay is not None:
            self.publisher.answer()
            await asyncio.sleep(_REPLAY_S)


class _Http(uvicorn.Server):
    """A server that ends its streams when it is told to end, and then returns."""

    def __init__(self, config: uvicorn.Config, close: Callable[[], None]) -> None:
        super().__init__(config)
        self._close = close
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.end()

    def end(self) -> None:
        """Ends soon."""
        self.should_exit = True
        with suppress(RuntimeError):  # The loop is over.
            self._loop.call_soon_threadsafe(self._close)


def listen(host: str, port: int) -> socket.socket:
    """Raises `ConfigError` if the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port: {host}:{port}: {error}; give another one") from None


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The fastest event loop here; None: Python's own."""
    with suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None


def speed_of(speed: float, as_fast_as_possible: bool) -> float:
    """Raises `ConfigError`."""
    if as_fast_as_possible:
        return inf
    if not 0 < speed < inf:
        raise ConfigError(f"--speed: {speed} is not above 0; or give --as-fast-as-possible")
    return speed
