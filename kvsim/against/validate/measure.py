"""Measures: lets each policy's scheduler drive a real engine, three times.

| run | what it is for |
|---|---|
| real | the measurement |
| repeat | the real run again, independently: how far two real runs are apart |
| replay | the plans of `real` again: how far two measurements of one step are apart |

Needs torch, and of kvsim only the scheduling: no SimPy, msgspec, plotly or rich.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvsim.against.validate.setup import (
    MARKS,
    RECORDED,
    RUNS,
    build,
    build_scheduler,
    digest,
    refuse_other_model,
    settings_of,
)
from kvsim.core.batch import Batch
from kvsim.core.host import Host, Waiting
from kvsim.core.loop import Listeners, Loop
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.core.scheduler import Scheduler
from kvsim.errors import ConfigError, EngineStopped
from kvsim.run.watchers import Watcher
from kvsim.version import __version__
from kvsim.workload import Trace, open_trace
from kvsim.workload.clients import Clients, make_requests, release_times

if TYPE_CHECKING:
    from kvsim.settings.config import RunConfig


Pairs = list[tuple[int, int]]


class Times(Protocol):
    """A source of step times, by pricing steps or by running them."""

    def swap_out_ns(self, pairs: Pairs) -> int:
        """Nanoseconds to copy (GPU, CPU) blocks, before everything else in the step."""
        ...

    def swap_in_ns(self, pairs: Pairs) -> int:
        """Nanoseconds to copy (CPU, GPU) blocks, after the copies out and before the step."""
        ...

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of the step itself, copies on the GPU included."""
        ...


def serve(
    scheduler: Scheduler,
    batch: Batch,
    times: Times,
    clients: Clients,
    watcher: Watcher | None = None,
) -> int:
    """Serve until nothing more can happen; returns that time in nanoseconds.

    The history of a request is written into it. Raises `EngineStopped` where the engine would, and
    if requests are left that it can never schedule.
    """
    device = Device(times, clients)
    for _ in Loop(device, scheduler, batch, listeners=Listeners(watcher)).run():
        pass
    batch.audit()
    if len(batch):
        head = (batch.swapped or batch.waiting or batch.running)[0]
        raise EngineStopped(
            kind="deadlock",
            request_id=head.id,
            explanation=f"request {head.id} can never be scheduled",
            remedy="give the engine more blocks (--num-gpu-blocks-override)",
            rule="no progress",
        )
    return device.now_ns


class Device(Host):
    """Clients, and a device that runs steps."""

    def __init__(self, times: Times, clients: Clients) -> None:
        super().__init__()
        self.patience_steps = 1_000
        self._times = times
        self._clients = clients
        self._inbox: list[Request] = []
        self._first = iter(clients.start())
        self._coming: list[tuple[int, int, Request, bool]] = []
        """Heap of (time, order of requesting, request, whether it is from `Clients.start`)."""
        self._asked = 0
        self._start()

    def arrived(self) -> list[Request]:
        """Take out the requests that have arrived by now."""
        inbox, self._inbox = self._inbox, []
        # Requests of one moment come in the order of the trace, whoever released them.
        return sorted(inbox, key=lambda each: (each.arrival_ns, each.index))

    def tell(self, ended: list[Request]) -> None:
        """Report completions to the clients, which may let them send more."""
        for request in ended:
            sent, later = self._clients.ended(request, self.now_ns)
            self._inbox += sent
            for time_ns, other in later:
                if time_ns <= self.now_ns:
                    self._offer(other)
                else:
                    self._await(time_ns, other)

    def step_ns(self, plan: Plan) -> int:
        """Run a step and its copies."""
        took_ns = 0
        if plan.swaps_out:
            took_ns += self._times.swap_out_ns(plan.swaps_out)
        if plan.swaps_in:
            took_ns += self._times.swap_in_ns(plan.swaps_in)
        return took_ns + self._times.step_ns(plan)

    def wait(self, until_ns: int) -> Waiting:
        """Let time pass, and offer every request at its time."""
        yield
        self._offer_until(until_ns)

    def sleep(self, until_ns: int) -> Waiting:
        """Sleep until a request arrives."""
        while not self._inbox:
            if not self._coming:
                return False
            self._offer_until(self._coming[0][0])
        yield
        return True

    def _start(self) -> None:
        """Offer the initial requests whose time has come, and await the next one."""
        for time_ns, request in self._first:
            if time_ns > self.now_ns:
                self._await(time_ns, request, True)
                return
            self._offer(request)

    def _await(self, time_ns: int, request: Request, first: bool = False) -> None:
        self._asked += 1
        heapq.heappush(self._coming, (time_ns, self._asked, request, first))

    def _offer(self, request: Request) -> None:
        """A client wants to send a request; its concurrency limit may hold it back."""
        if self._clients.offer(request, self.now_ns):
            self._inbox.append(request)

    def _offer_until(self, time_ns: int) -> None:
        while self._coming and self._coming[0][0] <= time_ns:
            self.now_ns, _, request, first = heapq.heappop(self._coming)
            self._offer(request)
            if first:
                self._start()
        self.now_ns = time_ns


WARM_UP = {
    "num_prompts": 16,
    "request_rate": float("inf"),
    "sessions": "recorded",
    "max_concurrency": None,
}
"""A few requests at once, served before the measurement, so that every kernel is compiled for all
cases."""

Table = dict[str, Any]


class Recorded:
    """Keeps the measured times; with `forced`, returns the times of an earlier run instead."""

    def __init__(self, times: Times, forced: Mapping[str, Any] | None = None) -> None:
        self._times = times
        self.step_times_ns: list[int] = []
        self.swap_times_ns: list[int] = []
        self._forced = forced

    def step_ns(self, plan: Plan) -> int:
        """The time of the step itself."""
        return self._noted(self._times.step_ns(plan), self.step_times_ns, "step_ns")

    def swap_out_ns(self, pairs: Pairs) -> int:
        """The time of the copies to the CPU."""
        return self._noted(self._times.swap_out_ns(pairs), self.swap_times_ns, "swap_ns")

    def swap_in_ns(self, pairs: Pairs) -> int:
        """The time of the copies from the CPU."""
        return self._noted(self._times.swap_in_ns(pairs), self.swap_times_ns, "swap_ns")

    def _noted(self, time_ns: int, taken: list[int], key: str) -> int:
        taken.append(time_ns)
        if self._forced is None:
            return time_ns
        forced_ns: int = self._forced[key][len(taken) - 1]
        return forced_ns


def measure(
    setup: Mapping[str, Any],
    profile: Mapping[str, Any],
    device: str,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Table]:
    """Recordings of the first policy, of the first two, and so on; each is complete in itself.

    `setup`: see `kvsim.against.validate.setup`. `profile`: names the geometry of the model, the
    layout of its blocks and the graphs. `tell` is called with a text when a run begins. Raises
    `ConfigError` if torch or the device is missing, if the trace is not that of the setup, and if
    the engine stops.
    """
    trace = open_trace(setup["trace"]["path"])
    if trace.sha256 != setup["trace"]["sha256"]:
        raise ConfigError(f"{trace.path}: not the trace of the setup; prepare it again")
    refuse_other_model(setup, profile)
    engine = _Engine(setup, profile, device, trace)
    recording: Table = {
        "schema": RECORDED,
        "kvsim_version": __version__,
        **engine.provenance(),
        "engine": profile["engine"],
        "setup": setup,
        "policies": [],
    }
    tell("warming up")
    first = setup["policies"][0]
    _serve({**first, "config": {**first["config"], **WARM_UP}}, trace, engine.executor)
    for runs in record(setup, trace, engine.executor, tell):
        recording["policies"].append(runs)
        yield recording


def record(
    setup: Mapping[str, Any],
    trace: Trace,
    executor: Callable[[Mapping[str, Any]], Times],
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Table]:
    """The name and the runs of each policy; `executor` makes a fresh engine for a policy."""
    for policy in setup["policies"]:
        runs: dict[str, Table] = {}
        for name in RUNS:
            tell(f"{policy['name']}: {name}")
            forced = runs["real"] if name == "replay" else None
            runs[name] = _serve(policy, trace, executor, forced)
        yield {"name": policy["name"], **runs}


def serve_policy(
    policy: Mapping[str, Any], trace: Trace, times: Times
) -> tuple[int, list[Request]]:
    """Serve a trace under one policy of a setup; returns the end in nanoseconds and the requests.

    Raises `ConfigError` if the engine stops.
    """
    config = cast("RunConfig", SimpleNamespace(**settings_of(policy)))
    rows = trace.rows[: config.num_prompts]
    blocks = build(policy["block_manager"])
    scheduler = build_scheduler(policy["scheduler"], policy["config"], blocks)
    requests = make_requests(trace, rows, n=config.n)
    clients = Clients(requests, rows, release_times(rows, config), config)
    batch = Batch(blocks, lambda index: rows[index].output_length, scheduler.longest_sequence)
    try:
        return serve(scheduler, batch, times, clients), requests
    except EngineStopped as stop:
        raise ConfigError(f"{policy['name']}: {stop.explanation}; {stop.remedy}") from None


def _serve(
    policy: Mapping[str, Any],
    trace: Trace,
    executor: Callable[[Mapping[str, Any]], Times],
    forced: Table | None = None,
) -> Table:
    times = Recorded(executor(policy), forced)
    end_ns, requests = serve_policy(policy, trace, times)
    marks = ((getattr(each, name) for each in requests) for name in MARKS)
    return {
        "end_ns": end_ns,
        "digest": digest(marks),
        "step_ns": times.step_times_ns,
        "swap_ns": times.swap_times_ns,
    }


def _sizes(setup: Mapping[str, Any], trace: Trace) -> dict[str, int]:
    """What a decoder has to hold, so that every policy can run on it."""
    configs = [policy["config"] for policy in setup["policies"]]
    tables = [build(policy["block_manager"]) for policy in setup["policies"]]
    schedulers = [
        build_scheduler(each["scheduler"], each["config"], blocks)
        for each, blocks in zip(setup["policies"], tables, strict=True)
    ]
    longest = max(row.input_length + row.output_length for row in trace.rows)
    seqs = max(each.max_num_seqs for each in schedulers)
    return {
        "num_blocks": max(each.gpu.first + each.gpu.size for each in tables),
        "host_blocks": max(each.cpu.size for each in tables),
        "max_tokens": max(each.max_num_batched_tokens for each in schedulers),
        "max_seqs": seqs * max(config["n"] for config in configs),
        "max_seq_len": min(longest, max(each["max_model_len"] for each in configs)) + 2,
    }


class _Engine:
    """The decoder that all policies run on, with room for the largest of them, and its
    provenance."""

    def __init__(
        self, setup: Mapping[str, Any], profile: Mapping[str, Any], device: str, trace: Trace
    ) -> None:
        """Raises `ConfigError` without torch, and for a profile that `kvsim calibrate` did not
        make."""
        sizes = _sizes(setup, trace)
        try:
            from kvsim_kernels import executor, provenance, timing

            self._decoder = executor.make_decoder(profile, device, **sizes)
            self._make, self._clock = executor.Executor, timing.make_clock(device)
        except ImportError as error:
            raise ConfigError(
                f"validate: {error}; a real engine runs on torch: pip install 'kvsim[kernels]'"
            ) from None
        except KeyError as error:
            raise ConfigError(
                f"profile: no {error.args[0]}: validate needs one that `kvsim calibrate` measured"
            ) from None
        self._provenance, self._cuda = provenance, device == "cuda"

    def executor(self, policy: Mapping[str, Any]) -> Times:
        """A fresh executor on the decoder, without texts or block tables of earlier runs."""
        first_host_block = build(policy["block_manager"]).cpu.first
        times: Times = self._make(self._decoder, self._clock, first_host_block)
        return times

    def provenance(self) -> Table:
        """Device, software and model."""
        return {
            "device": self._provenance.device(self._cuda),
            "software": self._provenance.software(self._cuda),
            "model": self._decoder.geometry.model(),
        }
