"""What a run leaves out is said in one line each."""

from typing import Any

import pytest

from kvsim.run.assumed import left_out
from kvsim.settings.config import make_config


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"pipeline_parallel_size": 2}, "bubbles"),
        ({"enable_expert_parallel": True}, "experts"),
        ({"cpu_offload_gb": 4}, "host link"),
        ({"enforce_eager": True}, "CUDA graphs"),
        ({"cost": {"front_end": {"request_ms": 8}}}, "streams"),
    ],
)
def test_what_is_left_out_is_said_in_one_line(keys: dict[str, Any], word: str) -> None:
    (line,) = left_out(make_config(keys))
    assert line.startswith(next(iter(keys)))
    assert word in line
    assert "\n" not in line


def test_stages_at_work_are_an_estimate_and_in_one_machine_unless_told() -> None:
    keys: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 8}
    estimate, together = left_out(make_config(keys), stages=2)
    assert "ESTIMATED" in estimate and "16 GPUs" in together
    network = {"stage_link": {"latency_us": 20, "bandwidth_gb_s": 50}}
    assert left_out(make_config({**keys, "cost": network}), stages=2) == (estimate,)


def test_nothing_is_left_out_by_default() -> None:
    assert left_out(make_config({})) == ()
    assert left_out(make_config({"tensor_parallel_size": 4})) == ()
