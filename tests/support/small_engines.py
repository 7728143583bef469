"""Every engine, small and short of memory, with random traces that share prefixes."""

from typing import Any

from hypothesis import strategies as st
from worlds import MS, config, hashed

from kvsim.workload import Trace

PRICES = {"step": 7 * MS, "seq": 300_001, "context": 1_003}
COST = {
    "step_us": 7_000,
    "prefill_token_us": 1_000,
    "decode_seq_us": 300.001,
    "context_token_ns": 1_003,
}
ENGINES: dict[str, dict[str, Any]] = {
    "0.6.3": {"disable_async_output_proc": True},
    "0.6.3 async": {},
    "0.6.3 chunked": {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
    "0.6.3 swap": {"preemption_mode": "swap", "num_cpu_blocks_override": 200},
    "0.6.3 chunked swap": {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 16,
        "preemption_mode": "swap",
        "num_cpu_blocks_override": 200,
    },
    "0.6.3 prefixes": {"enable_prefix_caching": True, "scheduling_policy": "priority"},
    "0.6.3 samples": {"n": 2, "num_cpu_blocks_override": 200},
    "v1": {"engine": "vllm-v1", "max_num_batched_tokens": 16, "async_scheduling": False},
    "v1 async": {"engine": "vllm-v1", "max_num_batched_tokens": 16},
    "v1 greedy": {"engine": "vllm-v1", "scheduler_reserve_full_isl": False},
    "0.3.3": {"engine": "vllm-0.3.3"},
    "0.3.3 swap": {
        "engine": "vllm-0.3.3",
        "preemption_mode": "swap",
        "num_cpu_blocks_override": 200,
    },
    "nano": {"engine": "nano-vllm", "max_num_batched_tokens": 16, "max_num_seqs": 3},
    "nano 2025": {"engine": "nano-vllm-2025-08"},
}

rows = st.lists(
    st.tuples(
        st.sampled_from((0, 0, 7, 10, 20, 25, 90)),
        st.integers(1, 40),
        st.integers(1, 20),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


def make_trace(drawn: list[tuple[int, int, int, int]]) -> Trace:
    """Prompts that share the ids of their family, the last of them partly."""
    arrival, made = 0, []
    for number, (gap, length, output, family) in enumerate(drawn):
        arrival += gap
        full = length // 4
        shared = max(0, full - number % 3)
        ids = [100 * family + place for place in range(shared)]
        ids += [10_000 + 100 * number + place for place in range(shared, full)]
        made.append((arrival, length, output, ids))
    return hashed(4, *made)


def engine(name: str, **more: Any) -> dict[str, Any]:
    """A small engine of `ENGINES`, short of memory."""
    table = config(num_gpu_blocks_override=20, watermark=0.1, cost=COST)
    table.pop("disable_async_output_proc")
    table |= ENGINES[name] | more
    if table.get("engine", "").startswith("nano"):
        del table["watermark"]
    return table
