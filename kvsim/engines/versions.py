"""What `vllm serve` assumes where nobody says otherwise, by version and GPU.

Each figure is read from the sources of the releases around the one that changed it
(`engine/arg_utils.py`, `config/cache.py` and `config/scheduler.py`; from 0.8.5, the first release
whose rules are known here, to 0.33.0).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from kvsim.errors import ConfigError

GIB = 2**30
OLDEST, NEWEST = Version("0.8.5"), Version("0.33.0")
"""Releases of vLLM V1 whose defaults are known."""


class Default(NamedTuple):
    """The value of a setting that nobody gave."""

    value: Any
    source: str
    """Who chose it, and by what."""


def parse_version(text: str) -> Version:
    """A release of vLLM V1, or a `ConfigError`; releases after `NEWEST` are taken to be like it."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise ConfigError(
            f"vllm_version: {text!r} is no version; write it as in {NEWEST}"
        ) from None
    if version < OLDEST:
        raise ConfigError(
            f"vllm_version: the defaults of vLLM V1 are known from {OLDEST} on, not of {version};"
            " give a later version, or --engine vllm-0.6.3"
        )
    return version


def gpu_memory_utilization(version: Version) -> float:
    """Share of GPU memory that the engine may use (`config/cache.py`)."""
    return 0.92 if version >= Version("0.20.0") else 0.9


def batch_limits(version: Version, device_name: str, memory_bytes: int) -> tuple[int, int, str]:
    """`max_num_seqs` and `max_num_batched_tokens` of an API server, and the rule in words.

    Source: `EngineArgs.get_batch_defaults`; before 0.28 there is no tier for 160 GiB, in 0.8 an
    A100 is no exception, and the GB10 is one since 0.33. `device_name`: that of the CUDA runtime.
    """
    name = device_name.lower()
    if memory_bytes >= 160 * GIB and version >= Version("0.28.0"):
        return 1024, 16384, "a GPU of 160 GiB or more"
    if memory_bytes < 70 * GIB:
        return 256, 2048, "a GPU below 70 GiB"
    for small, since in (("a100", Version("0.9.0")), ("gb10", NEWEST)):
        if small in name and version >= since:
            return 256, 2048, f"every {small.upper()}"
    return 1024, 8192, "a GPU of 70 GiB or more"


def server_defaults(
    version: Version,
    device_name: str,
    memory_bytes: int,
    max_model_len: int,
    enable_chunked_prefill: bool = True,
) -> dict[str, Default]:
    """Settings of `vllm serve` that depend on its version and on the GPU.

    Without chunked prefill, a step has room for the longest prompt.
    """
    vllm = f"vLLM {version}"
    seqs, tokens, tier = batch_limits(version, device_name, memory_bytes)
    if not enable_chunked_prefill:
        tokens = max(tokens, max_model_len)
    return {
        "max_num_seqs": Default(seqs, f"{vllm} on {tier}"),
        "max_num_batched_tokens": Default(tokens, f"{vllm} on {tier}"),
        "gpu_memory_utilization": Default(gpu_memory_utilization(version), vllm),
        "async_scheduling": Default(version >= Version("0.14.0"), vllm),
        "scheduler_reserve_full_isl": Default(version >= Version("0.19.0"), vllm),
    }
