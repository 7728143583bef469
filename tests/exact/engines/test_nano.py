"""What nano-vllm schedules, in tiny runs."""

from typing import Any

import pytest
from worlds import arrive, batch_of, trace

from kvsim.against.conform.cases import run_case
from kvsim.core.batch import Batch
from kvsim.core.request import Request
from kvsim.core.schema import BLOCKED
from kvsim.engines.nano import Nano, Nano2025, NanoTables, NanoTables2025
from kvsim.errors import EngineStopped
from kvsim.run.simulation import simulate
from kvsim.workload.streams import TokenStream


def log(
    prompts: list[list[int]], output_len: int = 2, engine: str = "nano-vllm", **config: int
) -> Any:
    defaults = {
        "block_size": 4,
        "num_gpu_blocks": 20,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
    }
    trace = [
        {"id": str(i), "arrival": 0.0, "prompt_token_ids": prompt, "output_len": output_len}
        for i, prompt in enumerate(prompts)
    ]
    return list(run_case(engine, {**defaults, **config}, trace, audit_every=1))


def waiting(scheduler: Nano, tables: NanoTables, *lengths: int) -> Batch:
    batch: Batch = batch_of(tables, scheduler, [3] * len(lengths))
    for index, length in enumerate(lengths):
        stream = TokenStream([index] * length, row=index, rows=len(lengths))
        arrive(scheduler, batch, Request(index, str(index), length, stream))
    return batch


def test_only_the_first_prompt_of_a_step_is_cut() -> None:
    steps = log([[1] * 10, [2] * 10])
    assert [step["prefill"] for step in steps[:3]] == [
        [["0", 10, 0, 0, 1]],
        [["1", 10, 0, 0, 1]],
        [],
    ]
    (first, second, *_) = log([[1] * 20, [2] * 12])
    assert first["prefill"] == [["0", 16, 0, 0, 0]]
    assert (first["waiting"], first["free_gpu_blocks"]) == (2, 15)
    assert second["prefill"] == [["0", 4, 0, 16, 1], ["1", 12, 0, 0, 1]]


def test_max_num_seqs_bounds_a_step_and_not_who_holds_blocks() -> None:
    steps = log([[i] * 3 for i in range(4)], output_len=3, max_num_seqs=2)
    assert [len(step["prefill"]) for step in steps[:2]] == [2, 2]
    assert steps[2]["running"] == 4
    assert steps[2]["decode"] == ["0", "1"]


def test_a_hit_is_not_charged() -> None:
    steps = log([[7] * 9, [7] * 10], output_len=1, max_num_seqs=1)
    assert steps[1]["prefill"] == [["1", 2, 8, 0, 1]]
    assert steps[1]["batched_tokens"] == 2


def test_in_2025_equal_prompts_of_one_step_share_and_the_whole_length_must_fit() -> None:
    (first, *_) = log([[7] * 8, [7] * 8, [7] * 8], engine="nano-vllm-2025-08")
    assert first["prefill"] == [["0", 8, 0, 0, 1], ["1", 0, 8, 0, 1], ["2", 0, 8, 0, 1]]
    (first, *_) = log([[7] * 8, [7] * 12], engine="nano-vllm-2025-08")
    assert first["prefill"] == [["0", 8, 0, 0, 1]]


def test_the_tail_gives_way_and_returns_to_the_front() -> None:
    steps = log([[1] * 4, [2] * 4], output_len=4, num_gpu_blocks=3)
    assert steps[1]["preempted"] == [["1", "recompute"]]
    assert (steps[1]["decode"], steps[1]["waiting"]) == (["0"], 1)
    assert steps[-1]["finished"] == ["1"]


def test_the_engine_dies_where_nothing_can_be_scheduled() -> None:
    scheduler = Nano(block_size=4)
    batch = waiting(scheduler, NanoTables(4, 2), 9)
    with pytest.raises(EngineStopped, match="nothing-schedulable") as stop:
        scheduler.compose(batch, 0)
    assert stop.value.request_id == "0"
    assert "scheduler.py:71" in stop.value.rule
    batch.audit()


def test_without_requests_a_step_is_empty() -> None:
    scheduler = Nano(block_size=4)
    assert scheduler.compose(waiting(scheduler, NanoTables(4, 2)), 0).empty


@pytest.mark.parametrize(
    ("scheduler", "num_gpu_blocks", "reason"),
    [
        (Nano(block_size=4, max_num_seqs=1), 4, "slots"),
        (Nano(block_size=4, max_num_batched_tokens=9), 4, "tokens"),
        (Nano(block_size=4, max_num_batched_tokens=8), 4, "tokens"),
        (Nano(block_size=4), 3, "blocks"),
        (Nano2025(block_size=4, max_num_seqs=1), 4, "slots"),
        (Nano2025(block_size=4, max_num_batched_tokens=9), 4, "tokens"),
        (Nano2025(block_size=4), 3, "blocks"),
    ],
)
def test_the_plan_says_why_the_head_waits(
    scheduler: Nano, num_gpu_blocks: int, reason: str
) -> None:
    tables = NanoTables2025 if isinstance(scheduler, Nano2025) else NanoTables
    batch = waiting(scheduler, tables(4, num_gpu_blocks), 8, 8)
    plan = scheduler.compose(batch, 0)
    assert BLOCKED[plan.blocked] == reason
    assert batch.waiting[0].blocked_steps == 1


def test_what_the_engine_refuses_at_start_up_is_named() -> None:
    with pytest.raises(ValueError, match="block_size"):
        Nano(block_size=1)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Nano2025(block_size=4, max_model_len=20000)


def test_real_token_streams_recompute_onto_their_own_blocks() -> None:
    scheduler = Nano(block_size=4)
    batch = waiting(scheduler, NanoTables(4, 3), 4, 4)
    ended: list[Request] = []
    for now_ns in range(9):
        plan = scheduler.compose(batch, now_ns)
        scheduler.settle(batch, plan, now_ns)
        batch.audit()
        ended += batch.ended
        batch.ended.clear()
    assert [request.num_preemptions for request in ended] == [0, 1]
    assert (ended[1].lost_tokens, ended[1].recached_tokens) == (4, 4)
    assert ended[1].recomputed_tokens == 0


class Fewer(Nano):
    """Lets more or fewer requests decode from step to step."""

    def compose(self, batch: Batch, now_ns: int) -> Any:
        self.max_num_seqs = 2 + now_ns // 50_000_000 % 5
        return super().compose(batch, now_ns)


def test_how_many_decode_may_change_from_step_to_step() -> None:
    settings = {"model": "tiny", "engine": f"{__name__}:Fewer", "block_size": 4}
    settings |= {"max_model_len": 128, "num_gpu_blocks_override": 60, "block_manager": "nano-vllm"}
    settings |= {"cost": {"model": "constant", "step_us": 10_000}}
    result = simulate(trace(*((20 * i, 8, 60) for i in range(20))), settings)
    assert set(result.steps["decode_seqs"]) >= {2, 3, 4, 5, 6}
    assert result.requests["status"] == ["completed"] * 20
