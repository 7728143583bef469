"""The arguments of a recorded run, from its `meta.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shared import SHARED, needs_shared

from kvsim.errors import ConfigError
from kvsim.settings.server import server_settings
from kvsim.settings.server.command import arguments

KWARGS: dict[str, Any] = {
    "model": "Qwen/Qwen3-30B-A3B",
    "tensor_parallel_size": 1,
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "max_num_seqs": 128,
    "max_model_len": None,
    "disable_custom_all_reduce": True,
}


def written(folder: Path, **further: Any) -> str:
    path = folder / "meta.json"
    path.write_text(json.dumps({"vllm_version": "0.19.0", "engine_kwargs": KWARGS, **further}))
    return str(path)


def test_a_record_says_what_its_engine_was_given(tmp_path: Path) -> None:
    path = written(tmp_path)
    word = server_settings(vllm_file=path)
    assert word.settings == {
        "model": "Qwen/Qwen3-30B-A3B",
        "tensor_parallel_size": 1,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "max_num_seqs": 128,
        "engine": "vllm-v1",
        "vllm_version": "0.19.0",
    }
    assert word.sources["data_parallel_size"] == f"{path}: data_parallel_size"
    assert word.notes[0].startswith(f"from {path}: model Qwen/Qwen3-30B-A3B, vLLM 0.19.0")
    given = {each.name: each.value for each in arguments(None, path)}
    assert given == KWARGS


def test_blocks_are_those_of_all_ranks_together(tmp_path: Path) -> None:
    cache = {"num_gpu_blocks": 5_001, "block_size": 32, "enable_prefix_caching": False}
    hardware = {"device_name": "NVIDIA GeForce RTX 4090"}
    word = server_settings(vllm_file=written(tmp_path, kv_cache=cache, hardware=hardware))
    said = {
        key: word.settings[key]
        for key in ("num_gpu_blocks_override", *cache)
        if key in word.settings
    }
    assert said == {
        "num_gpu_blocks_override": 2_500,
        "block_size": 32,
        "enable_prefix_caching": False,
    }
    assert word.settings["hardware"] == "NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize("blocks", [1, "many", 2.5])
def test_blocks_that_are_none_are_refused(tmp_path: Path, blocks: object) -> None:
    path = written(tmp_path, kv_cache={"num_gpu_blocks": blocks})
    with pytest.raises(ConfigError, match=r"meta\.json: kv_cache\.num_gpu_blocks .* each rank"):
        server_settings(vllm_file=path)


@pytest.mark.parametrize(
    "text", ['{"engine_kwargs": 5}', "[1]", "{}", '{"vllm_version": "0.19.0"}']
)
def test_another_json_file_has_no_command(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no vLLM command"):
        server_settings(vllm_file=str(path))


@needs_shared("groundtruth")
def test_records_as_published() -> None:
    of_4090, of_two = (
        server_settings(vllm_file=str(SHARED / "groundtruth" / run / "meta.json")).settings
        for run in ("rtx4090-llama-3.1-8b", "rtxpro6000-qwen3-32b")
    )
    assert (of_4090["num_gpu_blocks_override"], of_4090["max_num_seqs"]) == (2_588, 256)
    assert of_4090["hardware"] == "NVIDIA GeForce RTX 4090"
    assert (of_two["tensor_parallel_size"], of_two["model"]) == (2, "Qwen/Qwen3-32B")
    assert "num_gpu_blocks_override" not in of_two
