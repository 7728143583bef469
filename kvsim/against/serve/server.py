"""Serves a session over HTTP until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from kvsim.against.serve.app import Front
from kvsim.against.serve.clock import Clock
from kvsim.against.serve.kv_events import KVEvents, KVEventsConfig, Publisher
from kvsim.against.serve.metrics import EngineMetrics
from kvsim.against.serve.options import Options
from kvsim.against.serve.session import Session
from kvsim.against.serve.watch import Step
from kvsim.core.batch import Batch
from kvsim.errors import ConfigError

_GRACE_S = 5
"""Seconds that slow readers have to take the rest once the server is told to end."""


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
