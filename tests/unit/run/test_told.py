"""A server's word against the model and the GPU of a run: what agrees is used, the rest refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command import run_here
from places import ROOT
from shared import SHARED, needs_shared
from startup_logs import v0_log, v1_log

from kvsim.errors import ConfigError
from kvsim.run.assembly import assemble
from kvsim.run.told import settled
from kvsim.settings.config import RunConfig, load_config, make_config
from kvsim.settings.server import server_settings

CHAT = str(ROOT / "traces" / "chat.jsonl")
OSS = {"model": "gpt-oss-20b"}
NEXT = {"model": "qwen3-next-80b-a3b", "tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
BATCHED = 2048
"""Tokens of a step in `v1_log`."""
LONGEST = 32_768


def told(log: str, folder: Path, **flags: Any) -> RunConfig:
    path = folder / "vllm.log"
    path.write_text(log)
    return told_by(str(path), **flags)


def told_by(path: str, **flags: Any) -> RunConfig:
    word = server_settings(startup_log=path)
    return settled(load_config(None, flags, (), word.settings), word)[0]


def log_of(
    given: dict[str, Any], blocks: int, groups: int, request: int, size: int = 16, **keys: str
) -> str:
    """The log of a server whose groups share `blocks`, as vLLM up to 0.20 prints them
    (`_report_kv_cache_config` in v1/core/kv_cache_utils.py of 0.19.0); `request`: blocks of a
    request of `LONGEST` tokens."""
    arguments = ", ".join(f"{key!r}: {value!r}" for key, value in given.items())
    text = v1_log(tokens=f"{blocks // groups * size:,}", arguments=arguments, **keys)
    for key, value in given.items():
        text = text.replace(f"{key}=1,", f"{key}={value!r},").replace(
            f"{key}=auto", f"{key}={value}"
        )
    text = text.replace("1.26x", f"{blocks / request:.2f}x")
    # Of models with states, such logs have no prefix cache and no steps ahead.
    said = f"INFO Setting attention block size to {size} tokens\n" if size != 16 else ""
    return said + text


def oss_request(steps: int) -> int:
    """Full attention keeps all; a window of 128 tokens, one block and the tokens of a step more."""
    return LONGEST // 16 + -(-(127 + steps * BATCHED) // 16) + 1


@pytest.mark.parametrize("steps", [1, 2])
def test_a_model_with_windows(steps: int, tmp_path: Path) -> None:
    """Two groups; releases count one step of tokens in the window, or those in flight."""
    config = told(log_of(OSS, 100_001, 2, oss_request(steps)), tmp_path)
    assert (config.num_gpu_blocks_override, config.block_size) == (100_000, 16)
    assert assemble(config).blocks.gpu.free == 99_999


def test_a_model_with_states(tmp_path: Path) -> None:
    """Three groups of states, one block each, and one of attention."""
    request = -(-LONGEST // 1072) + 3
    log = log_of(NEXT, 1203, 4, request, size=1072).replace("caching=True", "caching=False")
    config = told(log, tmp_path)
    # The tokens are those of 1,200 blocks, but these hold 35.29 requests, and 35.38 are printed.
    assert (config.num_gpu_blocks_override, config.block_size) == (1203, 1072)


class Printed(NamedTuple):
    """What a public server was given, and what it printed."""

    given: dict[str, Any]
    hardware: str
    version: str
    gib: float
    """Memory of the KV cache."""
    batched: int
    tokens: str
    times: float
    """Requests of the longest sequence that fit."""
    blocks: int
    """All blocks that lead to these figures."""

    def log(self, version: str) -> str:
        longest = self.given["max_model_len"]
        text = log_of(self.given, 0, 1, 1, version=version).replace("32,768", f"{longest:,}")
        for old, new in {
            "max_seq_len=32768": f"max_seq_len={longest}",
            "0.00x": f"{self.times:.2f}x",
            ": 0 tokens": f": {self.tokens} tokens",
            "_tokens': 2048": f"_tokens': {self.batched}",
            "tokens=2048": f"tokens={self.batched}",
            "5.05 GiB": f"{self.gib} GiB",
        }.items():
            text = text.replace(old, new)
        return text


QWEN = {"kv_cache_dtype": "fp8", "enable_prefix_caching": True}
DEEPSEEK = {"block_size": 256, "tensor_parallel_size": 2, "speculative_config": MTP}
PRINTED = {
    # github.com/noonghunna/club-3090/issues/612: 63 blocks of 2,096 tokens and two states of each
    # of three groups are a request.
    "states": Printed(
        {"model": "qwen3.6-35b-a3b-nvfp4", "max_model_len": 131_072, **QWEN},
        *("rtx-5090", "0.24.0", 5.98, 2048, "567,978", 4.33, 299),
    ),
    # The layer of MTP is the 17th of its group, so the groups of states are padded by three.
    "states and drafts": Printed(
        {
            "model": "nvidia/Qwen3.6-27B-NVFP4",
            "max_model_len": 262_144,
            **QWEN,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        },
        *("gb10", "0.23.0", 48.6, 65_536, "1,394,129", 5.32, 936),
    ),
    "states, KV in 16 bits": Printed(
        {"model": "qwen3.5-27b", "max_model_len": 8192, "enable_prefix_caching": True},
        *("h100", "0.24.0", 31.24, 8192, "314,187", 38.35, 652),
    ),
    # Before 0.21: tokens of a fourth of the blocks.
    "states and drafts, a fourth": Printed(
        {
            "model": "Qwen/Qwen3.5-122B-A10B-NVFP4",
            "max_model_len": 262_144,
            **QWEN,
            "speculative_config": MTP,
        },
        *("gb10", "0.19.0", 24.05, 8192, "482,080", 6.42, 462),
    ),
    "states of experts, a fourth": Printed(
        {"model": "RedHatAI/Qwen3.6-35B-A3B-NVFP4", "max_model_len": 65_536, **QWEN},
        *("rtx-5090", "0.20.0", 2.95, 8192, "75,456", 3.87, 147),
    ),
    # robotmunki.com/pages/vllm-startup-log-annotated: blocks of 32 tokens of full attention, of 16
    # in five groups with windows; a request takes 9,797.
    "unlike layers": Printed(
        {"model": "nvidia/Gemma-4-31B-IT-NVFP4", "max_model_len": 262_144},
        *("h100", "0.24.0", 0, 4096, "1,563,739", 5.97, 58_441),
    ),
    "windows as long as the sequence": Printed(
        {"model": "gemma-4-31b", "max_model_len": 8192},
        *("h100", "0.24.0", 63.29, 8192, "75,278", 9.19, 25_923),
    ),
    "unlike layers, experts": Printed(
        {"model": "gemma-4-26b-a4b", "max_model_len": 32_768},
        *("l40s", "0.25.1", 12.75, 2496, "321,600", 9.81, 20_895),
    ),
    "unlike layers, shared": Printed(
        {"model": "google/gemma-4-E4B-it", "max_model_len": 16_384},
        *("l40s", "0.25.1", 22.01, 2048, "1,033,831", 63.10, 90_170),
    ),
    # github.com/vllm-project/vllm/issues/51041, with one step of tokens and the layer of MTP.
    "compressed attention": Printed(
        {"model": "deepseek-ai/DeepSeek-V4-Flash", "max_model_len": 912_128, **DEEPSEEK},
        *("h20", "0.25.0", 7.01, 8192, "1,009,661", 1.11, 7236),
    ),
}


@pytest.mark.parametrize("printed", PRINTED.values(), ids=PRINTED)
def test_pools_of_public_servers(printed: Printed, tmp_path: Path) -> None:
    config = told(printed.log(printed.version), tmp_path, hardware=printed.hardware)
    assert config.num_gpu_blocks_override == printed.blocks
    if printed.gib:
        run = make_config(
            {
                **printed.given,
                "kv_cache_memory_bytes": int(printed.gib * 2**30),
                "max_num_batched_tokens": printed.batched,
                "vllm_version": printed.version,
                "hardware": printed.hardware,
            }
        )
        # Memory is printed with two digits behind the point.
        assert assemble(run).blocks.gpu.size + 1 == pytest.approx(
            printed.blocks, abs=1 + 0.005 / printed.gib * printed.blocks
        )


def test_windows_keep_the_tokens_of_two_steps(tmp_path: Path) -> None:
    """Since 0.26."""
    log = PRINTED["unlike layers"].log("0.26.0")
    assert told(log, tmp_path, hardware="h100").num_gpu_blocks_override == 66_077


def test_tokens_of_whole_requests(tmp_path: Path) -> None:
    """From 0.21 on: int(blocks / R x L)."""
    request = oss_request(2)
    log = log_of(OSS, 100_000, 2, request, version="0.30.0")
    log = log.replace("800,000", f"{int(100_000 / request * LONGEST):,}")
    assert told(log, tmp_path).num_gpu_blocks_override == 100_000


def test_blocks_that_are_printed(tmp_path: Path) -> None:
    log = log_of(OSS, 100_001, 2, oss_request(1), further="after num_gpu_blocks is: 100001\n")
    config = told(log, tmp_path)
    assert (config.num_gpu_blocks_override, config.block_size) == (100_001, 16)


def test_one_table_for_all_layers(tmp_path: Path) -> None:
    assert told(v1_log(), tmp_path).num_gpu_blocks_override == 2588
    assert told(v0_log(), tmp_path).num_gpu_blocks_override == 27_000


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b"])
def test_a_concurrency_that_is_not_that_of_the_model_is_refused(model: str, tmp_path: Path) -> None:
    log = log_of(OSS, 100_001, 2, oss_request(1))
    with pytest.raises(ConfigError, match=r"vllm\.log:9: the pool holds 45\.[0-9]+ requests of"):
        told(log, tmp_path, model=model)
    other = told(log, tmp_path, model=model, num_gpu_blocks_override=77)
    assert other.num_gpu_blocks_override == 77


def test_a_server_whose_layers_shared_one_table(tmp_path: Path) -> None:
    """As with KV connectors."""
    log = log_of(OSS, 50_000, 1, LONGEST // 16)
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        told(log, tmp_path)
    config = told(log, tmp_path, disable_hybrid_kv_cache_manager=True)
    assert config.num_gpu_blocks_override == 50_000


def test_what_a_run_changes_does_not_change_what_the_log_counted(tmp_path: Path) -> None:
    log = log_of(OSS, 100_001, 2, oss_request(1))
    flags = {"max_num_batched_tokens": 16_384, "max_model_len": 4096}
    assert told(log, tmp_path, **flags).num_gpu_blocks_override == 100_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--vllm", "vllm serve --max-num-seqs 8"],
        ["--vllm", "python -m sglang.launch_server --tp 2"],
        ["--startup-log", "vllm.log"],
        ["--startup-log", "sglang.log"],
        ["--startup-log", "vllm.log", "--vllm", "vllm serve -tp 2"],
    ],
)
def test_nobody_names_the_model(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text("INFO GPU KV cache size: 41,408 tokens\n")
    (tmp_path / "sglang.log").write_text("max_total_num_tokens=9000, context_len=8192\n")
    run = ["run", "--trace", CHAT, "--num-prompts", "5", "--max-model-len", "2048", *arguments]
    refused = run_here(run, tmp_path, columns=200)
    assert refused.returncode == 2
    line = refused.stderr.splitlines()[-1]
    assert line.startswith(f"kvsim: {arguments[1] if '.log' in arguments[1] else '--vllm'}")
    assert line.endswith("names no model; give --model")
    assert run_here([*run, "--model", "llama-3.1-8b"], tmp_path).returncode == 0


def memory(weights: float, cache: float) -> str:
    taken = f"INFO [gpu_model_runner.py:1] Model loading took {weights} GiB memory and 3 seconds"
    return f"{taken}\n{v1_log().replace('5.05 GiB', f'{cache} GiB')}"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (memory(15.1, 18.4), ":8: hardware: the GPU has about 37 GiB, h100-sxm, which is assumed"),
        (memory(58.2, 19.4), "the GPU has about 86 GiB"),
        (f"INFO bf16 on GPUs before SM90.\n{v1_log()}", ":1: hardware: the GPU is not h100-sxm"),
        (f"WARNING Device capability 8.9 not supported\n{v1_log()}", "the GPU is not h100-sxm"),
        (
            "[TP0] Load weight begin. avail mem=22.93 GB\n"
            "[TP0] max_total_num_tokens=9000, context_len=8192\n",
            ":1: hardware: the GPU has about 23 GiB",
        ),
    ],
)
def test_a_log_that_contradicts_the_gpu_which_nobody_named(
    log: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        told(log, tmp_path, model="llama-3.1-8b")
    line = str(refused.value)
    assert words in line and line.endswith("; give --hardware") and "\n" not in line
    assert told(log, tmp_path, model="llama-3.1-8b", hardware="l40s").hardware == "l40s"


def test_a_log_that_does_not(tmp_path: Path) -> None:
    assert told(memory(15.1, 52.3), tmp_path).hardware is None
    untuned = "WARNING not found at E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8.json\n"
    assert told(untuned + v1_log(), tmp_path).hardware == "NVIDIA H200"


PUBLIC: list[tuple[str, dict[str, Any], int | str]] = [
    ("L1-vllm0.9.2-Qwen3-8B-A100-40", {}, ":10: hardware: the GPU has about 38 GiB"),
    ("L1-vllm0.9.2-Qwen3-8B-A100-40", {"hardware": "a100-40gb"}, 8505),
    ("L3-vllm0.13.0-Qwen3-VL-30B-A3B-H100NVL", {}, "no model named 'model-files'"),
    (
        "L3-vllm0.13.0-Qwen3-VL-30B-A3B-H100NVL",
        {"model": "Qwen/Qwen3-VL-30B-A3B-Instruct"},
        13_246,
    ),
    ("L4-vllm0.13.0-Qwen3-Next-W4A16-2xL40S", {}, "no model named 'models'"),
    (
        "L4-vllm0.13.0-Qwen3-Next-W4A16-2xL40S",
        {"model": "qwen3-next-80b-a3b"},
        ":9: hardware: the GPU has about 44 GiB",
    ),
    # Tokens do not tell the last two.
    (
        "L4-vllm0.13.0-Qwen3-Next-W4A16-2xL40S",
        {"model": "qwen3-next-80b-a3b", "hardware": "l40s"},
        2866,
    ),
    (
        "L5-vllm0.18-Qwen2.5-72B-tp4-L40S-headless",
        {},
        ":3: hardware: the GPU is not h100-sxm",
    ),
    ("L5-vllm0.18-Qwen2.5-72B-tp4-L40S-headless", {"hardware": "l40s"}, 4189),
    ("L6-sglang-Qwen3.5-9B-2x4090", {}, "the GPU has about 23 GiB"),
    ("L6-sglang-Qwen3.5-9B-2x4090", {"hardware": "rtx-4090"}, 327_310),
    ("vllm-120B-4gpuA10080GB-0.8GRAM-diff-nodes", {}, "the GPU is not h100-sxm"),
    ("vllm-120B-4gpuA10080GB-0.8GRAM-diff-nodes", {"hardware": "a100-80gb"}, 330_018),
    # Both are wrapped by a terminal.
    ("vllm-7B-1gpuA10080GB-0.25GRAM", {}, ":8: hardware: vLLM 0.10.1 chose 2,048 tokens a step"),
    ("vllm-7B-1gpuA10080GB-0.25GRAM", {"hardware": "a100-80gb"}, 5867),
    ("vllm-7B-2gpuA10080GB-0.5GRAM-same-node", {"hardware": "a100-80gb"}, 74_510),
]
"""Log, flags, and the blocks or the words of the refusal."""


@needs_shared("logs")
@pytest.mark.parametrize(("name", "flags", "expected"), PUBLIC)
def test_public_logs(name: str, flags: dict[str, Any], expected: int | str) -> None:
    path = str(SHARED / "logs" / f"{name}.log")
    if isinstance(expected, int):
        config = told_by(path, **flags)
        assert config.num_gpu_blocks_override == expected
        assert assemble(config).memory.num_gpu_blocks == expected
        return
    with pytest.raises(ConfigError) as refused:
        told_by(path, **flags)
    assert expected in str(refused.value)


@needs_shared("logs")
def test_every_public_log_is_expected() -> None:
    names = {path.stem for path in (SHARED / "logs").glob("*.log")}
    assert names == {name for name, *_ in PUBLIC}
