"""Real runs under pressure, small enough for a test."""

from copy import copy
from functools import cache
from typing import Any

import numpy as np
from worlds import hashed

import kvsim
from kvsim.run.result import Result

Run = tuple[Any, dict[str, Any], Any, dict[str, Any]]
"""Steps, requests, inter-token gaps and provenance."""


@cache
def result(
    number: int = 120,
    *,
    seed: int = 0,
    rate: float = 2.0,
    blocks: int = 480,
    caching: bool = True,
    swap: bool = False,
    longest: int = 4000,
    goodput: bool = True,
) -> Result:
    """vLLM 0.6.3 with blocks of 16 tokens; every third request continues the prompt before it."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1000 / rate, number))
    inputs = np.minimum(rng.lognormal(6.2, 0.9, number), 6000).astype(int) + 8
    outputs = rng.lognormal(4.6, 0.7, number).astype(int) + 1
    ids = [
        [10_000 * (i - i % 3) + place for place in range(length // 16)]
        for i, length in enumerate(inputs.tolist())
    ]
    made = hashed(16, *zip(arrivals.tolist(), inputs.tolist(), outputs.tolist(), ids, strict=True))
    settings: dict[str, Any] = {
        "engine": "vllm-0.6.3",
        "model": "llama-3-8b",
        "hardware": "h100-sxm",
        "num_gpu_blocks_override": blocks,
        "num_cpu_blocks_override": 256,
        "block_size": 16,
        "max_model_len": longest,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "enable_prefix_caching": caching and not swap,
        "preemption_mode": "swap" if swap else "recompute",
        "cost": {
            "model": "constant",
            "step_us": 22_000,
            "prefill_token_us": 45,
            "decode_seq_us": 150,
        },
    }
    if goodput:
        settings["goodput"] = {"ttft": 2000.0, "tpot": 60.0}
    return kvsim.simulate(made, settings)


def real_run(*arguments: Any, **settings: Any) -> Run:
    """The tables of a `result`, copied so that a test may change them."""
    made = result(*arguments, **settings)
    requests = {name: copy(column) for name, column in made.requests.items()}
    return dict(made.steps), requests, made.token_gaps_ns, dict(made.meta)
