"""An engine of the corpus from the configuration of a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from kvsim.against.conform import sglang, vllm_v1
from kvsim.against.conform.step_log import Record
from kvsim.against.conform.virtual import replay
from kvsim.engines import ENGINES
from kvsim.engines.nano.blocks import NanoTables, NanoTables2025
from kvsim.engines.nano.scheduler import Nano, Nano2025
from kvsim.engines.vllm_033.blocks import Vllm033Tables
from kvsim.engines.vllm_033.scheduler import Vllm033
from kvsim.engines.vllm_063.blocks import Naive, PrefixCaching
from kvsim.engines.vllm_063.scheduler import Vllm063, Vllm063Async

Config = Mapping[str, Any]


def vllm033(config: Config) -> tuple[Vllm033, Vllm033Tables]:
    """vLLM 0.3.3."""
    scheduler = Vllm033(
        num_gpu_blocks=config["num_gpu_blocks"],
        max_model_len=config["max_model_len"],
        max_num_seqs=config.get("max_num_seqs", 256),
        max_num_batched_tokens=config.get("max_num_batched_tokens"),
        max_paddings=config.get("max_paddings", 256),
        preemption_mode=config.get("preemption_mode"),
        watermark=config.get("watermark", 0.01),
    )
    blocks = Vllm033Tables(
        config["block_size"],
        config["num_gpu_blocks"],
        config.get("num_cpu_blocks", 0),
        config.get("sliding_window"),
    )
    return scheduler, blocks


def vllm063(config: Config) -> tuple[Vllm063, Naive]:
    """vLLM 0.6.3.post1, synchronous or not."""
    caching = config.get("enable_prefix_caching", False)
    manager = PrefixCaching if caching else Naive
    engine = Vllm063Async if config.get("async_output_proc", False) else Vllm063
    scheduler = engine(
        block_size=config["block_size"],
        num_gpu_blocks=config["num_gpu_blocks"],
        max_model_len=config["max_model_len"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        enable_chunked_prefill=config.get("enable_chunked_prefill", False),
        enable_prefix_caching=caching,
        preemption_mode=config.get("preemption_mode"),
        scheduling_policy=config.get("policy", "fcfs"),
        watermark=config.get("watermark", 0.01),
    )
    pools = manager(config["block_size"], config["num_gpu_blocks"], config.get("num_cpu_blocks", 0))
    return scheduler, pools


def _nano(engine: type[Nano], tables: type[NanoTables], config: Config) -> tuple[Nano, NanoTables]:
    """nano-vllm, commit bb823b3 or 6ef2a4f."""
    scheduler = engine(
        block_size=config["block_size"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
    )
    return scheduler, tables(config["block_size"], config["num_gpu_blocks"])


BUILDERS: dict[str, Callable[[Config], tuple[Any, Any]]] = {
    "vllm-0.3.3": vllm033,
    "vllm-0.6.3": vllm063,
    "nano-vllm": partial(_nano, Nano, NanoTables),
    "nano-vllm-2025-08": partial(_nano, Nano2025, NanoTables2025),
}
"""Engine → scheduler and block manager of a case."""

REPLAYS = {"vllm-v1": vllm_v1.replay, "sglang": sglang.replay}
"""Engines whose logs have fields of their own → what writes the log of a case."""

RECORDED = (*BUILDERS, *REPLAYS)
"""Engines that there are recorded logs of."""


def run_case(
    engine: str, config: Config, trace: list[dict[str, Any]], audit_every: int = 0
) -> Iterator[Record]:
    """The step log that kvsim writes for a case.

    `audit_every`: check the books after every so many steps, 0: never.
    """
    served = engine == "vllm-v1" or ENGINES[engine].samples
    if not served and any(row.get("n", 1) > 1 for row in trace):
        yield {"step": 0, "time": 0.0, "error": "this engine draws one sample a request (n = 1)"}
        return
    try:
        if engine in REPLAYS:
            yield from REPLAYS[engine](config, trace, audit_every)
            return
        scheduler, blocks = BUILDERS[engine](config)
    except ValueError as refusal:
        # The engine refuses to start with these settings.
        yield {"step": 0, "time": 0.0, "error": f"ValueError: {refusal}"}
        return
    max_steps = config.get("max_steps", 1_000_000)
    yield from replay(scheduler, blocks, trace, max_steps, audit_every)
