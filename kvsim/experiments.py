"""Repeats two published experiments on KV-cache pressure; neither needs a GPU.

Both count what a scheduler decides, and that hardly depends on how long a step takes. Every
configuration is run on the same seeds; a seed decides lengths and the random victim.

* `watermark`, vLLM PR #44594: preemptions fall, then stay level, as more blocks are kept free at
  admissions.
* `victims`, vLLM RFC #54644: the share of computed tokens that were computed before and thrown away
  (the *recompute tax*), by pool size and by who gives way. The publisher's lengths, number of
  sequences and token budget are unknown; those here are chosen to fit its taxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from kvsim.config import RunConfig, load_config
from kvsim.library import find
from kvsim.run import simulate
from kvsim.workload.lengths import Lengths, synthesise_lengths
from kvsim.workload.trace import Trace

WATERMARKS: dict[str, int] = {"off": 1065, "0.02": 400, "0.05": 187, "0.10": 168, "0.15": 168}
"""Watermark → preemptions that PR #44594 reports of one run."""

TAXES: dict[int, float] = {2800: 0.0, 1600: 0.322, 800: 0.579, 400: 0.788}
"""Blocks → recompute tax that RFC #54644 reports where the tail gives way."""
CUTS: dict[int, float] = {1600: 0.59, 800: 0.40, 400: 0.43}
"""Blocks → share of the wasted tokens that least computed first saves there."""
ORDER = ("least-computed", "tail", "random", "most-computed")
"""Victims from the least to the most wasted tokens, as the RFC's ablation orders them."""

WATERMARK_REQUESTS, VICTIMS_REQUESTS = 450, 300

Progress = Callable[[int], None]


class Run(NamedTuple):
    """One configuration on one seed."""

    setting: str
    """What the configuration differs in: a watermark, or `BLOCKS VICTIM`."""
    seed: int
    preemptions: int
    preempted_requests: int
    wasted_tokens: int
    """Tokens whose KV was computed, lost to a preemption, and computed again."""
    computed_tokens: int
    output_throughput: float
    """Tokens per second of simulated time, under a constant cost: compare runs, nothing else."""
    outcome: str

    @property
    def tax(self) -> float:
        """Wasted tokens over all tokens computed."""
        return self.wasted_tokens / self.computed_tokens


def watermark_trace(seed: int, requests: int = WATERMARK_REQUESTS) -> Trace:
    """`vllm bench serve` with inputs of 1,000 and outputs of 5,000 tokens, range ratio 0.2."""
    return synthesise_lengths(
        Lengths(1000), Lengths(5000), seed, range_ratio=0.2, requests=requests
    )


def victims_trace(seed: int, requests: int = VICTIMS_REQUESTS) -> Trace:
    """Prompts of mean 241, a tenth of them 5 times longer; outputs of mean 319, a tenth 8 times."""
    prompts, outputs = Lengths(172, 0.1, 5), Lengths(188, 0.1, 8)
    return synthesise_lengths(prompts, outputs, seed, range_ratio=0.5, requests=requests)


def run_watermarks(
    seeds: int, requests: int = WATERMARK_REQUESTS, progress: Progress | None = None
) -> Iterator[Run]:
    """One run for each watermark and seed, seed by seed."""
    configs = {name: load_config(str(find("runs", f"watermark-{name}"))) for name in WATERMARKS}
    for seed in range(seeds):
        trace = watermark_trace(seed, requests)
        for name, config in configs.items():
            yield _run(trace, config, name, seed, progress)


def run_victims(
    seeds: int, requests: int = VICTIMS_REQUESTS, progress: Progress | None = None
) -> Iterator[Run]:
    """One run for each pool size, victim and seed, seed by seed."""
    config = load_config(str(find("runs", "victims")))
    for seed in range(seeds):
        trace = victims_trace(seed, requests)
        for blocks in TAXES:
            for victim in ORDER:
                each = msgspec.structs.replace(
                    config, num_gpu_blocks_override=blocks, victim=victim
                )
                yield _run(trace, each, setting_of(blocks, victim), seed, progress)


def setting_of(blocks: int, victim: str) -> str:
    """The name of a configuration of the `victims` experiment."""
    return f"{blocks} {victim}"


def group(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of each setting, by seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return groups


def cuts(groups: dict[str, list[Run]], blocks: int) -> list[float]:
    """For each seed on which the tail wastes tokens, the share that least computed first saves."""
    pairs = zip(
        groups[setting_of(blocks, "tail")],
        groups[setting_of(blocks, "least-computed")],
        strict=True,
    )
    return [
        1 - least.wasted_tokens / tail.wasted_tokens for tail, least in pairs if tail.wasted_tokens
    ]


def ordered(groups: dict[str, list[Run]], blocks: int) -> int:
    """On how many seeds the victims waste in the order of `ORDER`."""
    series = [groups[setting_of(blocks, victim)] for victim in ORDER]
    wasted = ([run.wasted_tokens for run in runs] for runs in zip(*series, strict=True))
    return sum(each == sorted(set(each)) for each in wasted)


def record(runs: list[Run]) -> list[dict[str, Any]]:
    """The runs as plain values."""
    return [{**run._asdict(), "recompute_tax": run.tax} for run in runs]


def _run(
    trace: Trace, config: RunConfig, setting: str, seed: int, progress: Progress | None
) -> Run:
    config = msgspec.structs.replace(config, seed=seed)
    result = simulate(trace, config, progress=progress)
    summary, steps = result.summary, result.steps
    return Run(
        setting,
        seed,
        summary["num_preemptions"],
        summary["preempted_requests"],
        summary["recomputed_tokens"],
        int(steps["prefill_tokens"].sum() + steps["decode_seqs"].sum()),
        summary["output_throughput"],
        result.meta["outcome"]["kind"],
    )
