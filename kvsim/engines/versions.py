"""What differs between releases of vLLM other than scheduling: defaults, and what a start charges.

The facts are read from the releases on PyPI. Between two releases that were read, the later one is
taken as the first with a fact. No version at all stands for an engine that is not vLLM.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvsim.errors import ConfigError

Release = tuple[int, ...]


class Startup(NamedTuple):
    """What vLLM takes from GPU memory before it counts KV blocks, as far as releases differ."""

    sampling_bytes: int
    """Bytes per logit at the peak of the dummy sampling."""
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

    Raises `ConfigError` for text that is no version.
    """
    if version is None:
        return ()
    match = re.match(r"v?(\d+(?:\.\d+)+)", version)
    if match is None:
        raise ConfigError(f"vllm_version: {version!r} is no version; write it as 0.33.0")
    return tuple(map(int, match[1].split(".")))


def gpu_memory_utilization(version: str | None) -> float:
    """The default share of GPU memory: 0.92 from vLLM 0.20 on, 0.9 before, and in nano-vllm.

    Source: `gpu_memory_utilization` in vllm/config/cache.py of 0.19.0 and 0.20.0.
    """
    return 0.92 if release(version) >= (0, 20) else 0.9


def startup(version: str | None) -> Startup:
    """What a start of this version charges.

    CUDA graphs: from 0.20 on (vllm/envs.py, `VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`). The model
    runner that serves dense models from 0.26 on charges them from 0.29 on; until then its
    `profile_cudagraph_memory` returns 0 (v1/worker/gpu/model_runner.py).
    """
    number = release(version)
    if number >= (0, 26):
        return Startup(LOGIT_BYTES, COUNT_BYTES, number >= (0, 29))
    sampling = MASKING_BYTES if number >= (0, 17) else SORTING_BYTES
    return Startup(sampling, 0, number >= (0, 20))
