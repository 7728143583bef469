"""What nobody gave is chosen as the engine would, and said."""

from typing import Any

import pytest

from kvsim.errors import ConfigError
from kvsim.report.wording import assumed
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config


def parts_of(**settings: Any) -> Any:
    return assemble(make_config(settings))


def test_a_run_without_settings_says_what_it_assumes() -> None:
    parts = parts_of()
    values = {key: each.value for key, each in parts.assumed.items()}
    assert values == {
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm",
        "max_model_len": 131072,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.92,
        "async_scheduling": True,
        "scheduler_reserve_full_isl": True,
        "block_size": 16,
        "enable_prefix_caching": True,
        "memory_formula": "vllm",
        "vllm_version": "0.33.0",
        "dtype": "bfloat16",
        "enable_chunked_prefill": True,
        "scheduling_policy": "fcfs",
        "watermark": 0.0,
        "long_prefill_token_threshold": 0,
    }
    assert parts.assumed["max_num_seqs"].source == "vLLM 0.33.0 on a GPU of 70 GiB or more"
    assert parts.assumed["max_model_len"].source == "llama-3.1-8b"


def test_what_is_given_is_not_assumed() -> None:
    given = {"model": "llama-3.1-8b", "hardware": "h200-sxm", "max_model_len": 4096}
    given |= {"max_num_seqs": 7, "gpu_memory_utilization": 0.5, "dtype": "float16"}
    parts = parts_of(**given)
    assert not parts.assumed.keys() & given.keys()
    assert parts.config.max_num_seqs == parts.scheduler.max_num_seqs == 7


@pytest.mark.parametrize(
    ("hardware", "limits"),
    [("rtx-4090", (256, 2048)), ("a100-sxm-80gb", (256, 2048)), ("h200-sxm", (1024, 8192))],
)
def test_limits_of_a_step_follow_the_gpu(hardware: str, limits: tuple[int, int]) -> None:
    scheduler = parts_of(hardware=hardware, max_model_len=2048).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == limits


def test_defaults_follow_the_release() -> None:
    parts = parts_of(vllm_version="0.11.0", hardware="h100-sxm")
    assert parts.config.gpu_memory_utilization == 0.9
    assert parts.scheduler.in_flight == 1
    assert not parts.scheduler.reserve_full_isl
    assert parts.assumed["block_size"].source == "vLLM 0.11.0"


def test_few_tokens_a_step_are_shared_by_few_sequences() -> None:
    assert parts_of(max_num_batched_tokens=300).scheduler.max_num_seqs == 300


def test_older_engines_keep_their_own_defaults() -> None:
    parts = parts_of(engine="vllm-0.6.3")
    limits = (parts.assumed["max_num_seqs"].value, parts.assumed["max_num_batched_tokens"].value)
    assert limits == (256, 131072)
    assert parts.config.gpu_memory_utilization == 0.9
    assert parts_of(engine="nano-vllm").memory.formula == "nano-vllm"


def test_a_version_is_one_of_the_engines_own() -> None:
    with pytest.raises(
        ConfigError, match=r"vllm_version: .* known from 0\.8\.5 on, not for 0\.6\.3"
    ):
        parts_of(vllm_version="0.6.3")
    with pytest.raises(ConfigError, match=r"vllm_version: only for vLLM"):
        parts_of(engine="nano-vllm", vllm_version="0.33.0")


def test_assumptions_are_told_by_who_chose_them() -> None:
    meta = {
        "assumed": {
            "max_num_seqs": {"value": 256, "source": "vLLM 0.33.0"},
            "model": {"value": "llama-3-8b", "source": "kvsim's default"},
            "async_scheduling": {"value": True, "source": "vLLM 0.33.0"},
        }
    }
    assert assumed(meta) == [
        "max_num_seqs 256, async_scheduling on (vLLM 0.33.0)",
        "model llama-3-8b (kvsim's default)",
    ]
    assert assumed({}) == []


@pytest.mark.parametrize(
    ("key", "first", "before"),
    [
        ("max_num_active_seqs", "0.31", "0.30.0"),
        ("long_prefill_token_threshold_adaptive", "0.31", "0.30.0"),
        ("prefill_schedule_interval", "0.33", "0.32.0"),
    ],
)
def test_a_setting_of_later_releases_is_refused(key: str, first: str, before: str) -> None:
    settings = {key: True if key.endswith("adaptive") else 3}
    assemble(make_config({**settings, "vllm_version": f"{first}.0"}))
    with pytest.raises(ConfigError, match=f"{key}: vLLM heeds it from {first} on, not in {before}"):
        assemble(make_config({**settings, "vllm_version": before}))
