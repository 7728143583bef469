"""A run small enough to work every figure out by hand.

Pool: 10 blocks of 4 tokens, a watermark of 1. Times in milliseconds:

```
A  arrives  10, prompt 8, tokens at  30  40  60
B  arrives  20, prompt 6 (4 of them hit), waits for the watermark, then for blocks; token at 100
C  arrives 200, prompt 5, token at 210, preempted, recomputed with 4 hits, token at 250
D  arrives   5, rejected
```
No cost model says which kernels a step is made of.
"""

import numpy as np

from kvsim.core.schema import BLOCKED, STEP_COLUMNS
from kvsim.results.ledger import KERNELS, TIME_PARTS

MS = 1_000_000
STEPS = """
start_ns end_ns prefill_tokens cached_tokens decode_seqs used_blocks cached_blocks empty_slots waiting running blocked finished preempted_recompute transfer_ns
 10  30  8 0 0  2 0 0  0 1 -         0  0 0
 30  40  0 0 1  3 0 3  1 1 watermark 0  0 0
 40  60  0 0 1  3 0 2  1 1 blocks    1  0 0
 60 100  2 4 0  2 2 2  0 1 -         1  0 0
200 210  5 0 0  2 3 3  0 1 -         0  0 0
210 220  0 0 0  0 4 0  1 0 -         0  1 0
220 250  1 4 0  2 2 2  0 1 -         1  0 5
"""  # noqa: E501


def tiny_run():
    """Steps, requests, inter-token gaps and provenance."""
    names, *lines = (line.split() for line in STEPS.strip().splitlines())
    steps = {name: np.zeros(len(lines), dtype=np.int64) for name in (*STEP_COLUMNS, *KERNELS)}
    for i, line in enumerate(lines):
        for name, text in zip(names, line, strict=True):
            value = BLOCKED.index(text.strip("-")) if name == "blocked" else int(text)
            steps[name][i] = value * (MS if name.endswith("_ns") else 1)
    steps["free_blocks"] = 10 - steps["used_blocks"] - steps["cached_blocks"]
    steps["unexplained_ns"] = steps["end_ns"] - steps["start_ns"] - steps["transfer_ns"]
    return steps, _requests(), {10 * MS: 1, 20 * MS: 1, 40 * MS: 1}, _meta()


def no_run():
    """The same with neither requests nor steps."""
    steps, requests, _, meta = tiny_run()
    nothing = {name: column[:0] for name, column in requests.items()}
    return {name: column[:0] for name, column in steps.items()}, nothing, {}, meta


def _requests():
    def ms(*instants):
        return np.array([i if i < 0 else i * MS for i in instants], dtype=np.int64)

    def numbers(*values):
        return np.array(values, dtype=np.int64)

    parts = {
        "waiting_step_ns": ms(0, 10, 0, 215),
        "waiting_watermark_ns": ms(0, 10, 0, 10),
        "waiting_blocks_ns": ms(0, 20, 0, 20),
        "own_prefill_ns": ms(20, 40, 10, 0),
        "own_decode_ns": ms(30, 0, 0, 0),
        "preempted_waiting_ns": ms(0, 0, 10, 0),
        "recompute_ns": ms(0, 0, 25, 0),
        "swap_stall_ns": ms(0, 0, 5, 0),
    }
    return {
        "id": ["A", "B", "C", "D"],
        "index": numbers(0, 1, 2, 3),
        "session": ["", "chat", "", ""],
        "status": ["completed", "completed", "completed", "rejected"],
        "reason": ["", "", "", "too long"],
        "input_length": numbers(8, 6, 5, 99),
        "output_length": numbers(3, 1, 2, 1),
        "output_tokens": numbers(3, 1, 2, 0),
        "priority": numbers(0, 0, 0, 0),
        "n": numbers(1, 1, 1, 1),
        "released_ns": ms(10, 15, 200, 5),
        "arrival_ns": ms(10, 20, 200, 5),
        "client_queue_ns": ms(0, 5, 0, 0),
        "first_scheduled_ns": ms(10, 60, 200, -1),
        "first_token_ns": ms(30, 100, 210, -1),
        "finish_ns": ms(60, 100, 250, -1),
        "num_preemptions": numbers(0, 0, 1, 0),
        "num_cached_tokens": numbers(0, 4, 0, 0),
        "tier1_hit_tokens": numbers(0, 0, 0, 0),
        "tier2_hit_tokens": numbers(0, 0, 0, 0),
        "recached_tokens": numbers(0, 0, 4, 0),
        "recomputed_tokens": numbers(0, 0, 1, 0),
        "swapped_out_blocks": numbers(0, 0, 0, 0),
        "swapped_in_blocks": numbers(0, 0, 0, 0),
        "blocked_steps": numbers(0, 2, 0, 0),
        **{name: parts.get(name, numbers(0, 0, 0, 0)) for name in TIME_PARTS},
    }


def _meta():
    return {
        "kvsim_version": "0.1.0",
        "num_gpu_blocks": 10,
        "num_cpu_blocks": 0,
        "watermark_blocks": 1,
        "block_size": 4,
        "prefix_caching": True,
        "cache": {"block_lookups": 8, "block_hits": 2},
        "goodput": {"ttft": 50},
        "outcome": {"kind": "finished"},
        "config": {"engine": "vllm-0.6.3", "request_rate": float("inf")},
    }
