"""What an SGLang 0.5.23 server reads from its environment, and what it chooses by its GPU unless it
is given.

`arg_groups/memory_hook.py`, `_handle_gpu_memory_settings`, and `arg_groups/cuda_graph_hook.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvsim.machine.hardware import GIB, Hardware
from kvsim.machine.memory import MIB, Stage, Taken
from kvsim.machine.models import Model
from kvsim.settings.config import RunConfig


class Environment(NamedTuple):
    """Values that SGLang reads from environment variables. The variable is `SGLANG_` and the name
    in capitals, with `_ESTIMATION` appended for the clip and `IN_BATCH_PREFIX_CACHING_` for
    `IN_BATCH_`."""

    init_new_token_ratio: float = 0.7
    """The initial share of the announced output tokens that requests are expected to generate."""
    min_new_token_ratio_factor: float = 0.14
    """The smallest value of the share, relative to the initial one."""
    new_token_ratio_decay_steps: float = 600
    """Number of decode steps in which the share falls to its smallest value."""
    retract_decode_steps: float = 20
    """Number of steps for which the requests that remain after a retraction are expected to have
    memory."""
    clip_max_new_tokens: float = 4096
    """Most tokens that any request is expected to generate."""
    in_batch_check_threshold: float = 32
    """Number of cached tokens up to which a waiting request is compared with earlier ones."""
    in_batch_deprioritize_threshold: float = 32
    """Number of tokens that it must share with an earlier one to be put after all others."""


def read_environment(values: Mapping[str, float]) -> Environment:
    """The values of these names. Raises `ValueError` for an unknown one."""
    if unknown := sorted(values.keys() - set(Environment._fields)):
        known = ", ".join(Environment._fields)
        raise ValueError(f"environment: unknown {', '.join(unknown)}; known: {known}")
    return Environment(**values)


_BY_MEMORY = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 4096, 48, 160),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
)
"""Memory in MiB below which: tokens of a chunk, and the largest decode step that is captured as a
CUDA graph on fewer than 4 GPUs, and on more."""
_LARGE = (16384, 512, 512)

_PREFILL_GRAPHS: tuple[int, ...] = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
    *range(4608, 16385, 512),
)
"""Tokens of the prefill steps that are captured, as far as a chunk reaches."""

DEFAULT_MAX_PREFILL_TOKENS = 16384


def _by_memory(memory_bytes: int) -> tuple[int, int, int]:
    for below_mib, chunk, few, many in _BY_MEMORY:
        if memory_bytes < below_mib * MIB:
            return chunk, few, many
    return _LARGE


def chunked_prefill_size(memory_bytes: int) -> int:
    """Returns the tokens of a chunk for a GPU with this memory."""
    return _by_memory(memory_bytes)[0]


def mem_fraction_static(config: RunConfig, memory_bytes: int, model: Model) -> float:
    """Returns the share of GPU memory for weights and KV; the rest is for activations and CUDA
    graphs.

    This is how 0.5.23 does it unless `SGLANG_ENABLE_POST_CAPTURE_KV_SIZING` is set. It then sizes
    the pool by what is free once graphs are captured, which only the server can measure.
    """
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    chunk = 0
    if config.enable_chunked_prefill is not False:
        chunk = config.max_num_batched_tokens or chunked_prefill_size(memory_bytes)
    # In MiB, as the engine estimates: 1.5 for a token of a chunk, 128 for a rank, 2 for a captured
    # sequence.
    reserve_mib = 512 + 1.5 * max(chunk or DEFAULT_MAX_PREFILL_TOKENS, 2048) + 128 * tp * pp
    if not config.enforce_eager:
        reserve_mib += 2 * _largest_decode(config, memory_bytes)
        if pp == 1:
            reserve_mib += _prefill_graphs_mib(chunk, model)
    memory_mib = memory_bytes / MIB
    if memory_mib > 60 * 1024:
        reserve_mib = max(reserve_mib, 10 * 1024)
    return round((memory_mib - reserve_mib) / memory_mib, 3)


def _largest_decode(config: RunConfig, memory_bytes: int) -> int:
    """Returns the sequences of the largest decode step that is captured as a CUDA graph."""
    if config.cuda_graph_max_bs is not None:
        return config.cuda_graph_max_bs
    _, few, many = _by_memory(memory_bytes)
    most = few if config.tensor_parallel_size < 4 else many
    return most if config.max_num_seqs is None else min(most, config.max_num_seqs)


def _prefill_graphs_mib(chunk_tokens: int, model: Model) -> int:
    """Returns what the graphs of prefill steps take (`reserve_for_graph_mb`)."""
    if model.latent is not None:
        return 1536
    # MiB for each captured size.
    return 8 * sum(size <= chunk_tokens for size in _PREFILL_GRAPHS)


def max_running_requests(pool_tokens: int, context_tokens: int) -> int:
    """Returns the most running requests (`model_executor/model_runner.py`)."""
    most = min(max(int(pool_tokens / context_tokens * 512), 2048), 4096)
    return max(1, min(most, pool_tokens // 2))


class SglangMemory:
    """(total - context) x `mem_fraction_static` - weights (`mem_cache/kv_cache_configurator.py`,
    `_profile_available_bytes`).

    Activations and graphs are what the share leaves. Of what was in use when the engine began to
    measure, the same share is charged.
    """

    is_vllm = False

    def taken(self, stage: Stage) -> Taken:
        share = stage.config.gpu_memory_utilization or 1.0
        return Taken(stage.hardware.context_gib * GIB * share)


def server_defaults(config: RunConfig, hardware: Hardware, model: Model) -> dict[str, Any]:
    """Returns what the server chooses by the GPU: the tokens of a chunk, and the share of memory
    for weights and KV."""
    memory_bytes = hardware.memory_bytes
    return {
        "max_num_batched_tokens": chunked_prefill_size(memory_bytes),
        "gpu_memory_utilization": mem_fraction_static(config, memory_bytes, model),
    }
