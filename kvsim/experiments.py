"""Repeats two published experiments on KV-cache pressure; neither needs a GPU.

Both count what a scheduler decides, and that hardly depends on how long a step takes. Every
configuration is run on the same seeds; a seed decides lengths and the random victim. Requests are
made as `configs/workloads` says.

* `watermark`, vLLM PR #44594: preemptions fall, then stay level, as more blocks are kept free at
  admissions.
* `victims`, vLLM RFC #54644: the share of computed tokens that were computed before and thrown away
  (the *recompute tax*), by pool size and by who gives way. The publisher's lengths, number of
  sequences and token budget are unknown; those here are chosen to fit its taxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvsim.config import RunConfig, load_config
from kvsim.library import find
from kvsim.replicates import load_of, replicate
from kvsim.report.certainty import Published
from kvsim.result import Result

WATERMARKS: dict[str, int] = {"off": 1065, "0.02": 400, "0.05": 187, "0.10": 168, "0.15": 168}
"""Watermark → preemptions that PR #44594 reports of one run."""

TAXES: dict[int, float] = {2800: 0.0, 1600: 0.322, 800: 0.579, 400: 0.788}
"""Blocks → recompute tax that RFC #54644 reports where the tail gives way."""
CUTS: dict[int, float] = {1600: 0.59, 800: 0.40, 400: 0.43}
"""Blocks → share of the wasted tokens that least computed first saves there."""
ORDER = ("least-computed", "tail", "random", "most-computed")
"""Victims from the least to the most wasted tokens, as the RFC's ablation orders them."""

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


def run_watermarks(
    seeds: int,
    requests: int | None = None,
    jobs: int | None = 1,
    progress: Progress | None = None,
) -> Iterator[Run]:
    """One run for each watermark and seed, seed by seed; of the first `requests` requests."""
    configs = {name: load_config(str(find("runs", f"watermark-{name}"))) for name in WATERMARKS}
    return _runs(configs, seeds, requests, jobs, progress)


def run_victims(
    seeds: int,
    requests: int | None = None,
    jobs: int | None = 1,
    progress: Progress | None = None,
) -> Iterator[Run]:
    """One run for each pool size, victim and seed, seed by seed; of the first `requests`."""
    config = load_config(str(find("runs", "victims")))
    configs = {
        setting_of(blocks, victim): msgspec.structs.replace(
            config, num_gpu_blocks_override=blocks, victim=victim
        )
        for blocks in TAXES
        for victim in ORDER
    }
    return _runs(configs, seeds, requests, jobs, progress)


def published_of(workload: str | None, names: Sequence[str]) -> Published | None:
    """What is published on these shipped configurations under their shipped workload."""
    values = {f"watermark-{name}": float(number) for name, number in WATERMARKS.items()}
    if workload != "watermark" or not set(names) & set(values):
        return None
    return Published("vLLM PR #44594 (one run)", "num_preemptions", values)


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


def _runs(
    configs: Mapping[str, RunConfig],
    seeds: int,
    requests: int | None,
    jobs: int | None,
    progress: Progress | None,
) -> Iterator[Run]:
    cut = [msgspec.structs.replace(config, num_prompts=requests) for config in configs.values()]
    load = load_of(None, list(configs.items()))
    rows = replicate(load, cut, range(seeds), _counted, jobs=jobs, progress=progress)
    for row in rows:
        for setting, run in zip(configs, row, strict=True):
            yield run._replace(setting=setting)


def _counted(result: Result) -> Run:
    summary, steps = result.summary, result.steps
    return Run(
        "",
        result.config.seed,
        summary["num_preemptions"],
        summary["preempted_requests"],
        summary["recomputed_tokens"],
        int(steps["prefill_tokens"].sum() + steps["decode_seqs"].sum()),
        summary["output_throughput"],
        result.meta["outcome"]["kind"],
    )
