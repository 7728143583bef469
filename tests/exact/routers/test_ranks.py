"""Data-parallel ranks: in lock step where the model has experts, else on their own."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from command import run_here
from places import ROOT

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.cost import ConstantCost
from kvsim.engines.vllm_v1.scheduler import VllmV1
from kvsim.errors import ConfigError, EngineStopped
from kvsim.fleet import FleetResult, simulate_fleet, summarise_fleet
from kvsim.results.ledger import KERNELS, TIME_PARTS
from kvsim.run.simulation import simulate
from kvsim.workload import Row, Trace

CHAT = str(ROOT / "traces" / "chat.jsonl")
MS = 1_000_000
PRICES = {"step_us": 10_000, "prefill_token_us": 1_000, "decode_seq_us": 0, "context_token_ns": 0}
"""10 ms a step, and 1 ms for each prompt token."""
RANKS: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "max_model_len": 4096,
    "num_gpu_blocks_override": 2_000,
    "data_parallel_size": 2,
    "async_scheduling": False,
    "cost": {"model": "constant", **PRICES},
}


def requests(*given: tuple[int, int, int]) -> Trace:
    """Requests given as arrival in ms, prompt and output tokens."""
    rows = [
        Row(i, f"r{i}", i + 2, at * MS, prompt, output)
        for i, (at, prompt, output) in enumerate(given)
    ]
    return Trace("made", "native", "", rows)


def served(trace: Trace | str, **settings: Any) -> FleetResult:
    config = RANKS | settings
    return simulate_fleet(trace, [config] * config["data_parallel_size"], "vllm-dp")


def ms(column: Any) -> list[float]:
    return [ns / MS for ns in column]


TWO = requests((0, 10, 3), (5, 20, 2))
"""One for each rank."""


def test_a_step_takes_as_long_as_the_slowest_rank() -> None:
    """Worked out by hand: the prompt of 20 tokens waits for the step under way, which ends after
    20 ms. Its own step lasts 30 ms, and the other rank's decode waits for it."""
    result = served(TWO)
    assert result.requests["replica"].tolist() == [0, 1]
    for replica in result.replicas:
        assert ms(replica.steps["start_ns"]) == [0, 20, 50]
        assert ms(replica.steps["end_ns"]) == [20, 50, 60]
    first, second = (replica.steps for replica in result.replicas)
    assert first["prefill_tokens"].tolist() == [10, 0, 0]
    assert first["decode_seqs"].tolist() == [0, 1, 1]
    assert second["prefill_tokens"].tolist() == [0, 20, 0]
    assert second["decode_seqs"].tolist() == [0, 0, 1]
    assert ms(result.requests["first_token_ns"]) == [20, 50]
    assert ms(result.requests["finish_ns"]) == [60, 60]


def test_waiting_for_a_slower_rank_is_a_part_of_its_own() -> None:
    """The first rank's decode of 10 ms waits 20 ms for the prompt of the second, whose dummy batch
    waited for the prompt of the first."""
    result = served(TWO)
    first, second = result.replicas
    assert ms(first.steps["rank_wait_ns"]) == [0, 20, 0]
    assert ms(second.steps["rank_wait_ns"]) == [20, 0, 0]
    assert ms(result.requests["rank_stall_ns"]) == [20, 0]
    assert ms(result.requests["waiting_step_ns"]) == [0, 15]
    assert ms(result.requests["own_prefill_ns"]) == [10, 20]
    assert ms(result.requests["host_overhead_ns"]) == [30, 20]


def test_two_steps_in_flight_take_in_who_comes_a_step_later() -> None:
    """The second request comes while the first step runs, and the next one is composed already."""
    result = served(TWO, async_scheduling=True)
    for replica in result.replicas:
        assert ms(replica.steps["start_ns"]) == [0, 20, 30, 60]
        assert ms(replica.steps["end_ns"]) == [20, 30, 60, 70]
    assert ms(result.requests["first_token_ns"]) == [20, 60]
    assert ms(result.requests["finish_ns"]) == [60, 70]


@pytest.mark.parametrize("settings", [{"model": "llama-3-8b"}, {"data_parallel_size": 1}])
def test_others_do_not_wait(settings: dict[str, Any]) -> None:
    """Ranks of a dense model, and servers of their own."""
    config = RANKS | settings
    result = simulate_fleet(TWO, [config] * 2, "vllm-dp")
    assert ms(result.requests["first_token_ns"]) == [20, 35]
    assert ms(result.requests["finish_ns"]) == [40, 45]


def test_ranks_sleep_until_a_request_comes_to_one_of_them() -> None:
    result = served(requests((0, 10, 1), (500, 20, 1), (1_000, 30, 2)))
    assert result.requests["replica"].tolist() == [0, 1, 0]
    for replica in result.replicas:
        assert ms(replica.steps["start_ns"]) == [0, 500, 1_000, 1_040]
        assert ms(replica.steps["end_ns"]) == [20, 530, 1_040, 1_050]


class Tokens(ConstantCost):
    """A step takes 1 ms for each token that its ranks have in the mean."""

    def step_ns(self, plan: Plan) -> int:
        assert plan.rank_tokens is not None
        return round(plan.rank_tokens * MS)


def test_a_cost_model_knows_the_tokens_of_all_ranks() -> None:
    """Batches that fit a CUDA graph are padded to the largest, others are not. An idle rank has
    one token."""
    trace = requests((0, 600, 3), (5, 20, 2))
    cost = {"cost": {"model": f"{__name__}:Tokens"}}
    result = served(trace, **cost)
    assert ms(result.replicas[0].steps["end_ns"]) == [300.5, 320.5, 321.5]
    eager = served(trace, **cost, enforce_eager=True)
    assert ms(eager.replicas[0].steps["end_ns"]) == [300.5, 311, 312]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_load_is_served_in_lock_step(ahead: bool) -> None:
    keys = {"num_prompts": 40, "cost": {}, "enable_expert_parallel": True}
    result = served(CHAT, **keys, data_parallel_size=3, async_scheduling=ahead)
    first, *others = (replica.steps for replica in result.replicas)
    for steps in others:
        for name in ("start_ns", "end_ns"):
            assert np.array_equal(first[name], steps[name])
    assert summarise_fleet(result)["completed"] == 40
    for replica in result.replicas:
        spent = replica.requests["finish_ns"] - replica.requests["released_ns"]
        assert (sum(replica.requests[name] for name in TIME_PARTS) == spent).all()
        steps = replica.steps
        parts = sum(steps[name] for name in (*KERNELS, "rank_wait_ns"))
        assert (parts == steps["end_ns"] - steps["start_ns"]).all()
        assert not any("one replica is simulated" in note for note in replica.meta["notes"])
    again = served(CHAT, **keys, data_parallel_size=3, async_scheduling=ahead)
    assert summarise_fleet(again) == summarise_fleet(result)


@pytest.mark.parametrize("seed", range(8))
def test_every_step_of_random_loads_lasts_as_long_as_its_slowest_batch(seed: int) -> None:
    """Under memory pressure, too. The rows say what each rank computed, and so how long it took."""
    rng = Random(seed)
    given, now_ms = [], 0
    for _ in range(rng.randrange(5, 30)):
        now_ms += rng.choice((0, 0, 7, 40, 400))
        given.append((now_ms, rng.randrange(1, 120), rng.randrange(1, 30)))
    result = served(
        requests(*given),
        data_parallel_size=rng.randrange(2, 5),
        async_scheduling=rng.random() < 0.5,
        max_model_len=160,
        num_gpu_blocks_override=rng.choice((12, 20, 200)),
        max_num_batched_tokens=rng.choice((32, 512)),
        max_num_seqs=8,
    )
    assert summarise_fleet(result)["completed"] == len(given)
    ranks = [replica.steps for replica in result.replicas]
    whole = ranks[0]["end_ns"] - ranks[0]["start_ns"]
    alone = []
    for steps in ranks:
        assert np.array_equal(steps["start_ns"], ranks[0]["start_ns"])
        assert np.array_equal(steps["end_ns"], ranks[0]["end_ns"])
        computes = steps["prefill_seqs"] + steps["decode_seqs"] > 0
        alone.append(np.where(computes, 10 * MS + steps["prefill_tokens"] * MS, 0))
    assert np.array_equal(whole, np.max(alone, axis=0))


class Dies(VllmV1):
    """An engine that stops at its second step if it serves request r0."""

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        super().settle(batch, plan, now_ns)
        if any(request.id == "r0" for request in batch.running):
            raise EngineStopped("engine-error", "r0", "it dies", "", "made")


def test_a_rank_that_stops_does_not_hold_the_others_up() -> None:
    result = served(TWO, engine=f"{__name__}:Dies", async_scheduling=None)
    kinds = [replica.meta["outcome"]["kind"] for replica in result.replicas]
    assert kinds == ["engine-error", "finished"]
    assert ms(result.replicas[1].steps["end_ns"]) == [20, 50, 60]
    assert result.requests["status"][1] == "completed"


@pytest.mark.parametrize(
    "settings",
    [{"kv_offloading_size": 4.0}, {"engine": "vllm-0.6.3", "preemption_mode": "swap"}],
    ids=["offloading", "swapping"],
)
def test_copies_of_single_ranks_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="without copies between GPU and CPU") as error:
        served(TWO, **{**settings, "async_scheduling": None})
    assert "\n" not in str(error.value)


def test_a_run_of_one_rank_says_so() -> None:
    [note] = [each for each in simulate(TWO, RANKS).meta["notes"] if "data_parallel_size" in each]
    assert "one replica is simulated" in note and "\n" not in note


def test_the_command_runs_all_ranks(tmp_path: Path) -> None:
    command = ["run", "--trace", CHAT, "--num-prompts", "10", "--model", "qwen3-30b-a3b"]
    command += ["--data-parallel-size", "2", "--max-model-len", "4096", "--out", "out"]
    done = run_here(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 replicas behind vllm-dp" in done.stdout
    figures = json.loads((tmp_path / "out" / "fleet.json").read_text())
    assert figures["completed"] == 10 and len(figures["replicas"]) == 2
    refused = run_here([*command, "--replicas", "3"], tmp_path)
    assert refused.returncode == 2
    assert "data_parallel_size 2 is simulated as 2 replicas" in refused.stderr
    refused = run_here([*command, "--step-log", "log"], tmp_path)
    assert refused.returncode == 2 and "show one engine, of several" in refused.stderr
