"""Serves a session over HTTP until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from kvsim.against.serve.app import Front
from kvsim.against.serve.clock import Clock
from kvsim.against.serve.kv_events import KVEvents, KVEventsConfig, Publisher, layout_of
from kvsim.against.serve.metrics import EngineMetrics
from kvsim.against.serve.session import Session
from kvsim.against.serve.watch import Step
from kvsim.core.batch import Batch
from kvsim.errors import ConfigError
from kvsim.settings.config import RunConfig

_GRACE_S = 5
"""Seconds that slow readers have to take the rest once the server is told to end."""
_TEND_S = 0.05
"""Seconds from one look at the signals, and at who asks for events again, to the next."""


def front_of(command: str | None) -> argparse.Namespace:
    """What the text of a command says of address, names and events; None: nothing. Its settings
    are read by others. Raises `ConfigError`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--model", "--host", "--kv-events-config"):
        parser.add_argument(flag)
    for flag in ("--port", "--stream-interval"):
        parser.add_argument(flag, type=int)
    for flag in ("--served-model-name", "--lora-modules"):
        parser.add_argument(flag, nargs="+", default=[])
    try:
        known, rest = parser.parse_known_args(shlex.split(command or ""))
    except (argparse.ArgumentError, ValueError) as error:
        raise ConfigError(f"--vllm: {error}") from None
    named = rest[rest.index("serve") + 1 :][:1] if "serve" in rest else []
    known.model = next(filter(None, [*known.served_model_name, known.model, *named]), None)
    return known


def adapters_of(modules: Sequence[str], config: RunConfig) -> dict[str, str]:
    """The path of each adapter by its name, of `name=path` or JSON. Raises `ConfigError`."""
    if modules and not config.enable_lora:
        raise ConfigError("--lora-modules: there are no adapters without --enable-lora; give both")
    found: dict[str, str] = {}
    for each in modules:
        try:
            given = json.loads(each) if each[:1] == "{" else {}
            name, path = (given["name"], given["path"]) if given else each.split("=", 1)
        except (ValueError, KeyError):
            raise ConfigError(
                f"--lora-modules: {each!r} is not name=path, or JSON of both"
            ) from None
        found[str(name)] = str(path)
    return found


class Server:
    """A session with its front, clock, metrics and events."""

    def __init__(
        self,
        session: Session,
        model_name: str,
        *,
        speed: float = 1.0,
        hold: int = 0,
        kv_events: KVEventsConfig | None = None,
        layout: str | None = None,
        **front: Any,
    ) -> None:
        """`speed`, `hold`: as for `Clock`; `front`: as for `Front`. Raises `ConfigError`."""
        self.session = session
        self.clock = Clock(session, speed, hold)
        self.front = Front(session, self.clock, model_name, **front)
        metrics = EngineMetrics(session.parts, model_name)
        self.front.registry.register(metrics)
        self.front.registry.register(self.clock)
        self.publisher: Publisher | None = None
        session.steps.listeners.append(metrics)
        if kv_events is not None and kv_events.enable_kv_cache_events:
            self._publish(kv_events, layout, [*front.get("adapters", ())])

    def _publish(self, config: KVEventsConfig, layout: str | None, loras: Sequence[str]) -> None:
        blocks, asked = self.session.parts.blocks, self.session.asked
        layout = layout or layout_of(self.session.parts.config.vllm_version)
        events = KVEvents(int(blocks.block_size), asked.of, layout, loras)
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
        http = _Http(settings)
        gc.freeze()
        playing = asyncio.ensure_future(self.clock.play())
        playing.add_done_callback(lambda _: setattr(http, "should_exit", True))
        tending = asyncio.ensure_future(self._tend(http))
        asyncio.get_running_loop().call_soon(ready)
        try:
            await http.serve(sockets=[listening])
        finally:
            self.close()
            await tending
            await playing
            if self.publisher is not None:
                self.publisher.close()

    def close(self) -> None:
        """Ends all requests, and takes no more."""
        if not self.clock.closing:
            self.clock.closing = True
            self.session.close()
            self.clock.wake()

    async def _tend(self, http: _Http) -> None:
        """Answers those who ask for events again, and ends all streams once the server is to end,
        which waits for them."""
        while not http.should_exit:
            if self.publisher is not None:
                self.publisher.answer()
            await asyncio.sleep(_TEND_S)
        self.close()


class _Http(uvicorn.Server):
    """A server that does not die of the signal that ends it."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit, self.should_exit = self.should_exit, True


def listen(host: str, port: int) -> socket.socket:
    """Raises `ConfigError` if the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port: {host}:{port}: {error}; give another one") from None
