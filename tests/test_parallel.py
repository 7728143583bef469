"""Stages of a pipeline, and what a run leaves out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.config import make_config
from kvsim.errors import ConfigError
from kvsim.parallel import left_out, stage_layers


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (32, 1, (32,)),
        (32, 2, (16, 16)),
        (61, 2, (31, 30)),
        (5, 3, (2, 2, 1)),
        (7, 3, (2, 3, 2)),
        (28, 8, (3, 3, 3, 4, 4, 4, 4, 3)),
    ],
)
def test_stages_of_vllm(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    """Worked out by hand from vLLM 0.33.0, vllm/distributed/utils.py, `get_pp_indices`."""
    assert stage_layers(layers, stages) == expected


@given(st.integers(1, 200), st.integers(1, 200))
def test_all_layers_are_given_out_evenly(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ConfigError, match=r"pipeline_parallel_size: .* use at most"):
            stage_layers(layers, stages)
        return
    found = stage_layers(layers, stages)
    assert len(found) == stages
    assert sum(found) == layers
    assert max(found) - min(found) <= 1
    assert found[-1] == min(found)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"pipeline_parallel_size": 2}, "bubbles"),
        ({"data_parallel_size": 4}, "one replica"),
        ({"enable_expert_parallel": True}, "experts"),
        ({"cpu_offload_gb": 4}, "host link"),
        ({"enforce_eager": True}, "CUDA graphs"),
    ],
)
def test_what_is_left_out_is_said_in_one_line(keys: dict[str, Any], word: str) -> None:
    (line,) = left_out(make_config(keys))
    assert line.startswith(next(iter(keys)))
    assert word in line
    assert "\n" not in line


def test_nothing_is_left_out_by_default() -> None:
    assert left_out(make_config({})) == ()
    assert left_out(make_config({"tensor_parallel_size": 4})) == ()
