"""Replicas that can be simulated apart: nothing in them changes what any of them is sent.

So the router's decisions come first, and each replica then runs by itself, in any process and any
order, with the same results.
"""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from kvsim.core.request import Request
from kvsim.errors import EngineStopped
from kvsim.fleet.routers.router import Router, asked_of
from kvsim.run.attempt import play
from kvsim.run.blame import blaming
from kvsim.run.replica.events import Clock
from kvsim.run.replica.inbox import Inbox
from kvsim.run.result import Result
from kvsim.run.serving import Serving
from kvsim.run.simulation import assembled
from kvsim.run.workers import in_processes, unpickled
from kvsim.settings.config import RunConfig
from kvsim.settings.library import overridden
from kvsim.workload.clients import NOTHING, Released, Requests, waits_for
from kvsim.workload.keys import Streams, streams
from kvsim.workload.trace import Row, Trace, column

_OWN = {
    *("__init__", "choose", "route", "sent", "worker_lost", "worker_added"),
    *("expected", "index_limit_tokens"),
}
"""What a router may override without heeding workers that stay alive."""
_WORTHWHILE = 10_000
"""Requests from which on further processes save more time than they take to start."""


@dataclass(frozen=True)
class Load:
    """What clients send, whatever becomes of it."""

    trace: Trace
    rows: Sequence[Row]
    release_ns: Sequence[int]
    """When each request is sent."""
    samples: int
    """Samples of each request."""
    ignore_eos: bool

    @cached_property
    def streams(self) -> Streams:
        """What each row of the trace says."""
        return streams(self.trace)

    def requests(self, keyed: bool, kv_transfer: str = "") -> Requests:
        """New requests; `keyed`: with block identities. `kv_transfer`: as in `Requests`."""
        known, samples = self.streams if keyed else None, self.samples
        return Requests(
            self.rows,
            known,
            n=samples,
            ignore_eos=self.ignore_eos,
            kv_transfer=kv_transfer,
        )


class Share(NamedTuple):
    """What one replica serves."""

    config: RunConfig
    indexes: Sequence[int]
    """Its requests, in the order in which they are sent."""


def heeds_replicas(router: Router) -> bool:
    """Whether anything that happens in a living replica may change the router's decisions."""
    interval_ns = router.scrape_ns, router.tick_ns
    return (
        router.heeds_events or interval_ns != (None, None) or not overridden(router, Router) <= _OWN
    )


def clients_wait(rows: Sequence[Row], config: RunConfig) -> bool:
    """Whether any request is sent only after another one has ended."""
    return config.max_concurrency is not None or max(waits_for(rows, config), default=-1) >= 0


def routed(load: Load, router: Router) -> array[int]:
    """The replica of each request of a router that heeds none of them."""
    chosen, everyone = array("q", [-1]) * len(load.rows), list(range(len(router.workers)))
    for index in sorted(range(len(load.rows)), key=load.release_ns.__getitem__):
        asked = asked_of(load.rows[index], load.streams[index])
        chosen[index] = router.route(asked, everyone, load.release_ns[index]).worker
    return chosen


def serve_apart(
    load: Load,
    configs: Sequence[RunConfig],
    chosen: Sequence[int],
    command: str,
    jobs: int | None,
    progress: Callable[[int], None] | None,
) -> list[Result] | None:
    """What the replicas do with the requests chosen for them, in at most `jobs` processes.

    None if an engine stops, after which a router would send it nothing, or if an oracle has to be
    shown the requests of all.
    """
    indexes: list[list[int]] = [[] for _ in configs]
    for index in sorted(range(len(chosen)), key=load.release_ns.__getitem__):
        indexes[chosen[index]].append(index)
    shares = [Share(*each) for each in zip(configs, indexes, strict=True)]
    results = []
    number = _processes(len(chosen), len(shares), jobs)
    served = _all_served(load, shares, command, number)
    for share, result in zip(shares, served, strict=True):
        if result is None:
            return None
        results.append(result)
        if progress is not None:
            progress(len(share.indexes))
    # All of them are there until the last one is done.
    end_s = max(result.meta["outcome"]["time_s"] for result in results)
    for result in results:
        result.meta["outcome"]["time_s"] = end_s
    return results


def _processes(requests: int, replicas: int, jobs: int | None) -> int:
    if jobs is None and requests >= _WORTHWHILE:
        from joblib import cpu_count

        jobs = cpu_count()
    return min(jobs or 1, replicas)


def _all_served(
    load: Load, shares: Sequence[Share], command: str, number: int
) -> Iterator[Result | None]:
    if number <= 1:
        yield from (_served(load, share, command) for share in shares)
        return
    with tempfile.TemporaryDirectory(prefix="kvsim-") as folder:
        path = Path(folder) / "load"
        path.write_bytes(pickle.dumps(load))
        tasks = ((str(path), share, command) for share in shares)
        yield from in_processes(_served_from, tasks, number)


def _served_from(path: str, share: Share, command: str) -> Result | None:
    with blaming(share.config):
        return _served(unpickled(path), share, command)


def _served(load: Load, share: Share, command: str) -> Result | None:
    """Runs one replica. None if its engine stops, or if it has an oracle."""
    config = share.config
    rows = [load.rows[index] for index in share.indexes]
    parts = assembled(config, rows)
    if parts.future.oracles:
        return None
    env = Clock()
    requests = load.requests(parts.blocks.needs_keys)
    serving = Serving(
        env,
        parts,
        load.rows,
        requests,
        Inbox(env, _Sender(requests, load.release_ns, share.indexes)),
        column(load.rows, "output_length").__getitem__,
        refused={},
    )
    env.process(serving.run())
    try:
        play(env)
    except EngineStopped:
        return None
    outcome = serving.outcome(serving.now_ns)
    stored = set(serving.archive.column("index").tolist())
    missing = sorted(set(share.indexes) - stored)
    result = serving.result(load.trace, outcome, missing, [], command)
    requests.let_all_go()
    return result


class _Sender:
    """Sends one replica its requests, each at its time."""

    listen = False

    def __init__(
        self, requests: Requests, release_ns: Sequence[int], indexes: Sequence[int]
    ) -> None:
        self._requests, self._release_ns, self._indexes = requests, release_ns, indexes

    def start(self) -> Iterator[tuple[int, Request]]:
        """The requests as (time in ns, request), in order of time."""
        return ((self._release_ns[index], self._requests[index]) for index in self._indexes)

    def offer(self, request: Request, now_ns: int) -> bool:
        """Sends a request: nobody is held back."""
        request.released_ns = request.arrival_ns = now_ns
        return True

    def ended(self, request: Request, now_ns: int) -> Released:
        """No request depends on another one."""
        return NOTHING
