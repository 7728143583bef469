"""Small runs with a tier below the GPU, in which every copy can be followed by hand."""

from dataclasses import replace
from random import Random
from typing import Any

from made import make_trace

from kvsim.results.ledger import KERNELS, TIME_PARTS
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.workload import TokenContent, Trace

MS = 1_000_000
SMALL = {
    "model": "qwen2.5-0.5b",
    "hardware": "h100",
    "num_gpu_blocks_override": 12,
    "max_model_len": 176,
    "async_scheduling": False,
}


def cost(block_us: int) -> dict[str, Any]:
    """Every step takes 1 ms, and the copy of a block that many microseconds."""
    none = {"prefill_token_us": 0, "decode_seq_us": 0, "context_token_ns": 0}
    return {"model": "constant", "step_us": 1000, **none, "link": {"block_us": block_us}}


def prompts(*rows: tuple[int, int], every_s: int = 1) -> Trace:
    """Requests with one output token, one every so many seconds, as (token, prompt length)."""
    trace = make_trace([(n, 1, TokenContent((token,) * n)) for token, n in rows])
    later = [replace(row, arrival_ns=row.arrival_ns * every_s) for row in trace.rows]
    return replace(trace, rows=later)


AGAIN = prompts((1, 40), (2, 172), (1, 40))
"""A prompt of two whole blocks, one that evicts them, and the first one again."""


def run(trace: Trace, gib: float = 1.0, block_us: int = 200, **settings: Any) -> Result:
    table = {**SMALL, "cost": cost(block_us), "kv_offloading_size": gib}
    return simulate(trace, table | settings)


def ttft_ms(result: Result) -> list[float]:
    requests = result.requests
    return [float(t) / MS for t in requests["first_token_ns"] - requests["arrival_ns"]]


def random_run(seed: int) -> tuple[Trace, dict[str, Any]]:
    """Prompts of three tokens that continue each other, small pools, slow and fast links."""
    rng, tokens = Random(seed), list[tuple[int, ...]]()
    for _ in range(rng.randint(1, 25)):
        start = rng.choice(tokens)[: rng.randint(1, 100)] if tokens and rng.random() < 0.6 else ()
        more = tuple(rng.randrange(3) for _ in range(rng.randint(1, 60)))
        tokens.append(start + more)
    trace = make_trace([(len(t), rng.randint(1, 16), TokenContent(t)) for t in tokens])
    gap_ns = rng.choice([0, MS, 5 * MS, 300 * MS])
    rows = [replace(row, arrival_ns=row.index * gap_ns) for row in trace.rows]
    extra = {
        "blocks_per_chunk": rng.choice([1, 1, 2]),
        "eviction_policy": rng.choice(["lru", "arc"]),
        "store_threshold": rng.choice([0, 2]),
        "offload_prompt_only": rng.random() < 0.5,
        "sync_load_budget_bytes": rng.choice([0, 0, 10**6]),
    }
    return replace(trace, rows=rows), {
        "num_gpu_blocks_override": rng.choice([12, 16, 24, 50]),
        "async_scheduling": rng.random() < 0.5,
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "max_num_seqs": rng.choice([1, 3, 16]),
        "max_num_batched_tokens": rng.choice([32, 64, 512]),
        "enable_prefix_caching": rng.random() < 0.8,
        "gib": rng.choice([0.001, 0.003, 0.02, 1.0]),
        "block_us": rng.choice([0, 50, 1000, 100_000]),
        "kv_connector_extra_config": extra,
    }


def check(result: Result) -> None:
    """What holds of every ledger."""
    requests, steps = result.requests, result.steps
    total = sum(requests[name] for name in TIME_PARTS)
    assert (total == requests["finish_ns"] - requests["arrival_ns"]).all()
    assert all((requests[name] >= 0).all() for name in TIME_PARTS)
    whole = sum(steps[name] for name in (*KERNELS, "transfer_ns", "link_wait_ns", "flush_ns"))
    assert (whole == steps["end_ns"] - steps["start_ns"]).all()
    ttft = requests["first_token_ns"] - requests["arrival_ns"]
    before = sum(requests[name] for name in TIME_PARTS if name.startswith("waiting"))
    assert (before <= ttft).all()
    again = requests["num_preemptions"] > 0
    assert not requests["reload_ns"][~again].any()
    loaded = requests["tier1_hit_tokens"] + requests["tier2_hit_tokens"]
    assert (loaded <= requests["num_cached_tokens"]).all()
