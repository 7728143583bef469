"""What vLLM 0.3.3 schedules, in tiny runs."""

from typing import Any

import pytest

from kvsim.against.conform.cases import run_case
from kvsim.engines.vllm_033 import Vllm033


def log(lengths: list[int], output_len: int = 2, arrivals: Any = None, **config: Any) -> Any:
    defaults = {
        "block_size": 4,
        "num_gpu_blocks": 20,
        "num_cpu_blocks": 20,
        "max_model_len": 40,
        "max_num_batched_tokens": 40,
        "max_num_seqs": 8,
    }
    trace = [
        {
            "id": f"r{i}",
            "arrival": arrivals[i] if arrivals else 0.0,
            "prompt_token_ids": [i] * length,
            "output_len": output_len,
        }
        for i, length in enumerate(lengths)
    ]
    return list(run_case("vllm-0.3.3", {**defaults, **config}, trace, audit_every=1))


def admitted(step: Any) -> list[str]:
    return [entry[0] for entry in step["prefill"]]


def test_prompts_are_charged_as_a_padded_rectangle() -> None:
    (first, *_) = log([4, 12, 12, 3])
    assert admitted(first) == ["r0", "r1", "r2"]
    assert first["batched_tokens"] == 36


def test_padding_is_limited() -> None:
    (first, *_) = log([4, 12], max_paddings=7)
    assert admitted(first) == ["r0"]
    (first, *_) = log([4, 12], max_paddings=8)
    assert admitted(first) == ["r0", "r1"]


def test_the_batch_is_in_order_of_ids_as_text() -> None:
    (first, *_) = log([3] * 11, max_num_seqs=11)
    assert admitted(first) == ["r0", "r1", "r10", *(f"r{i}" for i in range(2, 10))]


def test_a_step_that_only_ignores_prompts_lets_nobody_decode() -> None:
    steps = log([4, 41], output_len=3, arrivals=[0.0, 1.0])
    assert (steps[1]["ignored"], steps[1]["decode"]) == (["r1"], [])
    assert steps[2]["decode"] == ["r0"]


def test_the_youngest_gives_way_even_where_nobody_needs_a_block() -> None:
    steps = log([5, 5], output_len=3, num_gpu_blocks=4)
    assert [step["preempted"] for step in steps[:2]] == [[], [["r1", "recompute"]]]
    assert steps[1]["decode"] == ["r0"]


def test_nobody_is_admitted_while_somebody_is_swapped_out() -> None:
    steps = log(
        [5, 5, 2], output_len=4, arrivals=[0, 0, 1], num_gpu_blocks=4, preemption_mode="swap"
    )
    assert steps[1]["swapped_out"] == ["r1"]
    while_swapped = [step for step in steps if step["swapped"]]
    assert any(step["free_gpu_blocks"] > 0 for step in while_swapped)
    assert all(step["waiting"] == 1 and not step["prefill"] for step in while_swapped)
    assert steps[-1]["finished"] == ["r2"]


def test_what_the_engine_refuses_at_start_up_is_named() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        Vllm033(num_gpu_blocks=9, max_model_len=64, max_num_batched_tokens=63)
    with pytest.raises(ValueError, match="max_num_seqs"):
        Vllm033(num_gpu_blocks=9, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=65)
