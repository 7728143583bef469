"""What a start-up log of SGLang says, with the numbers of public ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsim.engines import BLOCK_MANAGERS, ENGINES
from kvsim.errors import ConfigError
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config
from kvsim.settings.library import signature
from kvsim.settings.server import ServerWord, server_settings
from kvsim.settings.server.arguments import SGLANG, Used

ARGUMENTS = (
    "model_path='meta-llama/Meta-Llama-3.1-8B-Instruct', tokenizer_mode='auto', dtype='auto',"
    " kv_cache_dtype='auto', quantization=None, context_length=None, host='0.0.0.0',"
    " mem_fraction_static=0.88, max_running_requests=None, max_total_tokens=None,"
    " chunked_prefill_size=8192, max_prefill_tokens=16384, schedule_policy='lpm',"
    " schedule_conservativeness=1.0, cpu_offload_gb=0, tp_size=1, dp_size=1, ep_size=1,"
    " lora_paths=None, max_loras_per_batch=8, speculative_algorithm=None, speculative_num_steps=5,"
    " disable_radix_cache=False, enable_mixed_chunk=False, cuda_graph_bs=None, no_such_flag=3"
)
"""Of the log at docs.sglang.ai/start/send_request.html (January 2025): an H100."""
START = f"[2025-01-23 19:34:55] server_args=ServerArgs({ARGUMENTS})\n"
CAME_TO = (
    "[2025-01-23 19:35:27 TP0] max_total_num_tokens=444500, max_prefill_tokens=16384,"
    " max_running_requests=2049, context_len=131072\n"
)


def word_of(tmp_path: Path, log: str) -> ServerWord:
    path = tmp_path / "sglang.log"
    path.write_text(log)
    word = server_settings(startup_log=str(path))
    make_config(word.settings)
    return word


def pool(number: int, chunk: int | None, running: int, longest: int) -> dict[str, Any]:
    table = {"num_gpu_blocks_override": number, "max_num_seqs": running, "max_model_len": longest}
    return table if chunk is None else table | {"max_num_batched_tokens": chunk}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # github.com/sgl-project/sglang/issues/2468 (December 2024): no chunk size yet.
        (
            "max_total_num_tokens=56524, max_prefill_tokens=16384, max_running_requests=2049,"
            " context_len=32768",
            pool(56_524, None, 2_049, 32_768),
        ),
        # docs.sglang.ai/advanced_features/hyperparameter_tuning.html (August 2025)
        (
            "max_total_num_tokens=665690, chunked_prefill_size=8192, max_prefill_tokens=16384,"
            " max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB",
            pool(665_690, 8_192, 4_096, 65_536),
        ),
        # github.com/sgl-project/sglang/issues/29575 (June 2026)
        (
            "max_total_num_tokens=2086558, chunked_prefill_size=8192, max_prefill_tokens=16384,"
            " max_running_requests=33, context_len=256000, available_gpu_mem=17.22 GB ",
            pool(2_086_558, 8_192, 33, 256_000),
        ),
    ],
    ids=["2024", "2025", "2026"],
)
def test_the_last_line_says_the_pool_and_the_limits(
    tmp_path: Path, line: str, expected: dict[str, Any]
) -> None:
    word = word_of(tmp_path, f"[2025-08-11 17:17:03 TP0] {line}\n")
    assert word.settings == {"engine": "sglang", "block_size": 1, **expected}


def test_arguments_count_that_differ_from_the_defaults(tmp_path: Path) -> None:
    word = word_of(tmp_path, START + "hello\n" + CAME_TO)
    assert word.settings == {
        "engine": "sglang",
        "model": "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "gpu_memory_utilization": 0.88,
        "tensor_parallel_size": 1,
        "enable_prefix_caching": True,
        "block_size": 1,
        "scheduler_args": {"schedule_policy": "lpm"},
        **pool(444_500, 8_192, 2_049, 131_072),
    }
    assert word.sources["num_gpu_blocks_override"].endswith("sglang.log:3")
    [note] = word.notes
    assert "444,500 pages of 1" in note and "no-such-flag" not in note


def test_the_defaults_are_those_of_the_engine() -> None:
    engine = ENGINES["sglang"]
    known: dict[str, Any] = {}
    for kind in (engine.scheduler, BLOCK_MANAGERS[engine.prefix_manager]):
        parameters = signature(kind).parameters
        known |= {name: each.default for name, each in parameters.items()}
    for flag in SGLANG.flags.values():
        if isinstance(flag.effect, Used) and "." in flag.effect.key:
            assert SGLANG["defaults"].get(flag.name) == (known[flag.name] or None), flag.name


def test_a_pool_is_counted_in_pages_and_the_last_whole_start_counts(tmp_path: Path) -> None:
    paged = START.replace("tp_size=1", "tp_size=1, page_size=64")
    allocated = (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 6400, K size: 0.39 GB,"
        " V size: 0.39 GB\n"
    )
    draft = allocated.replace("6400", "9")
    word = word_of(tmp_path, START + CAME_TO + paged + allocated + draft + START)
    assert word.settings["num_gpu_blocks_override"] == 100
    assert word.settings["block_size"] == 64


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (START, "SGLang starts, but no line says how large its pool is"),
        (START.replace("speculative_algorithm=None", "speculative_algorithm='EAGLE'") + CAME_TO,
         "sglang.log:1: --speculative-algorithm: speculative decoding"),
        (START.replace("dp_size=1", "dp_size=2") + CAME_TO, "--dp-size: several replicas run"),
        (CAME_TO.replace("444500", "0"), "sglang.log:1: the server has no KV pages"),
        (CAME_TO.replace("131072", "x"), "sglang.log:1: --context-length: takes a whole number"),
    ],
    ids=["no pool", "speculation", "replicas", "empty", "no number"],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused_in_one_line(
    tmp_path: Path, log: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        word_of(tmp_path, log)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "hardware", "logged"),
    [
        # docs.sglang.ai/start/send_request.html
        ("llama-3.1-8b", "h100-sxm", 444_500),
        # github.com/sgl-project/sglang/issues/2468: a GPU of 24 GB, with 23.2 GB free.
        ("mistral-7b-v0.1", "rtx-3090", 56_524),
    ],
)
def test_the_pool_is_nearly_that_of_public_logs(model: str, hardware: str, logged: int) -> None:
    """Both servers had a `mem_fraction_static` of 0.88."""
    config = {"engine": "sglang", "model": model, "hardware": hardware}
    config |= {"gpu_memory_utilization": 0.88}
    assert assemble(make_config(config)).memory.num_gpu_blocks == pytest.approx(logged, rel=0.004)
