"""vLLM's two engines, V0 and V1: which is simulated for which, and what either leaves unused."""

from __future__ import annotations

from kvsim.settings.server.arguments import Meaning

ENGINES = {"0": "vllm-0.6.3", "1": "vllm-v1"}
"""Generation, as logs print it → `engine`."""

_UNUSED = {
    "vllm-v1": ("disable_async_output_proc", "preemption_mode", "swap_space"),
    "vllm-0.6.3": (
        "async_scheduling",
        "disable_hybrid_kv_cache_manager",
        "enable_lora",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "max_lora_rank",
        "max_loras",
        "max_num_active_seqs",
        "max_num_scheduled_tokens",
        "prefill_schedule_interval",
        "prefix_cache_retention_interval",
        "scheduler_reserve_full_isl",
        "watermark",
    ),
}
"""Engine → settings that it does not have, though a command line or a log may name them."""

_V1_SINCE = (0, 8, 0)
"""The first vLLM version whose default is V1; before, `VLLM_USE_V1=1` chose it (0.7.3 and 0.8.0
`envs.py`, `engine/arg_utils.py`)."""


def generation(version: str | None, use_v1: str | None) -> str:
    """`0` or `1`, for a vLLM version as `0.9.2` and the environment variable `VLLM_USE_V1`."""
    if use_v1 in ("0", "1"):
        return use_v1
    new = version is None or tuple(map(int, version.split("."))) >= _V1_SINCE
    return "1" if new else "0"


def leave_unused(meaning: Meaning) -> None:
    """Take away the settings that the engine does not have, with a note for those that are set."""
    engine = meaning.settings.get("engine", "")
    for key in _UNUSED.get(engine, ()):
        meaning.sources.pop(key, None)
        if meaning.settings.pop(key, None):
            meaning.ignored.setdefault(f"not used by {engine}", []).append(key)
