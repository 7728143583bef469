"""Pipelines under `kvsim run`: stages that overlap, the engine's queue, the ledger, and refusals.

Unless a test says otherwise, a token of a prompt takes 100 us on all stages together, a decoding
sequence 1 ms, and sending no time.
"""

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from made import make_trace

from kvsim.against.conform.step_log import finish_record, step_record
from kvsim.against.conform.vllm_v1 import replay
from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.cost import ConstantCost
from kvsim.cost.estimates import Passage, StagedCost
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.results.ledger import KERNELS, TIME_PARTS
from kvsim.run.assembly import Parts, assemble
from kvsim.run.replica.inbox import Inbox
from kvsim.run.replica.time import Clock, PipelineTime
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.settings.config import RunConfig, make_config
from kvsim.workload import TokenContent, Trace

MS = 1_000_000
AT_ONCE = {"stage_link": {"latency_us": 0, "bandwidth_gb_s": 1e9}}
FLAT = {
    "model": "constant",
    "step_us": 0,
    "prefill_token_us": 100,
    "decode_seq_us": 1000,
    "context_token_ns": 0,
}
SMALL = {
    "model": "qwen2.5-0.5b",
    "hardware": "h100",
    "num_gpu_blocks_override": 100,
    "max_model_len": 176,
    "pipeline_parallel_size": 2,
}


def run(trace: Trace, **changes: Any) -> Result:
    return simulate(trace, {**SMALL, "cost": {**FLAT, **AT_ONCE}, **changes})


def requests(*lengths: tuple[int, int], every_ns: int = 0) -> Trace:
    """Requests of (prompt, output) tokens, one every so many nanoseconds."""
    trace = make_trace([(n, out, TokenContent((i,) * n)) for i, (n, out) in enumerate(lengths)])
    rows = [replace(row, arrival_ns=row.index * every_ns) for row in trace.rows]
    return replace(trace, rows=rows)


def random_run(seed: int) -> tuple[Trace, dict[str, Any]]:
    """Requests that do not always fit, in steps of few tokens, on stages of any number."""
    rng = Random(seed)
    lengths = [(rng.randint(1, 100), rng.randint(1, 40)) for _ in range(rng.randint(1, 25))]
    trace = requests(*lengths, every_ns=rng.choice([0, MS // 3, 5 * MS, 300 * MS]))
    seqs = rng.randint(1, 8)
    return trace, {
        "pipeline_parallel_size": rng.randint(2, 5),
        "async_scheduling": rng.random() < 0.5,
        "enable_prefix_caching": rng.random() < 0.5,
        "num_gpu_blocks_override": rng.randint(13, 30),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": seqs + rng.randint(0, 60),
    }


class Three(StagedCost):
    """Steps of 1 ns of the host, and 4 and 6 ns on two stages, 2 ns apart."""

    def passage(self, plan: Plan, step_ns: int) -> Passage:
        return Passage(1, (4, 6), 2)


def staged(kind: type[StagedCost], **keys: Any) -> StagedCost:
    config = make_config({**SMALL, "cost": {**FLAT, **AT_ONCE}, **keys})
    cost = ConstantCost(**{k: v for k, v in FLAT.items() if k != "model"})  # type: ignore[arg-type]
    return kind(cost, load_model(config.model_name), load_hardware("h100"), config)


def test_three_steps_on_two_stages() -> None:
    """
    ```
    host      0 1           5 6          11 12
    stage 0     1 ─ 5         7 ─ 11         13 ─ 17
    sends           5 ─ 7         11 ─ 13          17 ─ 19
    stage 1             7 ─ 13          14 ─ 20           21 ─ 27
    ```
    The second step may overwrite what the first stage sends only from 7 on. The third needs the
    tokens of the first, which exist at 13. On the second stage, the host's part follows the step
    before.
    """
    parts = assemble(make_config(SMALL))
    env = Clock()
    time = PipelineTime(env, staged(Three), parts.link.transfer_ns, Inbox(env, _nobody()))
    plan, after_ns, found = Plan(8), 0, []
    plan.add(Request(0, "r0", 1), 1, 0)
    plan.samples = 1
    for _ in range(3):
        begin_ns, after_ns, free_ns = time.runs(plan, 0, after_ns, 11)
        found.append((begin_ns, free_ns, after_ns, time.gauges()))
    assert found == [(0, 5, 13, (2, 0)), (5, 11, 20, (2, 2)), (11, 17, 27, (2, 3))]


def _nobody() -> Any:
    class Nobody:
        listen = False

        def start(self) -> Any:
            return iter(())

    return Nobody()


def test_prompts_follow_each_other_through_the_stages() -> None:
    """One prompt a step: one stage ends one each ms, two stages one each half."""
    trace = requests((10, 1), (10, 1), (10, 1), (10, 1))
    keys = {"max_num_batched_tokens": 10, "max_num_seqs": 10, "async_scheduling": False}
    alone = run(trace, pipeline_parallel_size=1, **keys)
    assert list(alone.requests["finish_ns"]) == [1 * MS, 2 * MS, 3 * MS, 4 * MS]
    both = run(trace, **keys)
    assert list(both.requests["finish_ns"]) == [MS, 3 * MS // 2, 2 * MS, 5 * MS // 2]
    assert list(both.steps["start_ns"]) == [0, MS // 2, MS, 3 * MS // 2]
    assert not both.steps["stage_wait_ns"].any()
    # The last stage is idle for 0.5 ms at the start, the first one at the end, of 2.5 ms each.
    assert both.summary["pipeline_bubble_share"] == pytest.approx(0.2)
    assert "pipeline_bubble_share" not in alone.summary


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_alone_is_served_as_fast_and_its_empty_steps_are_no_rows(ahead: bool) -> None:
    result = run(requests((10, 5)), async_scheduling=ahead)
    assert list(result.requests["finish_ns"]) == [5 * MS]
    assert len(result.steps["start_ns"]) == 5


def test_the_last_stage_makes_the_logits_and_layers_share_the_rest() -> None:
    keys = {"model": "llama-3.1-8b", "pipeline_parallel_size": 3}
    config = make_config({**keys, "hardware": "h100", "cost": {"model": "roofline"}})
    cost = assemble(config).cost
    assert isinstance(cost, StagedCost)
    plan = Plan(8)
    plan.add_chunk(0, 4096, 0, 0)
    plan.samples = 1
    with_logits = cost.passage(plan, cost.step_ns(plan))
    assert sum(with_logits.stages_ns) + with_logits.host_ns == cost.step_ns(plan)
    plan.samples = 0
    host_ns, stages_ns, _ = cost.passage(plan, cost.step_ns(plan))
    assert host_ns == 300_000  # step_overhead_us of the GPU
    first, second, last = stages_ns  # of 11, 11 and 10 layers
    assert first == pytest.approx(second, abs=1)
    assert first == pytest.approx(1.1 * last, abs=2)
    assert with_logits.stages_ns[:2] == pytest.approx(stages_ns[:2], abs=1)
    head_ns = 128_256 * 4096 * 2 / (0.85 * 3350)  # the projection is read once
    assert with_logits.stages_ns[2] - last == pytest.approx(head_ns, abs=2)


def test_activations_take_the_links_of_a_group() -> None:
    """4096 values of two bytes, twice: 16 KiB a token. Each GPU sends its part, and gathers."""
    link = {"stage_link": {"latency_us": 10, "bandwidth_gb_s": 100}}
    keys: dict[str, Any] = {"model": "llama-3.1-8b", "cost": {**FLAT, **link}}
    alone, four = staged(StagedCost, **keys), staged(StagedCost, **keys, tensor_parallel_size=4)
    assert alone.send_ns(1000) == round(10_000 + 16_384_000 / 100)
    assert four.send_ns(1000) == round(10_000 + 4_096_000 / 100 + 10_000 + 0.75 * 163_840)
    of_gpu = staged(StagedCost, model="llama-3.1-8b", cost=FLAT)
    assert of_gpu.send_ns(1000) == round(5_000 + 16_384_000 / 250)  # all-reduce of the H100
    assert of_gpu.describe()["stages"]["layers"] == [16, 16]


def one_stage(config: RunConfig) -> Parts:
    """A run without a pipeline, on a pipeline of one stage."""
    parts = assemble(config)
    return parts._replace(cost=StagedCost(parts.cost, parts.model, parts.hardware, config))


@pytest.mark.parametrize("seed", range(8))
def test_one_stage_is_no_pipeline(seed: int) -> None:
    trace, keys = random_run(seed)
    config = make_config({**SMALL, **keys, "pipeline_parallel_size": 1, "enable_lora": True})
    plain, staged = simulate(trace, config), simulate(trace, config, parts_of=one_stage)
    for name, column in plain.requests.items():
        assert np.array_equal(column, staged.requests[name]), (seed, name)
    for name, column in plain.steps.items():
        assert np.array_equal(column, staged.steps[name]), (seed, name)
    assert not staged.steps["stage_wait_ns"].any()


SHARED = (
    *("max_num_seqs", "max_num_batched_tokens", "pipeline_parallel_size"),
    "enable_prefix_caching",
)
"""Settings of the same name in recorded cases."""


class Decisions:
    """What was decided in each step that decided anything."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def begin(self) -> None:
        self.steps = []

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        self.steps.append(step_record(batch, plan, 0, 0.0, arrived))

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        if self.steps:
            finish_record(self.steps[-1], batch, ended)


def _decided(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the steps that do anything, what they do."""
    names = ("prefill", "decode", "preempted", "batched_tokens")
    found = [{name: record.get(name) for name in names} for record in records]
    return [each for each in found if each["prefill"] or each["decode"] or each["preempted"]]


@pytest.mark.parametrize("seed", range(10))
def test_a_run_decides_what_the_recorded_rules_decide(seed: int) -> None:
    """The unit clock makes the real engine's logs of pipelines. If all requests are there from the
    start, how long steps take decides nothing."""
    trace, keys = random_run(seed)
    trace = replace(trace, rows=[replace(row, arrival_ns=0) for row in trace.rows])
    seen = Decisions()
    result = simulate(trace, {**SMALL, **keys, "cost": FLAT}, watcher=seen)
    assert result.meta["outcome"]["kind"] == "finished"
    config = {
        "block_size": 16,
        "num_gpu_blocks": keys["num_gpu_blocks_override"],
        "max_model_len": SMALL["max_model_len"],
        "v1_async": keys["async_scheduling"],
        **{key: keys[key] for key in SHARED},
    }
    rows = [
        {
            "id": row.id,
            "arrival": 0,
            "prompt_token_ids": [1000 + row.index] * row.input_length,
            "output_len": row.output_length,
        }
        for row in trace.rows
    ]
    wanted, found = map(_decided, (replay(config, rows), seen.steps))
    assert found == wanted


@pytest.mark.parametrize("seed", range(8))
def test_the_parts_of_steps_and_requests_add_up(seed: int) -> None:
    """Also where clients give up: their requests end while a step of theirs is in flight."""
    trace, keys = random_run(seed)
    rng = Random(seed)
    patient = [rng.choice([None, None, rng.randint(1, 300) * MS]) for _ in trace.rows]
    rows = [replace(row, abort_after_ns=ns) for row, ns in zip(trace.rows, patient, strict=True)]
    trace = replace(trace, rows=rows)
    link = {"latency_us": rng.choice([0, 5, 3000]), "bandwidth_gb_s": rng.choice([0.01, 250])}
    cost = rng.choice([{"model": "constant"}, {"model": "roofline"}])
    result = run(trace, **{**keys, "cost": {**cost, "stage_link": link}})
    steps, table = result.steps, result.requests
    whole = sum(steps[name] for name in (*KERNELS, "send_ns", "stage_wait_ns"))
    assert np.array_equal(whole, steps["end_ns"] - steps["start_ns"])
    assert (np.diff(steps["start_ns"]) >= 0).all() and (np.diff(steps["end_ns"]) >= 0).all()
    assert all((steps[name] >= 0).all() for name in (*KERNELS, "send_ns", "stage_wait_ns"))
    lives = table["finish_ns"] - table["arrival_ns"]
    assert np.array_equal(sum(table[name] for name in TIME_PARTS), lives)
    assert all((table[name] >= 0).all() for name in TIME_PARTS)


def test_blocks_are_those_of_the_fullest_stage() -> None:
    keys: dict[str, Any] = {"model": "llama-3.1-8b", "hardware": "l40s", "max_model_len": 8192}
    both = assemble(make_config({**keys, "pipeline_parallel_size": 2}))
    alone = assemble(make_config(keys))
    assert both.memory.num_hidden_layers == 16
    assert both.memory.block_bytes * 2 == alone.memory.block_bytes
    assert both.blocks.gpu.size > 2 * alone.blocks.gpu.size
    assert (both.scheduler.in_flight, alone.scheduler.in_flight) == (3, 2)
    for parts in (both, alone):
        step = parts.scheduler.max_num_batched_tokens
        assert parts.blocks.layout.max_in_flight_tokens == step * parts.scheduler.in_flight


def test_windows_keep_the_tokens_of_all_steps_in_flight() -> None:
    """What `max_model_len` needs of the pool counts every step in flight."""
    keys = {"model": "gemma-3-4b", "max_num_seqs": 256, "max_model_len": "auto"}
    few = {**keys, "num_gpu_blocks_override": 3000, "max_num_batched_tokens": 1024}
    lengths = [
        assemble(make_config({**few, "pipeline_parallel_size": n})).config.max_model_len
        for n in (1, 4)
    ]
    assert isinstance(lengths[0], int) and isinstance(lengths[1], int)
    assert lengths[1] < lengths[0]


@pytest.mark.parametrize(
    ("keys", "begins"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative"),
        ({"kv_offloading_size": 4}, "kv_offloading_size"),
        ({"model": "qwen3-30b-a3b", "data_parallel_size": 2}, "data_parallel_size"),
        ({"block_manager": "naive"}, "block_manager: naive does not go with vllm-v1"),
        ({"pipeline_parallel_size": 25}, "pipeline_parallel_size"),
        ({"cost": {"stage_link": {"latency_us": 1}}}, "cost.stage_link"),
        ({"cost": {"stage_link": 5}}, "cost.stage_link"),
    ],
)
def test_what_is_not_simulated_is_refused_in_one_line(keys: dict[str, Any], begins: str) -> None:
    with pytest.raises(ConfigError, match=f"^{begins}") as caught:
        assemble(make_config({**SMALL, **keys}))
    assert "\n" not in str(caught.value)


def test_other_engines_pass_a_step_through_all_stages_at_once() -> None:
    result = run(requests((10, 3)), engine="vllm-0.6.3")
    assert "bubbles" in result.meta["notes"][0]
    assert "send_ns" not in result.steps
