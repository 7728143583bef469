"""What a run leaves out is said in one line each."""

from typing import Any

import pytest

from kvsim.machine import model_of
from kvsim.run.assumed import left_out
from kvsim.settings.config import make_config


def said(keys: dict[str, Any], stages: int = 1) -> tuple[str, ...]:
    config = make_config(keys)
    return left_out(config, model_of(config), stages)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"pipeline_parallel_size": 2}, "bubbles"),
        ({"enable_expert_parallel": True}, "experts"),
        ({"cpu_offload_gb": 4}, "host link"),
        ({"enforce_eager": True}, "CUDA graphs"),
        ({"cost": {"front_end": {"request_ms": 8}}}, "streams"),
        ({"max_model_len": 131_073, "model": "llama-3.1-8b"}, "131,072 tokens long"),
    ],
)
def test_what_is_left_out_is_said_in_one_line(keys: dict[str, Any], word: str) -> None:
    (line,) = said(keys)
    assert line.startswith(next(iter(keys)))
    assert word in line
    assert "\n" not in line


def test_stages_at_work_are_an_estimate_and_in_one_machine_unless_told() -> None:
    keys: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 8}
    estimate, together = said(keys, 2)
    assert "ESTIMATED" in estimate and "16 GPUs" in together
    network = {"stage_link": {"latency_us": 20, "bandwidth_gb_s": 50}}
    assert said({**keys, "cost": network}, 2) == (estimate,)


def test_nothing_is_left_out_by_default() -> None:
    assert said({}) == ()
    assert said({"tensor_parallel_size": 4}) == ()
    assert said({"max_model_len": 131_072, "model": "llama-3.1-8b"}) == ()
