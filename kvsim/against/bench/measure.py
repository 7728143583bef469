"""Measures one run of a workload in this process: CPU time, memory, events and results.

CPU time is user and system time of the process, never wall-clock time. A *ping* is the cost of one
`yield env.timeout(...)` of SimPy, measured in the same process. Figures in pings are comparable
across machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from kvsim.against.bench.settings import Case
from kvsim.against.bench.usage import cpu_s, peak_rss_mb
from kvsim.against.bench.workloads import PURE_TOKENS, WORKLOADS, Checks, Workload, pure_decode

if TYPE_CHECKING:
    import simpy

    from kvsim.fleet.result import FleetResult
    from kvsim.run.result import Result
    from kvsim.workload.trace import Trace

    _Ran = tuple[Result | FleetResult, Sequence[Result]]
    """All requests, and what each engine did."""

_PINGS = 50_000


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload."""

    cpu_s: float
    """CPU time of `simulate()` or `simulate_fleet()`, with the step log and the figures of every
    request."""
    ping_ns: float
    requests: int
    steps: int
    """Steps that compute something; `seq_steps` is the sum of their decodes."""
    seq_steps: int
    preemptions: int
    end_ns: int
    digest: str
    events: int
    """Events scheduled in SimPy."""
    rss_mb: float
    """Peak memory of the process until `simulate()` is over, trace included."""
    idle_rss_mb: float
    """Peak memory before `simulate()`: the trace and the imports."""
    outcome: str
    decode_step_us: float | None = None
    """CPU time of one more pure decode step of `decode-N`, without arrivals and ends."""

    @property
    def pings(self) -> float:
        """CPU time in pings."""
        return self.cpu_s * 1e9 / self.ping_ns

    def meets(self, checks: Checks) -> bool:
        """Whether the results are the known ones of the workload."""
        found = (self.steps, self.seq_steps, self.preemptions, self.end_ns, self.digest)
        return found == tuple(checks)


def measure(case: Case, trace: str | None = None) -> Measurement:
    """Run a case once; `trace` is the file of workloads that need one.

    For comparable memory, call it in a fresh process. Raises `ConfigError` for settings that do not
    go together.
    """
    workload, settings = WORKLOADS[case.workload], case.table
    opened, run = workload.make(trace), _runner(workload)
    ping, before_mb = ping_ns(), peak_rss_mb()
    with _environments() as environments:
        start = cpu_s()
        whole, engines = run(opened, settings)
        spent, peak_mb = cpu_s() - start, peak_rss_mb()
    steps = [engine.steps for engine in engines]
    return Measurement(
        cpu_s=spent,
        ping_ns=ping,
        requests=len(opened.rows),
        steps=sum(int((each["prefill_seqs"] + each["decode_seqs"] > 0).sum()) for each in steps),
        seq_steps=sum(int(each["decode_seqs"].sum()) for each in steps),
        preemptions=int(whole.requests["num_preemptions"].sum()),
        end_ns=max(int(each["end_ns"].max(initial=0)) for each in steps),
        digest=digest(whole),
        events=sum(map(_scheduled, environments)),
        rss_mb=peak_mb,
        idle_rss_mb=before_mb,
        outcome=engines[0].meta["outcome"]["kind"],
        decode_step_us=_decode_step_us(workload.decoding, case),
    )


def _runner(workload: Workload) -> Callable[[Trace, dict[str, Any]], _Ran]:
    """Returns what runs a workload; all that it needs is imported."""
    if workload.router:
        from kvsim.fleet.fleet import simulate_fleet

        def run_fleet(trace: Trace, settings: dict[str, Any]) -> _Ran:
            fleet = simulate_fleet(trace, [settings] * workload.replicas, workload.router)
            return fleet, fleet.replicas

        return run_fleet
    from kvsim.run.simulation import simulate

    def run(trace: Trace, settings: dict[str, Any]) -> _Ran:
        result = simulate(trace, settings)
        return result, [result]

    return run


def _decode_step_us(running: int, case: Case) -> float | None:
    from kvsim.run.simulation import simulate

    if not running:
        return None
    spent = []
    for tokens in PURE_TOKENS:
        trace, longer = pure_decode(running, tokens)
        start = cpu_s()
        simulate(trace, case.table | longer)
        spent.append(cpu_s() - start)
    fewer, more = PURE_TOKENS
    return (spent[1] - spent[0]) * 1e6 / (more - fewer)


def digest(result: Result | FleetResult) -> str:
    """The first 16 digits of the SHA-256 of when each request began and ended, in trace order.

    The hashed text is `json.dumps([[first_token_ns, finish_ns, num_preemptions], ...])`.
    """
    names = ("first_token_ns", "finish_ns", "num_preemptions")
    columns = (result.requests[name].tolist() for name in names)
    text = json.dumps([list(each) for each in zip(*columns, strict=True)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ping_ns() -> float:
    """The least of five measurements of one `yield env.timeout(1)`."""
    import simpy

    def pings(env: simpy.Environment) -> Generator[simpy.Event, Any, Any]:
        for _ in range(_PINGS):
            yield env.timeout(1)

    found = []
    for _ in range(5):
        env = simpy.Environment()
        env.process(pings(env))
        start = cpu_s()
        env.run()
        found.append((cpu_s() - start) * 1e9 / _PINGS)
    return min(found)


@contextmanager
def _environments() -> Iterator[list[simpy.Environment]]:
    """Collect the environments that are made within the context, at no cost to the run."""
    import simpy

    made: list[simpy.Environment] = []
    initialise = simpy.Environment.__init__

    def remember(self: simpy.Environment, *args: Any) -> None:
        initialise(self, *args)
        made.append(self)

    simpy.Environment.__init__ = remember  # type: ignore[method-assign, assignment]
    try:
        yield made
    finally:
        simpy.Environment.__init__ = initialise  # type: ignore[method-assign]


def _scheduled(env: simpy.Environment) -> int:
    """Number of scheduled events, from SimPy's private numbering; there is no public one."""
    number: int = next(env._eid)
    return number
