"""Compares configurations on many seeds, and releases of vLLM V1 by what each change does.

```
seed k ──► requests, arrivals, policy's dice ──► A ──► figures ┐
                        (the same)           ──► B ──► figures ┴─► difference k ──► interval
```
All random streams depend on the seed alone, so all configurations meet the same load. Most of its
chance cancels in the differences (common random numbers). Results do not depend on the number of
processes.

Of an upgrade, the run of the later release is repeated with one change undone at a time: a rule of
scheduling (`kvsim.engines.vllm_v1.releases`), a default, or the size of the pool. What differs is
the effect of that change, all others being made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import isinf
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.engines.vllm_v1.releases import IDLE, RULES, Rule
from kvsim.errors import ConfigError
from kvsim.explain import MARGIN
from kvsim.explain.certainty import (
    LEVEL,
    Comparison,
    Estimate,
    Pair,
    Values,
    judge_pairs,
    paired,
    plan_looks,
    single,
)
from kvsim.explain.differences import values_of
from kvsim.report import change_words, compare_table, value_words
from kvsim.report.wording import setting_words
from kvsim.results.metrics import HEADLINES, NAMED, Metric
from kvsim.run.assembly import assemble
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.run.speculation import draws_acceptance
from kvsim.search.runner import Done, processes, run_all
from kvsim.settings.config import RunConfig, to_table
from kvsim.settings.library import look_up, takes
from kvsim.workload.spec import Workload, load_workload, made_from, make_trace
from kvsim.workload.trace import Trace

T = TypeVar("T")


Simulate = Callable[..., Any]
"""Runs a trace with settings: `simulate`, or another function with its first arguments.
What it gives has a `summary`, as a `Result` or a run of several replicas."""
Summary = Mapping[str, Any]
Configs = Sequence[tuple[str, RunConfig]]


class How(NamedTuple):
    """How runs are made: by what, and in how many processes."""

    simulate: Simulate = simulate
    """Makes the results; fleets have one of their own (`kvsim.fleet.contender`)."""
    jobs: int | None = None
    """Processes at once; None: one per core."""
    progress: Done = lambda number: None
    """Called with 1 whenever a run has ended."""
    command: str = ""


HERE = How()
"""One engine, in a process per core."""


class Load(NamedTuple):
    """Where the requests of each seed come from."""

    trace: Trace | None
    """The trace of the first seed, or of all seeds if there is no workload; None: made from the
    workload like all others."""
    workload: Workload | None = None
    first_seed: int = 0
    """Seed of the workload where the seed of the run is `run_seed`."""
    run_seed: int = 0

    def of(self, seed: int) -> Trace:
        """The requests of a run with this seed."""
        if self.trace is not None and (self.workload is None or seed == self.run_seed):
            return self.trace
        assert self.workload is not None
        return make_trace(self.workload, self.first_seed + seed - self.run_seed)


def load_of(trace: Trace | None, configs: Configs) -> Load:
    """The load that all configurations meet.

    A trace that `kvsim trace synth` made is made again for every seed but its own; any other trace
    is replayed unchanged. Without a trace, the configurations name a workload. Raises `ConfigError`
    where they name different ones, or none.
    """
    seed = configs[0][1].seed
    if trace is not None:
        made = made_from(trace)
        return Load(trace) if made is None else Load(trace, *made, seed)
    name = _common("workload", configs)
    if name is None:
        raise ConfigError("no requests: give --trace FILE, or a --workload to generate")
    return Load(None, load_workload(name), seed, seed)


def redrawn(load: Load, configs: Configs) -> tuple[str, ...]:
    """What differs from seed to seed, in words; empty if every seed gives the same run."""
    found = [words for words, draws in _DRAWN.items() if any(draws(c) for _, c in configs)]
    if load.workload is not None:
        random = load.workload.kind == "random"
        found.insert(0, "lengths" if random else "requests and their recorded arrivals")
    return tuple(found)


def replicate(
    load: Load,
    configs: Sequence[RunConfig],
    seeds: Sequence[int],
    reduce: Callable[[Any], T],
    how: How = HERE,
) -> Iterator[list[T]]:
    """For each seed, what `reduce` makes of the result of every configuration."""
    tasks = [(load, replace(c, seed=s)) for s in seeds for c in configs]
    done: list[T] = []
    run = partial(_run, how.simulate, reduce, how.command)
    for each in run_all(run, tasks, processes(how.jobs, tasks)):
        done.append(each)
        how.progress(1)
        if len(done) == len(configs):
            yield done
            done = []


def compare_seeds(
    load: Load,
    configs: Configs,
    seeds: int,
    *,
    level: float = LEVEL,
    margin: float = MARGIN,
    how: How = HERE,
) -> tuple[Comparison, list[Any]]:
    """Run at most `seeds` seeds; stop earlier if all headline figures are settled.

    Returns the comparison and every configuration's result on the first seed. Looks before the last
    one spend a part of `level` (`kvsim.explain.certainty`): with `level` 0.05, the chance
    that the comparison reports even one difference that does not exist is at most 5 %. Raises
    `ConfigError` where the configurations begin with different seeds.
    """
    first = _common("seed", configs)
    varied = redrawn(load, configs)
    summaries: list[list[Summary]] = []
    results: list[Any] = []
    settings, keep = [config for _, config in configs], partial(_kept, first)
    for look in plan_looks(seeds, level):
        fresh = range(first + len(summaries), first + look.seeds)
        for row in replicate(load, settings, fresh, keep, how):
            results = results or [result for _, result in row]
            summaries.append([summary for summary, _ in row])
        comparison = _judged(configs, varied, summaries, look.level, margin)
        heads = (v for pair, v in comparison.verdicts.items() if pair.key in HEADLINES)
        if all(verdict.settled for verdict in heads):
            break
    ran = tuple(range(first, first + len(summaries)))
    return comparison._replace(seeds=ran, planned=seeds, level=level), results


def _judged(
    configs: Configs,
    varied: tuple[str, ...],
    summaries: Sequence[Sequence[Summary]],
    level: float,
    margin: float,
) -> Comparison:
    names = tuple(name for name, _ in configs)
    values = values_of(summaries)
    pick = single if any(c.cost.get("model") == "uncertain" for _, c in configs) else None
    estimates = {}
    for pair in pairs_of(values, len(names)):
        rows = values[pair.key]
        estimate = estimate_of(NAMED[pair.key], rows[pair.first], rows[pair.other], pick)
        if estimate is not None:
            estimates[pair] = estimate
    verdicts = judge_pairs(estimates, values, HEADLINES, level=level, margin=margin)
    failed = tuple(
        (name, each["meta"]["seed"], each["meta"]["outcome"]["kind"])
        for row in summaries
        for name, each in zip(names, row, strict=True)
        if each["meta"]["outcome"]["kind"] != "finished"
    )
    return Comparison(names, "seeds", varied, (), 0, level, margin, values, verdicts, failed)


def pairs_of(values: Mapping[str, Any], number: int) -> list[Pair]:
    """Pairs to compare: every configuration with the first, in headline figures all with all."""
    return [
        Pair(key, first, other)
        for key in values
        for first in range(number if key in HEADLINES else 1)
        for other in range(first + 1, number)
    ]


def estimate_of(
    metric: Metric, first: Values, other: Values, pick: Callable[..., Estimate] | None = None
) -> Estimate | None:
    """The difference in a figure, of the same seeds; None if a run lacks it, or of one seed alone.

    `pick`: how to estimate it, if not as the mean of the pairs.
    """
    import numpy as np

    if len(first) < 2 or None in first or None in other:
        return None
    one, two = np.array(first, dtype=float), np.array(other, dtype=float)
    if pick is not None:
        return pick(one, two, whole=metric.whole)
    return paired(one, two, whole=metric.whole, percentile=metric.extreme)


def _common(key: str, configs: Configs) -> Any:
    """The value of a setting that all configurations must share."""
    if len({getattr(config, key) for _, config in configs}) > 1:
        texts = ", ".join(f"{name} {getattr(config, key)}" for name, config in configs)
        raise ConfigError(f"{key}: {texts}; give all configurations the same")
    return getattr(configs[0][1], key)


def _takes_seed(config: RunConfig) -> bool:
    """Whether a policy of the user's own is given the seed, and may draw from it."""
    given = {
        "engine": config.engine,
        "victim": config.victim,
        "block_manager": config.block_manager,
        "cost": config.cost.get("model"),
        "requeue": config.scheduler_args.get("requeue"),
        "eviction": config.block_manager_args.get("eviction"),
    }
    own = {key: name for key, name in given.items() if isinstance(name, str) and ":" in name}
    return any(takes(key, look_up(key, {}, name), "seed") for key, name in own.items())


_DRAWN: Mapping[str, Callable[[RunConfig], bool]] = {
    "arrivals": lambda c: bool(c.request_rate and not isinf(c.request_rate + c.burstiness)),
    "arrivals within recorded instants": lambda c: c.request_rate is None and c.spread_ties,
    "victims": lambda c: c.victim == "random",
    "which drafts are accepted": draws_acceptance,
    "the draws of your own policies": _takes_seed,
    "kernel times, within the errors of their profile": (
        lambda c: c.cost.get("model") == "uncertain"
    ),
}
"""What differs from seed to seed → whether a configuration draws it."""


def _kept(first: int, result: Any) -> tuple[Summary, Any]:
    """The summary, and for the first seed the whole result."""
    summary = result.summary
    return summary, result if summary["meta"]["seed"] == first else None


def _run(
    simulate: Simulate, reduce: Callable[[Any], T], command: str, load: Load, config: RunConfig
) -> T:
    return reduce(simulate(load.of(config.seed), config, command=command))


EFFECTS = ("p50_ttft_ms", "p99_ttft_ms", "num_preemptions", "prefix_cache_hit_rate")
"""Figures in which a change may have an effect."""
_BY_THE_POOL = ("gpu_memory_utilization", "vllm_version")
"""Settings that are no changes of their own: they make the pool, or are the upgrade."""


class Undone(RunConfig, frozen=True, kw_only=True):
    """The settings of the later release, with one change undone."""

    switched: tuple[str, ...] = ()
    """The rule that decides as before, if it is one."""


class Change(NamedTuple):
    """One thing that an upgrade changes."""

    words: str
    undone: Undone


def of_releases(name: str, config: RunConfig) -> list[tuple[str, RunConfig]]:
    """A configuration under each release that its `vllm_version` lists, by name."""
    versions = dict.fromkeys((config.vllm_version or "").split(","))
    if len(versions) == 1:
        return [(name, config)]
    return [(f"{name} vLLM {v}".strip(), replace(config, vllm_version=v)) for v in versions]


def upgrades(configs: Configs) -> list[tuple[tuple[str, str], list[Change]]]:
    """The upgrades among neighbours: the names of a run and of the same one under another release,
    and what that changes. Raises `ConfigError` for an engine without releases."""
    found = []
    for (name, before), (other, after) in pairwise(configs):
        if before != after and before == replace(after, vllm_version=before.vllm_version):
            found.append(((name, other), changes(before, after)))
    return found


def changes(before: RunConfig, after: RunConfig) -> list[Change]:
    """What an upgrade changes for a run: defaults, the pool and rules that are at work. Raises
    `ConfigError` for an engine without releases."""
    one, other = assemble(before), assemble(after)
    if not (isinstance(one.blocks, KVCacheManager) and isinstance(other.blocks, KVCacheManager)):
        raise ConfigError(f"vllm_version: {after.engine} is one release; leave the others out")
    # The pool of the later release stays, as its size is a change of its own.
    pool = {"num_gpu_blocks_override": other.memory.num_gpu_blocks}
    given = to_table(after)
    keys = [key for key in RunConfig.__struct_fields__ if key not in _BY_THE_POOL]
    settings = _differing(one.config, other.config, keys)
    found = []
    for key in settings:
        was, now = getattr(one.config, key), getattr(other.config, key)
        words = f"{key} {setting_words(now)}, was {setting_words(was)}"
        found.append(Change(words, Undone(**{**given, **pool, key: was})))
    if one.memory.num_gpu_blocks != other.memory.num_gpu_blocks:
        was = one.memory.num_gpu_blocks
        words = f"{other.memory.num_gpu_blocks:,} GPU blocks, were {was:,}"
        found.append(Change(words, Undone(**{**given, "num_gpu_blocks_override": was})))
    for name in _differing(one.blocks.release, other.blocks.release, RULES):
        rule = RULES[name]
        # The default of an option that came with the rule is among the settings above.
        told = rule.introduces and rule.option in settings
        if not told and _at_work(rule, other.config):
            words = f"{rule.about} ({rule.written()})"
            found.append(Change(words, Undone(**given, switched=(name,))))
    return found


def _differing(one: object, other: object, names: Iterable[str]) -> list[str]:
    """The attributes that two objects have with different values."""
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _at_work(rule: Rule, config: RunConfig) -> bool:
    """Whether a rule decides anything under these settings."""
    return not rule.option or getattr(config, rule.option) not in (None, IDLE.get(rule.option))


def simulate_undone(trace: Trace, config: Undone, *, command: str = "") -> Result:
    """Replays a trace with a change undone."""
    parts_of = partial(assemble, switched=config.switched)
    return simulate(trace, config, command=command, parts_of=parts_of)


def effect_words(
    found: list[Change], without: list[dict[str, Any]], after: dict[str, Any]
) -> Iterator[str]:
    """A sentence on each change that has an effect, then one on all others.

    `without`: the summary of the run without each change; `after`: that of the upgrade.
    """
    idle = []
    for change, summary in zip(found, without, strict=True):
        rows = compare_table([("without", summary), ("after", after)])
        effects = [
            f"{row.metric.label} {value_words(row, 1)}, and {value_words(row, 0)} with that undone"
            f" ({change_words(row, 0)})"
            for row in rows
            if row.metric.key in EFFECTS and row.judge(0) != "same"
        ]
        if effects:
            yield f"{change.words}: {'; '.join(effects)}."
        else:
            idle.append(change.words)
    if idle:
        yield f"No effect on {', '.join(NAMED[key].label for key in EFFECTS)}: {'; '.join(idle)}."
    if not found:
        yield "Nothing that is at work in this run changed."
