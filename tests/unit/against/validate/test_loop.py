"""The serving loop and the replica, side by side: every decision and every time is the same."""

from typing import Any

import pytest
import worlds
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from small import Priced

from kvsim.against.conform.step_log import Record, finish_record, step_record
from kvsim.against.validate.measure import serve
from kvsim.core.batch import Batch
from kvsim.core.host import SimulatedTime
from kvsim.core.loop import Listeners, Loop
from kvsim.core.request import Request
from kvsim.errors import ConfigError, EngineStopped
from kvsim.run.assembly import Parts, assemble
from kvsim.run.replica.inbox import Inbox
from kvsim.run.replica.time import Clock
from kvsim.run.serving import Archive
from kvsim.settings.config import make_config
from kvsim.workload import Row, SegmentContent, Trace
from kvsim.workload.clients import Clients, make_requests, release_times

MS = 1_000_000


class Log:
    """A watcher that remembers every record: decisions, queues, times, block tables."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def begin(self) -> None:
        assert not self.records

    def composed(self, batch: Any, plan: Any, now_ns: int, arrived: int) -> None:
        self.record = step_record(batch, plan, len(self.records), float(now_ns), arrived)

    def settled(self, batch: Any, ended: list[Request]) -> None:
        finish_record(self.record, batch, ended)
        self.records.append(self.record)


def prepared(trace: Trace, table: dict[str, Any]) -> tuple[Parts, list[Request], Clients]:
    parts = assemble(make_config(table))
    requests = make_requests(
        trace,
        trace.rows,
        n=parts.config.n,
        keyed=parts.blocks.needs_keys,
    )
    release_ns = release_times(trace.rows, parts.config)
    return parts, requests, Clients(requests, trace.rows, release_ns, parts.config)


def batch_of(trace: Trace, parts: Parts) -> Batch:
    lengths = [row.output_length for row in trace.rows]
    return worlds.batch_of(parts.blocks, parts.scheduler, lengths)


def by_replica(trace: Trace, table: dict[str, Any]) -> tuple[Any, ...]:
    parts, requests, clients = prepared(trace, table)
    env, batch, log = Clock(), batch_of(trace, parts), Log()
    host = SimulatedTime(
        env,
        parts.cost.step_ns,
        parts.link.transfer_ns,
        Inbox(env, clients),
    )
    env.process(Loop(host, parts.scheduler, batch, listeners=Listeners(log)).run())
    stopped = ""
    try:
        env.run()
    except EngineStopped as stop:
        stopped = stop.kind
    if not stopped and len(batch):
        stopped = "deadlock"
    return stopped, log.records, columns(requests, trace), batch.token_gaps_ns


def by_loop(trace: Trace, table: dict[str, Any]) -> tuple[Any, ...]:
    parts, requests, clients = prepared(trace, table)
    batch, log = batch_of(trace, parts), Log()
    stopped = ""
    try:
        serve(parts.scheduler, batch, Priced(parts.cost, parts.link), clients, log)
    except EngineStopped as stop:
        stopped = stop.kind
    return stopped, log.records, columns(requests, trace), batch.token_gaps_ns


def columns(requests: list[Request], trace: Trace) -> dict[str, Any]:
    archive = Archive(trace.rows)
    for request in requests:
        archive.figures.add(request)
    table = archive.columns()
    return {key: getattr(values, "tolist", lambda v=values: v)() for key, values in table.items()}


SETTINGS: dict[str, Any] = {
    "engine": "vllm-0.6.3",
    "model": "tiny",
    "block_size": 4,
    "num_gpu_blocks_override": 24,
    "num_cpu_blocks_override": 24,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "watermark": 0.0,
    "cost": {"model": "constant", "step_us": 900, "link": {"block_us": 300}},
}
ENGINES = {
    "recompute": {},
    "swap": {"preemption_mode": "swap"},
    "prefix caching": {"enable_prefix_caching": True},
    "chunked": {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
    "synchronous": {"disable_async_output_proc": True},
    "concurrency": {"max_concurrency": 3},
    "samples": {"n": 3, "watermark": 0.1},
    "v1": {"engine": "vllm-v1", "async_scheduling": False},
    "0.3.3": {"engine": "vllm-0.3.3"},
}

requests_drawn = st.lists(
    st.tuples(
        st.integers(0, 12),  # arrival, ms
        st.integers(1, 40),  # prompt
        st.integers(1, 20),  # output
        st.integers(0, 2),  # which shared beginning
        st.integers(-4, 6),  # how far before it its predecessor is; below 1: none
        st.integers(0, 3),  # think time, ms
    ),
    min_size=1,
    max_size=14,
)


def trace_of(drawn: list[tuple[int, ...]]) -> Trace:
    rows = []
    for i, (arrival, prompt, output, system, back, think) in enumerate(sorted(drawn)):
        shared = SegmentContent(((f"system {system}", min(8, prompt)),))
        after = i - back if 0 < back <= i else -1
        times = {"after": after, "delay_ns": think * MS} if after >= 0 else {}
        rows.append(Row(i, f"r{i}", i + 2, arrival * MS, prompt, output, shared, **times))
    return Trace("in memory", "native", "0" * 64, rows)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=examples(15))
@given(drawn=requests_drawn)
def test_loop_and_replica_decide_and_time_alike(engine: str, drawn: list[tuple[int, ...]]) -> None:
    trace, table = trace_of(drawn), {**SETTINGS, **ENGINES[engine]}
    assert by_loop(trace, table) == by_replica(trace, table)


def test_the_worlds_of_the_twin_test_preempt_swap_and_hit() -> None:
    drawn = [(i, 30, 20, i % 2, 0, 0) for i in range(12)]
    seen = {}
    for name in ("recompute", "swap", "prefix caching"):
        stopped, _, requests, _ = by_loop(trace_of(drawn), {**SETTINGS, **ENGINES[name]})
        assert not stopped
        seen[name] = requests
    assert sum(seen["recompute"]["num_preemptions"]) > 0
    assert sum(seen["swap"]["swapped_out_blocks"]) > 0
    assert sum(seen["prefix caching"]["num_cached_tokens"]) > 0


def test_where_the_engine_gets_stuck_both_do() -> None:
    trace = trace_of([(0, 40, 20, 0, 0, 0)] * 3)
    table = {**SETTINGS, "preemption_mode": "swap", "num_cpu_blocks_override": 3}
    assert by_loop(trace, table) == by_replica(trace, table)
    assert by_loop(trace, table)[0] == "swap-space-exhausted"


def test_bad_settings_are_refused_before() -> None:
    with pytest.raises(ConfigError):
        prepared(trace_of([(0, 1, 1, 0, 0, 0)]), {**SETTINGS, "max_model_len": 10_000})
