"""Repeats llm-d's published benchmarks of routers, and writes what came of it into the page.

    python docs/site/router_benchmarks.py
    python docs/site/router_benchmarks.py --check

The tables are written between the marks `<!-- routers -->` and `<!-- end of routers -->` of
`docs/results/routers.md`. Nothing of them depends on the machine. It takes minutes.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvsim.fleet import FleetResult, simulate_fleet
from kvsim.workload.trace import Row, SegmentContent, Trace

PAGE = Path(__file__).resolve().parents[1] / "results" / "routers.md"
START, END = "<!-- routers -->\n", "<!-- end of routers -->\n"
DRAIN_S = 400
"""Time between two stages, long enough for every request to end."""
BROKEN_S = 10.0
"""A router has broken down where the p90 of TTFT is above this."""


class Figures(NamedTuple):
    """What comes of one router."""

    output_tokens_per_s: float
    """Mean over the rates; of each, from its first request to the end of its last one."""
    waiting_mean: float
    """Requests waiting at a replica, mean over the time at work."""
    ttft_p90_s: tuple[float, ...]
    """At each rate."""

    def knee(self, stages: Sequence[tuple[int, int]]) -> int | None:
        """The least rate at which it has broken down."""
        broken = (
            rate
            for (rate, _), p90_s in zip(stages, self.ttft_p90_s, strict=True)
            if p90_s > BROKEN_S
        )
        return next(broken, None)


class Contestant(NamedTuple):
    """A router with its settings."""

    name: str
    router: str
    args: dict[str, Any]
    published: Figures


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
    """Twice the tokens of an output that a running request has on average, as published."""
    poisson: bool
    """Whether gaps are random; if not, all are equal."""
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
    150, 5, 6_000, 1_200, 2 * 215, True, (15, 50),
    (
        (3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21), (40, 38),
        (43, 36), (46, 33), (49, 30), (52, 29), (55, 27), (57, 26), (60, 25),
    ),
    (
        Contestant(
            "precise", "llm-d-precise",
            {"prefix_weight": 3, "kv_cache_weight": 2, "queue_weight": 2},
            Figures(8730.0, 0.1, (
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
            Figures(6944.4, 8.1, (
                0.497, 0.499, 0.400, 0.600, 0.700, 0.609, 0.708, 2.459,
                43.018, 43.515, 44.930, 46.335, 47.284, 50.108, 49.930, 50.226,
            )),
        ),
        Contestant(
            "random", "random", {},
            Figures(4428.7, 27.3, (
                0.820, 1.398, 2.299, 70.273, 78.420, 82.943, 86.182, 91.519,
                101.272, 101.142, 101.265, 103.514, 105.004, 104.321, 106.816, 105.988,
            )),
        ),
        Contestant(
            "load", "llm-d-default",
            {"prefix_weight": 0, "kv_cache_weight": 1, "queue_weight": 1},
            Figures(4266.4, 28.9, (
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
    83, 3, 8_000, 1_000, 2 * 500, False, (10, 25),
    ((3, 210), (4, 180), (5, 120), (6, 120), (8, 90), (10, 70), (12, 60), (15, 50), (20, 50)),
    (
        Contestant(
            "precise", "llm-d-precise",
            {"prefix_weight": 2, "kv_cache_weight": 1, "queue_weight": 0,
             "active_request_weight": 1},
            Figures(5380.9, 0.5, (0.400, 0.486, 0.400, 0.400, 0.400, 0.400, 0.400, 0.400, 0.400)),
        ),
        Contestant(
            "estimated", "llm-d-default",
            {"prefix_weight": 2, "kv_cache_weight": 1, "queue_weight": 0,
             "active_request_weight": 1, "hash_block_size": 256, "lru_capacity": 2_200},
            Figures(
                3408.6, 26.8, (
                    2.200, 3.402, 4.322, 30.211, 64.280,
                    66.291, 81.511, 103.779, 165.276,
                )
            ),
        ),
        Contestant(
            "random", "random", {},
            Figures(
                2991.5, 36.6, (
                    2.000, 22.814, 30.994, 56.371, 74.757,
                    88.089, 96.284, 128.434, 197.010,
                )
            ),
        ),
        Contestant(
            "load", "llm-d-default",
            {"prefix_weight": 0, "kv_cache_weight": 1, "queue_weight": 0,
             "active_request_weight": 1},
            Figures(
                2669.0, 37.6, (
                    3.299, 15.818, 31.501, 88.121, 101.514,
                    129.421, 115.098, 148.000, 208.052,
                )
            ),
        ),
    ),
)  # fmt: skip


def requests(benchmark: Benchmark, seed: int = 0) -> tuple[Trace, list[range]]:
    """The requests, and the places of those of each stage behind the warm-up. All prompts are sent
    in one random order, again and again, as by inference-perf."""
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
            at_s += random.expovariate(rate) if benchmark.poisson else 1 / rate
        stages.append(range(first, len(rows)))
        start_s = at_s + DRAIN_S
    return Trace(benchmark.title, "generated", "", rows), stages[1:]


def figures(result: FleetResult, stages: Sequence[range]) -> Figures:
    """What came of a router in a simulation."""
    arrival_ns, first_ns, finish_ns, tokens = (
        np.asarray(result.requests[name])
        for name in ("arrival_ns", "first_token_ns", "finish_ns", "output_tokens")
    )
    p90_s, rates = [], []
    busy_ns = waiting_ns = 0
    for stage in stages:
        own = slice(stage.start, stage.stop)
        p90_s.append(float(np.percentile((first_ns - arrival_ns)[own], 90)) / 1e9)
        start_ns, end_ns = int(arrival_ns[own].min()), int(finish_ns[own].max())
        rates.append(float(tokens[own].sum()) / (end_ns - start_ns) * 1e9)
        busy_ns += (end_ns - start_ns) * len(result.replicas)
        for replica in result.replicas:
            steps = replica.steps
            inside = (steps["start_ns"] >= start_ns) & (steps["start_ns"] < end_ns)
            took_ns = (steps["end_ns"] - steps["start_ns"])[inside]
            waiting_ns += int((steps["waiting"][inside] * took_ns).sum())
    return Figures(float(np.mean(rates)), waiting_ns / busy_ns, tuple(p90_s))


def measured(benchmark: Benchmark) -> list[Figures]:
    """What comes of each router."""
    trace, stages = requests(benchmark)
    configs = [benchmark.settings] * benchmark.replicas
    return [
        figures(simulate_fleet(trace, configs, each.router, each.args), stages)
        for each in benchmark.contestants
    ]


def report(benchmark: Benchmark) -> Iterator[str]:
    """The lines of the page."""
    ours = measured(benchmark)
    names = [each.name for each in benchmark.contestants]
    yield f"### {benchmark.title}"
    yield ""
    yield (
        "| router | breaks down at, published | kvsim | output tokens/s, published | kvsim"
        " | deviation | waiting, published | kvsim |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, each, own in zip(names, benchmark.contestants, ours, strict=True):
        real = each.published
        deviation = 100 * (own.output_tokens_per_s / real.output_tokens_per_s - 1)
        knees = [known.knee(benchmark.stages) for known in (real, own)]
        yield (
            f"| {name} | {knees[0] or 'never'} | {knees[1] or 'never'}"
            f" | {real.output_tokens_per_s:,.0f} | {own.output_tokens_per_s:,.0f}"
            f" | {deviation:+.0f} % | {real.waiting_mean:.1f} | {own.waiting_mean:.1f} |"
        )
    yield ""
    yield "p90 of TTFT in seconds, published → kvsim:"
    yield ""
    yield f"| requests/s | {' | '.join(names)} |"
    yield "|---" * (1 + len(names)) + "|"
    for place, (rate, _) in enumerate(benchmark.stages):
        cells = [
            f"{each.published.ttft_p90_s[place]:.1f} → {own.ttft_p90_s[place]:.1f}"
            for each, own in zip(benchmark.contestants, ours, strict=True)
        ]
        yield f"| {rate} | {' | '.join(cells)} |"
    yield ""


def main(*, check: bool) -> int:
    """Writes the page, or compares it with what would be written. Returns the exit code."""
    before = PAGE.read_text(encoding="utf-8")
    head, rest = before.split(START)
    _, tail = rest.split(END)
    lines = [line for each in (SEVENTY_THREE, THIRTY_SEVEN) for line in report(each)]
    after = head + START + "\n" + "\n".join(lines).replace("| -", "| −") + "\n" + END + tail
    if check:
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
