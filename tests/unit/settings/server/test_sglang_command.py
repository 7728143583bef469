"""What an `sglang.launch_server` command line says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsim.errors import ConfigError
from kvsim.settings.config import make_config
from kvsim.settings.server import server_settings
from kvsim.settings.server.arguments import SGLANG, Used
from kvsim.settings.server.sglang import BACKENDS

PROTECTED = '{"protected_threshold": 3}'
LAUNCH = "python3 -m sglang.launch_server --model-path m "


def said(command: str) -> dict[str, Any]:
    found = dict(server_settings(vllm=command).settings)
    assert found.pop("engine") == "sglang"
    assert found.pop("model") == "m"
    make_config(found)
    return found


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("", {}),
        ("--tp 2 --mem-fraction-static 0.8", {
            "tensor_parallel_size": 2, "gpu_memory_utilization": 0.8,
        }),
        ("--max-total-tokens 1000 --page-size 16", {
            "num_gpu_blocks_override": 62, "block_size": 16,
        }),
        ("--cuda-graph-max-bs-decode 16", {"cuda_graph_max_bs": 16}),
        ("--cuda-graph-max-bs 16 --disable-cuda-graph", {
            "cuda_graph_max_bs": 16, "enforce_eager": True,
        }),
        ("--max-total-tokens=1000", {"num_gpu_blocks_override": 1000}),
        ("--max-running-requests 64 --context-length 8192", {
            "max_num_seqs": 64, "max_model_len": 8192,
        }),
        ("--chunked-prefill-size 4096", {"max_num_batched_tokens": 4096}),
        ("--chunked-prefill-size -1", {"enable_chunked_prefill": False}),
        ("--disable-radix-cache --disable-overlap-schedule", {
            "enable_prefix_caching": False, "async_scheduling": False,
        }),
        (f"--radix-eviction-policy slru --radix-eviction-policy-config '{PROTECTED}'", {
            "block_manager_args": {
                "radix_eviction_policy": "slru",
                "radix_eviction_policy_config": {"protected_threshold": 3},
            },
        }),
        ("--schedule-policy lpm --schedule-conservativeness 1.3 --enable-mixed-chunk", {
            "scheduler_args": {
                "schedule_policy": "lpm",
                "schedule_conservativeness": 1.3,
                "enable_mixed_chunk": True,
            },
        }),
        ("--enable-priority-scheduling --retraction-policy priority --max-queued-requests 9", {
            "scheduler_args": {
                "enable_priority_scheduling": True,
                "retraction_policy": "priority",
                "max_queued_requests": 9,
            },
        }),
        ("--prefill-decode-interval 4 --max-prefill-tokens 8k", {
            "scheduler_args": {"prefill_decode_interval": 4, "max_prefill_tokens": 8000},
        }),
        ("--host 0.0.0.0 --port 30000 --trust-remote-code --attention-backend fa3", {}),
        ("--speculative-algorithm none --dp-size 1 --disaggregation-mode null", {}),
        ("--attention-backend flashmla --max-total-tokens 6400", {
            "block_size": 64, "num_gpu_blocks_override": 100,
        }),
        ("--page-size 32 --decode-attention-backend trtllm_mla", {"block_size": 32}),
        ("--page-size 16 --attention-backend cutlass_mla", {"block_size": 128}),
    ],
)  # fmt: skip
def test_flags_are_settings(flags: str, settings: dict[str, Any]) -> None:
    assert said(LAUNCH + flags) == settings


def test_the_environment_counts() -> None:
    found = said("SGLANG_INIT_NEW_TOKEN_RATIO=0.5 SGLANG_RETRACT_DECODE_STEPS=40 " + LAUNCH)
    environment = {"init_new_token_ratio": 0.5, "retract_decode_steps": 40.0}
    assert found == {"scheduler_args": {"environment": environment}}


def test_a_script_may_start_a_container(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(
        "docker run --gpus all lmsysorg/sglang:v0.5.9 \\\n"
        "  python3 -m sglang.launch_server --model-path m --page-size 64\n"
    )
    word = server_settings(vllm_file=str(script))
    assert word.settings == {"engine": "sglang", "model": "m", "block_size": 64}
    assert said("sglang serve --model-path m --page-size 64") == {"block_size": 64}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--speculative-algorithm EAGLE", "speculative decoding makes several tokens in a step"),
        ("--enable-hierarchical-cache", "KV is kept in CPU memory or storage"),
        ("--dp-size 2", "several replicas run"),
        ("--max-num-seqs 4", "has no flag --max-num-seqs"),
        ("--page-size x", "takes a whole number"),
        ("--radix-eviction-policy-config 3", "takes a JSON object"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        said(LAUNCH + flags)
    assert "\n" not in str(error.value)


def test_a_variable_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="SGLANG_RETRACT_DECODE_STEPS: takes a number, got 'x'"):
        said("SGLANG_RETRACT_DECODE_STEPS=x " + LAUNCH)


def test_a_pool_sized_after_capture_has_to_be_given() -> None:
    sized = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 " + LAUNCH
    with pytest.raises(ConfigError, match=r"only the server can measure .*--startup-log"):
        said(sized)
    assert said(sized + " --max-total-tokens 1000") == {"num_gpu_blocks_override": 1000}
    assert said(sized.replace("=1", "=0")) == {}


def test_every_flag_that_is_used_is_a_setting() -> None:
    known = set(make_config({}).__struct_fields__)
    for name, flag in SGLANG.flags.items():
        assert name == flag.name
        if isinstance(flag.effect, Used):
            assert name in BACKENDS or flag.effect.key.partition(".")[0] in known


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("v0.5.9-cu126", ["the pages that an admission sets aside", "what max_prefill_tokens"]),
        ("v0.5.10.post1", ["SGLang 0.5.10 decides otherwise in what max_prefill_tokens counts;"]),
        ("v0.5.15", []),
        ("latest", []),
    ],
)
def test_what_an_older_release_decides_otherwise_is_said(version: str, told: list[str]) -> None:
    notes = server_settings(vllm=f"docker run lmsysorg/sglang:{version} {LAUNCH}").notes
    assert all(any(words in note for note in notes) for words in told)
    assert any("decides otherwise" in note for note in notes) == bool(told)
