"""A server of the simulated engine on a free port of this machine, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from kvsim.against.serve.server import Server, listen
from kvsim.against.serve.session import Options, Session
from kvsim.run.simulation import read_config

T = TypeVar("T")

SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 120,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
}


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns, in a thread of its own: in this one, a browser's loop may run."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


@contextmanager
def serving(
    config: Mapping[str, Any] = SMALL,
    *,
    records: bool = False,
    watch: Callable[[Session], None] | None = None,
    **how: Any,
) -> Iterator[tuple[str, Server]]:
    """The address of a server, and the server; `how`: as in `Options`."""
    session = Session(read_config(config), records=records)
    if watch is not None:
        watch(session)
    server = Server(session, "small", Options(**how))
    ready, loops = threading.Event(), list[asyncio.AbstractEventLoop]()
    failed: list[BaseException] = []

    def heard() -> None:
        loops.append(asyncio.get_running_loop())
        ready.set()

    def run() -> None:
        try:
            with listening:
                asyncio.run(server.run(listening, heard))
        except BaseException as error:
            failed.append(error)
            ready.set()

    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60) and not failed, failed
        yield f"http://127.0.0.1:{port}", server
    finally:
        if loops and thread.is_alive():
            loops[0].call_soon_threadsafe(server.close)
        thread.join(60)
        assert not thread.is_alive() and not failed, failed
