"""Measures: lets each policy's scheduler drive a real engine, three times.

| run | what it is for |
|---|---|
| real | the measurement |
| repeat | the real run again, independently: how far two real runs are apart |
| replay | the plans of `real` again: how far two measurements of one step are apart |

Needs torch, and of kvsim only the scheduling: no SimPy, msgspec, plotly or rich.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from kvsim.against.validate.loop import Pairs, Times, serve
from kvsim.against.validate.recording import MARKS, RUNS, SCHEMA, digest
from kvsim.against.validate.setup import build, build_scheduler, refuse_other_model, settings_of
from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.errors import ConfigError, EngineStopped
from kvsim.version import __version__
from kvsim.workload import Trace, open_trace
from kvsim.workload.arrivals import release_times
from kvsim.workload.clients import Clients, make_requests

if TYPE_CHECKING:
    from kvsim.settings.config import RunConfig

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
    engine = _engine(setup, profile, device, trace)
    recording: Table = {
        "schema": SCHEMA,
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


class _Engine:
    """The decoder that all policies run on, and its provenance."""

    def __init__(self, profile: Mapping[str, Any], device: str, **room: int) -> None:
        from kvsim_kernels import executor, provenance, timing

        self._make = executor.Executor
        self._decoder = executor.make_decoder(profile, device, **room)
        self._clock = timing.make_clock(device)
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


def _engine(
    setup: Mapping[str, Any], profile: Mapping[str, Any], device: str, trace: Trace
) -> _Engine:
    """An engine with room for the largest of the policies."""
    configs = [policy["config"] for policy in setup["policies"]]
    tables = [build(policy["block_manager"]) for policy in setup["policies"]]
    schedulers = [
        build_scheduler(each["scheduler"], each["config"], blocks)
        for each, blocks in zip(setup["policies"], tables, strict=True)
    ]
    longest = max(row.input_length + row.output_length for row in trace.rows)
    try:
        return _Engine(
            profile,
            device,
            num_blocks=max(each.gpu.first + each.gpu.size for each in tables),
            host_blocks=max(each.cpu.size for each in tables),
            max_tokens=max(each.max_num_batched_tokens for each in schedulers),
            max_seqs=max(each.max_num_seqs for each in schedulers) * max(c["n"] for c in configs),
            max_seq_len=min(longest, max(c["max_model_len"] for c in configs)) + 2,
        )
    except ImportError as error:
        raise ConfigError(
            f"validate: {error}; a real engine runs on torch: pip install 'kvsim[kernels]'"
        ) from None
    except KeyError as error:
        raise ConfigError(
            f"profile: no {error.args[0]}: validate needs one that `kvsim calibrate` measured"
        ) from None
