"""Repeats llm-d's published benchmarks of routers, and writes what came of it into the page.

    python docs/site/router_benchmarks.py
    python docs/site/router_benchmarks.py --check

The tables are written between the marks `<!-- routers -->` and `<!-- end of routers -->` of
`docs/results/routers.md`. Nothing of them depends on the machine. It takes minutes.
"""

import sys
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvsim.fleet.fleet import FleetResult, simulate_fleet
from kvsim.workload.trace import Row, SegmentContent, Trace

PAGE = Path(__file__).resolve().parents[1] / "results" / "routers.md"
START, END = "<!-- routers -->\n", "<!-- end of routers -->\n"
DRAIN_S = 400
"""Time between two stages, long enough for every request to end."""
BROKEN_S = 2.0
"""A router has broken down where the p90 of TTFT is above this."""


class Published(NamedTuple):
    """What was measured of one router: the mean of the requests waiting at a replica over the
    whole run, and the p90 of TTFT in seconds at each rate."""

    waiting_mean: float
    ttft_p90_s: tuple[float, ...]


class Contestant(NamedTuple):
    """A router with its settings."""

    name: str
    router: str
    args: dict[str, Any]
    published: Published


class Benchmark(NamedTuple):
    """A workload of groups of prompts that begin alike, sent at rising rates."""

    title: str
    replicas: int
    settings: dict[str, Any]
    groups: int
    prompts: int
    """Prompts of a group: its beginning and a question each."""
    system_tokens: int
    question_tokens: int
    output_tokens: int
    burstiness: float
    warm_up: tuple[int, int]
    stages: tuple[tuple[int, int], ...]
    """Rate in requests a second, and duration in seconds."""
    contestants: tuple[Contestant, ...]


SEVENTY_THREE = Benchmark(
    "73 % of the cache: Qwen3-32B on 8 replicas",
    8,
    {
        "model": "qwen3-32b", "hardware": "h100-sxm", "tensor_parallel_size": 2,
        "block_size": 64, "num_gpu_blocks_override": 307_328 // 64, "max_model_len": 40_960,
    },
    150, 5, 6_000, 1_200, 1_000, 1.0, (15, 50),
    (
        (3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21), (40, 38),
        (43, 36), (46, 33), (49, 30), (52, 29), (55, 27), (57, 26), (60, 25),
    ),
    (
        Contestant(
            "precise", "llm-d-precise",
            {"prefix_weight": 3, "kv_cache_weight": 2, "queue_weight": 2},
            Published(0.1, (
                0.498, 0.600, 0.400, 0.600, 0.500, 0.583, 0.509, 0.500,
                0.488, 0.500, 0.589, 0.600, 0.507, 0.600, 0.600, 0.500,
            )),
        ),
        Contestant(
            "estimated", "llm-d-default",
            {
                "prefix_weight": 1, "kv_cache_weight": 1, "queue_weight": 1,
                "hash_block_size": 64, "lru_capacity": 31_250,
            },
            Published(8.1, (
                0.497, 0.499, 0.400, 0.600, 0.700, 0.609, 0.708, 2.459,
                43.018, 43.515, 44.930, 46.335, 47.284, 50.108, 49.930, 50.226,
            )),
        ),
        Contestant(
            "random", "random", {},
            Published(27.3, (
                0.820, 1.398, 2.299, 70.273, 78.420, 82.943, 86.182, 91.519,
                101.272, 101.142, 101.265, 103.514, 105.004, 104.321, 106.816, 105.988,
            )),
        ),
        Contestant(
            "load", "llm-d-default",
            {"prefix_weight": 0, "kv_cache_weight": 1, "queue_weight": 1},
            Published(28.9, (
                1.609, 4.124, 7.002, 77.707, 72.972, 85.979, 83.806, 88.086,
                100.911, 101.524, 105.884, 105.015, 108.572, 110.681, 113.278, 110.184,
            )),
        ),
    ),
)  # fmt: skip
THIRTY_SEVEN = Benchmark(
    "37 % of the cache: Llama-3.1-70B on 4 replicas",
    4,
    {
        "model": "llama-3.1-70b", "hardware": "h100-sxm", "tensor_parallel_size": 4,
        "block_size": 64, "num_gpu_blocks_override": 461_376 // 64, "max_model_len": 40_960,
    },
    83, 3, 8_000, 1_000, 1_000, float("inf"), (10, 25),
    ((3, 210), (4, 180), (5, 120), (6, 120), (8, 90), (10, 70), (12, 60), (15, 50), (20, 50)),
    (
        Contestant(
            "precise", "llm-d-precise",
            {"prefix_weight": 2, "kv_cache_weight": 1, "queue_weight": 0,
             "active_request_weight": 1},
            Published(0.5, (0.400, 0.486, 0.400, 0.400, 0.400, 0.400, 0.400, 0.400, 0.400)),
        ),
        Contestant(
            "estimated", "llm-d-default",
            {"prefix_weight": 2, "kv_cache_weight": 1, "queue_weight": 0,
             "active_request_weight": 1, "hash_block_size": 256, "lru_capacity": 2_200},
            Published(
                26.8, (2.200, 3.402, 4.322, 30.211, 64.280, 66.291, 81.511, 103.779, 165.276)
            ),
        ),
        Contestant(
            "random", "random", {},
            Published(
                36.6, (2.000, 22.814, 30.994, 56.371, 74.757, 88.089, 96.284, 128.434, 197.010)
            ),
        ),
        Contestant(
            "load", "llm-d-default",
            {"prefix_weight": 0, "kv_cache_weight": 1, "queue_weight": 0,
             "active_request_weight": 1},
            Published(
                37.6, (3.299, 15.818, 31.501, 88.121, 101.514, 129.421, 115.098, 148.000, 208.052)
            ),
        ),
    ),
)  # fmt: skip


class Stage(NamedTuple):
    """What came of one rate."""

    ttft_p90_s: float
    ttft_mean_s: float
    output_tokens_per_s: float


def requests(benchmark: Benchmark, seed: int) -> tuple[Trace, list[range]]:
    """The requests, and the places of those of each stage. All prompts are sent in one random
    order, again and again."""
    random = Random(seed)
    prompts = [(g, q) for g in range(benchmark.groups) for q in range(benchmark.prompts)]
    random.shuffle(prompts)
    rows: list[Row] = []
    stages, start_s = [], 0.0
    for rate, duration_s in (benchmark.warm_up, *benchmark.stages):
        first, at_s = len(rows), start_s
        for index in range(first, first + rate * duration_s):
            group, question = prompts[index % len(prompts)]
            segments = (
                (f"group {group}", benchmark.system_tokens),
                (f"question {question}", benchmark.question_tokens),
            )
            length = benchmark.system_tokens + benchmark.question_tokens
            content = SegmentContent(segments)
            rows.append(
                Row(
                    index, str(index), index + 1, round(at_s * 1e9), length,
                    benchmark.output_tokens, content,
                )
            )  # fmt: skip
            poisson = benchmark.burstiness == 1
            at_s += random.expovariate(rate) if poisson else 1 / rate
        stages.append(range(first, len(rows)))
        start_s = at_s + DRAIN_S
    return Trace(benchmark.title, "generated", "", rows), stages[1:]


def outcome(result: FleetResult, places: range) -> Stage:
    of = {
        name: result.requests[name][places.start : places.stop]
        for name in ("arrival_ns", "first_token_ns", "finish_ns", "output_tokens")
    }
    ttft_s = (of["first_token_ns"] - of["arrival_ns"]) / 1e9
    span_s = (of["finish_ns"].max() - of["arrival_ns"].min()) / 1e9
    return Stage(
        float(np.percentile(ttft_s, 90)),
        float(ttft_s.mean()),
        float(of["output_tokens"].sum() / span_s),
    )


if __name__ == "__main__":
    import time

    which = SEVENTY_THREE if sys.argv[1] == "73" else THIRTY_SEVEN
    trace, stages = requests(which, 0)
    print(len(trace.rows))
    for c in which.contestants:
        if len(sys.argv) > 2 and c.name not in sys.argv[2:]:
            continue
        t = time.process_time()
        result = simulate_fleet(trace, [which.settings] * which.replicas, c.router, c.args)
        print(
            c.name,
            round(time.process_time() - t, 1),
            "s;",
            [r.meta["outcome"]["kind"] for r in result.replicas][:1],
            result.replicas[0].meta["fast_path"],
        )
        for (rate, dur), places, pub in zip(which.stages, stages, c.published.ttft_p90_s):
            s = outcome(result, places)
            print(
                f"  {rate:3d}  p90 {s.ttft_p90_s:8.2f} ({pub:8.2f})  mean {s.ttft_mean_s:7.2f}  out {s.output_tokens_per_s:8.0f}"
            )
        sys.stdout.flush()
