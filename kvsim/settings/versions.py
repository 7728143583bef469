"""What differs between releases of vLLM other than scheduling: defaults, and what a start charges;
and the defaults of any release.

A scheduler's limits are those of an API server (`vllm serve`).

The facts are read from the releases on PyPI. Between two releases that were read, the later one is
taken as the first with a fact. No version at all stands for an engine that is not vLLM.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from kvsim.errors import ConfigError

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block, as in vLLM on a GPU."""
DEFAULT_ENGINE = "vllm-v1"
"""The engine that most servers run today."""
DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_HARDWARE = "h100-sxm"
"""Model and GPU of a first run that names none; the run says so."""
DEFAULT_LORA_RANK = 16
"""`max_lora_rank` of vLLM 0.33.0 (config/lora.py)."""


Release = tuple[int, ...]

GIB = 2**30
OLDEST_V1, NEWEST = (0, 8, 5), (0, 33)
"""Releases of vLLM V1 whose defaults are known; later ones are taken to be like the newest."""


class Default(NamedTuple):
    """The value of a setting that was not given."""

    value: Any
    source: str
    """What chose the value, and by which rule."""


class Startup(NamedTuple):
    """What vLLM takes from GPU memory before it counts KV blocks, as far as releases differ."""

    sampling_bytes: int
    """Bytes per logit at the peak of the dummy sampling."""
    least_sampling_bytes: int
    """The same where an optional package samples."""
    sampler_bytes: int
    """Bytes per entry of `max_num_seqs` x vocabulary that the sampler holds for good."""
    charges_cudagraphs: bool
    """Whether an estimate of the CUDA graphs' memory is taken; older releases capture the graphs
    later, from the share that `gpu_memory_utilization` leaves."""


SORTING_BYTES = 39
"""Bytes per logit of a sampler that sorts: float32 copy, sorted values and indices, probabilities.

Fitted to published start-up logs of 256 sequences: 1.26 GiB for Llama-3-8B at 8,192 tokens
(vLLM 0.6, github.com/vllm-project/vllm/pull/10511), 1.42 GiB for Qwen2.5-7B at 4,096 (0.7).
"""

MASKING_BYTES = 2 + 4 + 4 + 4
"""Bytes per logit of a sampler that masks in place: logits, float32 copy, probabilities, noise.

Source: vLLM 0.19.0, v1/sample/sampler.py `forward`, v1/sample/ops/topk_topp_sampler.py
`forward_native`; the first release with `apply_top_k_top_p_triton` is 0.17.
"""

FLASHINFER_BYTES = 10
"""Bytes per logit where FlashInfer samples, which sorts nothing: logits, float32 copy and
probabilities.

Fitted to three start-up logs of vLLM 0.10.1.1, "Using FlashInfer for top-p & top-k sampling":
Qwen2-7B on one A100 and on two, gpt-oss-120b on four (tests/unit/machine/test_memory.py). V1 takes
it up to 0.11.0 where it is installed, as in the image of vLLM; `pip install vllm` leaves it out
(github.com/vllm-project/vllm/pull/21959). From 0.11.1 on it has to be asked for (pull/26859).
"""

LOGIT_BYTES = 2
"""Bytes per logit where the dummy sampling skips top-k and top-p: the logits alone.

Source: vLLM 0.28.0, v1/worker/gpu/model_runner.py `_dummy_sampler_run`. This model runner serves
all dense models from 0.26 on, and all models in 0.33.0 (config/vllm.py `use_v2_model_runner`).
"""

COUNT_BYTES = 4
"""Bytes of one count of output tokens: vLLM 0.28.0, v1/worker/gpu/sample/penalties.py
`output_bin_counts`, of `max_num_seqs` x vocabulary."""


def release(version: str | None) -> Release:
    """The numbers of a version, to compare: `0.6.3.post1` is (0, 6, 3); none for no version.

    Raises `ConfigError` for text that is not a version.
    """
    if version is None:
        return ()
    if "," in version:
        raise ConfigError(
            f"vllm_version: {version}: a run has one release; `kvsim compare` takes several,"
            " of one engine"
        )
    match = re.match(r"v?(\d+(?:\.\d+)+)", version)
    if match is None:
        raise ConfigError(f"vllm_version: {version!r} is not a version; write it as 0.33.0")
    return tuple(map(int, match[1].split(".")))


def gpu_memory_utilization(version: str | None) -> float:
    """The default share of GPU memory: 0.92 from vLLM 0.20 on, 0.9 before, and in nano-vllm.

    Source: `gpu_memory_utilization` in vllm/config/cache.py of 0.19.0 and 0.20.0.
    """
    return 0.92 if release(version) >= (0, 20) else 0.9


def has_cache_groups(version: str | None) -> bool:
    """Whether layers that keep less than all tokens have block tables of their own: from 0.9.2 on
    (`disable_hybrid_kv_cache_manager` in vllm/config.py of 0.9.0 and 0.9.2)."""
    return release(version) >= (0, 9, 2)


def retention_interval(version: str | None) -> int | str:
    """The default `prefix_cache_retention_interval`: 0 from vLLM 0.29 on (vllm/config/cache.py);
    before, everything was kept."""
    return 0 if release(version) >= (0, 29) else "none"


def reads_cache_scheme(version: str | None) -> bool:
    """Whether a KV cache of dtype auto is in FP8 where the checkpoint has scales for one: from 0.15
    on (github.com/vllm-project/vllm/pull/30141 for compressed-tensors; pull/29980 for ModelOpt is
    a month older)."""
    return release(version) >= (0, 15)


def startup(version: str | None) -> Startup:
    """What a start of this version charges.

    CUDA graphs: from 0.20 on (vllm/envs.py, `VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`). The model
    runner that serves dense models from 0.26 on charges them from 0.29 on; until then its
    `profile_cudagraph_memory` returns 0 (v1/worker/gpu/model_runner.py).
    """
    number = release(version)
    if number >= (0, 26):
        return Startup(LOGIT_BYTES, LOGIT_BYTES, COUNT_BYTES, number >= (0, 29))
    sampling = MASKING_BYTES if number >= (0, 17) else SORTING_BYTES
    optional = FLASHINFER_BYTES if (0, 8) <= number < (0, 11, 1) else sampling
    return Startup(sampling, optional, 0, number >= (0, 20))


def batch_limits(number: Release, device_name: str, memory_bytes: int) -> tuple[int, int, str]:
    """`max_num_seqs` and `max_num_batched_tokens` of an API server, and the rule in words.

    `device_name`: that of the CUDA runtime. Source: `EngineArgs.get_batch_defaults` in
    engine/arg_utils.py; before 0.28 there is no tier for 160 GiB, in 0.8 an A100 is no exception,
    and the GB10 is one from 0.33 on.
    """
    name = device_name.lower()
    if memory_bytes >= 160 * GIB and number >= (0, 28):
        return 1024, 16384, "a GPU of 160 GiB or more"
    if memory_bytes < 70 * GIB:
        return 256, 2048, "a GPU below 70 GiB"
    for small, since in (("a100", (0, 9)), ("gb10", NEWEST)):
        if small in name and number >= since:
            return 256, 2048, f"every {small.upper()}"
    return 1024, 8192, "a GPU of 70 GiB or more"


def server_defaults(
    version: str,
    device_name: str,
    memory_bytes: int,
    max_model_len: int,
    enable_chunked_prefill: bool = True,
) -> dict[str, Default]:
    """Settings of a scheduler that `vllm serve` (V1) chooses by its version and the GPU.

    Without chunked prefill, a step has room for the longest prompt. Asynchronous scheduling is the
    default from 0.14 on, and prompts reserve blocks for all of them from 0.19 on
    (config/scheduler.py). Raises `ConfigError` for a release before `OLDEST_V1`.
    """
    number = release(version)
    if number < OLDEST_V1:
        raise ConfigError(
            f"vllm_version: the defaults of vLLM V1 are known from 0.8.5 on, not for {version};"
            " give a later release, or --engine vllm-0.6.3"
        )
    seqs, tokens, tier = batch_limits(number, device_name, memory_bytes)
    if not enable_chunked_prefill:
        tokens = max(tokens, max_model_len)
    vllm = f"vLLM {version}"
    return {
        "max_num_seqs": Default(seqs, f"{vllm} on {tier}"),
        "max_num_batched_tokens": Default(tokens, f"{vllm} on {tier}"),
        "async_scheduling": Default(number >= (0, 14), vllm),
        "scheduler_reserve_full_isl": Default(number >= (0, 19), vllm),
    }
