"""Measures one run of a workload in this process: CPU time, memory and size.

CPU time is user and system time of the process, never wall-clock time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvsim.against.bench.settings import Case
from kvsim.against.bench.usage import cpu_s, peak_rss_mb
from kvsim.against.bench.workloads import WORKLOADS, Workload
from kvsim.errors import ConfigError
from kvsim.workload import open_trace

if TYPE_CHECKING:
    from kvsim.run.result import Result


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload."""

    cpu_s: float
    """CPU time to read the file of requests and to simulate them, with the step log and the
    figures of every request, where modules and prices are loaded."""
    requests: int
    steps: int
    """Steps that compute something; `seq_steps` is the sum of their decodes."""
    seq_steps: int
    preemptions: int
    rss_mb: float
    """Peak memory of the process."""


def measure(case: Case, path: str) -> Measurement:
    """Run a case once on a file of `write_requests`.

    For comparable memory, call it in a fresh process. Raises `ConfigError` for settings that do not
    go together, and for a run that does not come to its end.
    """
    run, settings = _runner(WORKLOADS[case.workload]), case.table
    run("chat", settings | {"num_prompts": 1})  # Loads modules and prices.
    start = cpu_s()
    engines = run(path, settings)
    spent, peak_mb = cpu_s() - start, peak_rss_mb()
    for engine in engines:
        if (end := engine.meta["outcome"]["kind"]) != "finished":
            raise ConfigError(f"bench: {case}: the run ended as {end}, so its time says nothing")
    steps = [engine.steps for engine in engines]
    return Measurement(
        cpu_s=spent,
        requests=sum(len(engine.requests["id"]) for engine in engines),
        steps=sum(int((each["prefill_seqs"] + each["decode_seqs"] > 0).sum()) for each in steps),
        seq_steps=sum(int(each["decode_seqs"].sum()) for each in steps),
        preemptions=sum(int(engine.requests["num_preemptions"].sum()) for engine in engines),
        rss_mb=peak_mb,
    )


def _runner(workload: Workload) -> Callable[[str, dict[str, Any]], Sequence[Result]]:
    """Returns what runs a workload."""
    if workload.router:
        from kvsim.fleet import simulate_fleet

        def run_fleet(path: str, settings: dict[str, Any]) -> Sequence[Result]:
            configs = [settings] * workload.replicas
            return simulate_fleet(open_trace(path), configs, workload.router).replicas

        return run_fleet
    from kvsim.run.simulation import simulate

    def run(path: str, settings: dict[str, Any]) -> Sequence[Result]:
        return [simulate(open_trace(path), settings)]

    return run
