"""Tries the settings that matter for an engine, and says which of them help.

```
changes ─ one each ─► same seeds, verdicts ─► the helpful ones together ─► kvsim.search.advice
```
The figure that decides is the objective nearest to its limit, or farthest beyond it. A change helps
if the sample shows that it improves this figure by more than the margin, and the mean use of the
tightest limit falls. All verdicts hold together, as those of `kvsim compare` do.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from kvsim.engines import ENGINES
from kvsim.errors import ConfigError
from kvsim.explain import MARGIN, matters
from kvsim.explain.certainty import LEVEL, Finding, Look, Pair, Verdict, judge, plan_looks
from kvsim.explain.differences import compare_replay
from kvsim.machine.memory import pool_setting
from kvsim.run.assembly import Parts, assemble
from kvsim.run.result import Result
from kvsim.search.compare import HERE, How, Load, estimate_of, redrawn, replicate
from kvsim.search.runner import figures_of
from kvsim.search.slo import Objective, Objectives
from kvsim.search.store import Record
from kvsim.settings.config import RunConfig
from kvsim.settings.versions import Release, release


class Trial(Struct, frozen=True, forbid_unknown_fields=True):
    """A setting, and the values to try."""

    key: str
    values: tuple[Any, ...]
    why: str
    """What it trades."""
    engines: tuple[str, ...] = ()
    """Where it is tried; empty: on all."""
    since: Release = ()
    """The first release that was read with this setting."""
    caveat: str = ""
    """What a simulation cannot see. Such a change is shown, but never recommended with others."""


class Change(NamedTuple):
    """One setting of the base changed."""

    key: str
    value: Any
    trial: Trial
    config: RunConfig


class Untried(NamedTuple):
    """A change with which the engine does not start, or that means nothing."""

    key: str
    value: Any
    reason: str


_TABLE = tomllib.loads(Path(__file__).with_name("trials.toml").read_text("utf-8"))
TRIALS = msgspec.convert(_TABLE["trial"], tuple[Trial, ...])


def trials_on(engine: str) -> list[Trial]:
    """What is tried on an engine; on one of the user's own, what most have."""
    name = engine if engine in ENGINES else "other"
    return [trial for trial in TRIALS if not trial.engines or name in trial.engines]


def changes_of(base: RunConfig) -> tuple[list[Change], list[Untried]]:
    """The changes to try on these settings, and those that are not possible.

    Raises `ConfigError` where the engine does not start with the base itself.
    """
    parts = assemble(base)
    tried, untried = list[Change](), list[Untried]()
    for trial in trials_on(base.engine):
        for value in _values(trial, parts):
            try:
                config = changed(base, {trial.key: value})
            except ConfigError as error:
                untried.append(Untried(trial.key, value, str(error)))
            else:
                tried.append(Change(trial.key, value, trial, config))
    return tried, untried


def changed(base: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """The base with these settings, and its block count in the same bytes of memory.

    Raises `ConfigError` where the engine does not start with them.
    """
    decides = pool_setting(base)
    if "gpu_memory_utilization" in settings and decides != "gpu_memory_utilization":
        raise ConfigError(f"gpu_memory_utilization: {decides} decides instead")
    config = msgspec.structs.replace(base, **settings)
    memory = assemble(config).memory
    if base.num_gpu_blocks_override is None:
        return config
    pool_bytes = base.num_gpu_blocks_override * assemble(base).memory.block_bytes
    blocks = max(1, pool_bytes // memory.block_bytes)
    config = msgspec.structs.replace(config, num_gpu_blocks_override=blocks)
    assemble(config)
    return config


def _values(trial: Trial, parts: Parts) -> Iterator[Any]:
    """The values that are not in force already, of a setting that the release has."""
    version = release(parts.config.vllm_version)
    if version and version < trial.since:
        return
    now = getattr(parts.config, trial.key)
    if now is None and trial.key in parts.assumed:
        now = parts.assumed[trial.key].value
    # Less memory for blocks helps nothing.
    higher = trial.key == "gpu_memory_utilization"
    for value in trial.values:
        if value != now and not (higher and value < now):
            yield value


SEEDS = 8
MOST_COMBINED = 4
"""Most changes that are put together."""
_SINGLES = 0.8
"""Part of the chance of error for single changes; those put together share the rest."""


@dataclass
class Tried:
    """The base with some changes, and its runs."""

    changes: tuple[Change, ...]
    """None for the base itself."""
    config: RunConfig
    objectives: Objectives
    runs: list[Record] = field(default_factory=list)
    """One per seed, in the order of the seeds: `outcome` and `figures`, as objectives read them; of
    an exact replay `summary` and `requests`, too."""
    verdict: Verdict | None = None
    """The difference to the base in the figure that decides; None if a run lacks the figure."""

    @property
    def settings(self) -> dict[str, Any]:
        """The changed settings."""
        return {change.key: change.value for change in self.changes}

    @property
    def load(self) -> float:
        """The mean use of the tightest limit; inf if a run fails for another reason."""
        return self.objectives.mean_load(self.runs)

    @property
    def met(self) -> int:
        """On how many seeds all objectives are met."""
        return self.objectives.met_by(self.runs)

    @property
    def tightest(self) -> Objective:
        """The objective that uses most of its limit."""

        def use(objective: Objective) -> float:
            return fmean(objective.load(run["figures"]) for run in self.runs)

        return max(self.objectives.each, key=use)

    def mean(self, objective: Objective) -> float | None:
        """The mean of a bounded figure; None if a run lacks it."""
        values = self.values(objective)
        return None if None in values else fmean(each or 0.0 for each in values)

    def values(self, objective: Objective) -> list[float | None]:
        """A bounded figure, one per seed; None where the run did not finish."""
        return [
            objective.value(run["figures"]) if run["outcome"]["kind"] == "finished" else None
            for run in self.runs
        ]

    def helps(self, first: Tried, decides: Objective) -> bool:
        """Whether it is better than the first one."""
        verdict = self.verdict
        if verdict is None or verdict.finding != "significant":
            return False
        return (verdict.difference < 0) == decides.below and self.load < first.load


class Advice(NamedTuple):
    """What was tried, and what helps."""

    decides: Objective
    """The objective that is tightest with the base."""
    base: Tried
    singles: list[Tried]
    """Every change by itself."""
    untried: list[Untried]
    best: Tried
    """The changes that help, together; the base if none does."""
    redrawn: tuple[str, ...]
    """What differs from seed to seed, in words; empty for an exact replay."""
    planned: int
    """The most seeds; fewer were run if every verdict was settled before."""

    @property
    def objectives(self) -> Objectives:
        """What the settings are for."""
        return self.base.objectives

    def helps(self, tried: Tried) -> bool:
        """Whether a change by itself is better than the base."""
        return tried.helps(self.base, self.decides)


class _Bench(NamedTuple):
    """Where changes are tried."""

    load: Load
    seed: int
    """The first seed."""
    exact: bool
    how: How

    def run(self, tried: Sequence[Tried], seeds: int) -> None:
        """Run these on all the first `seeds` seeds on which they have not been run."""
        for done in sorted({len(each.runs) for each in tried}):
            group = [each for each in tried if len(each.runs) == done]
            configs, keep = [each.config for each in group], partial(_record, self.exact)
            numbers = range(self.seed + done, self.seed + seeds)
            for row in replicate(self.load, configs, numbers, keep, self.how):
                for each, run in zip(group, row, strict=True):
                    each.runs.append(run)

    def judge(
        self, first: Tried, others: Sequence[Tried], decides: Objective, level: float
    ) -> None:
        """Set the verdicts of `others` against `first`; together they spend `level`."""
        if self.exact:
            for other in others:
                other.verdict = _judge_replay(first, other, decides, level / len(others))
            return
        estimates, margins = {}, []
        for place, each in enumerate(others):
            # A change that was settled earlier has fewer seeds than the base.
            mine = tuple(first.values(decides)[: len(each.runs)])
            estimate = estimate_of(decides.metric, mine, tuple(each.values(decides)))
            if estimate is not None:
                estimates[place] = estimate
                margins.append(MARGIN * abs(float(np.array(mine, dtype=float).mean())))
        verdicts = judge(list(estimates.values()), margins, level)
        for place, verdict in zip(estimates, verdicts, strict=True):
            others[place].verdict = verdict


def advise(
    load: Load,
    config: RunConfig,
    objectives: Objectives,
    changes: tuple[list[Change], list[Untried]],
    *,
    seeds: int = SEEDS,
    how: How = HERE,
) -> Advice:
    """Try changes of a configuration, and put together those that help.

    A change is run on at most `seeds` seeds, and on fewer once its verdict is settled. Where
    nothing is random, one exact replay of each is compared. Raises `ConfigError` where the engine
    does not start, or where the base leaves requests unserved, so that no objective can be met.
    """
    varied = redrawn(load, [("", config)])
    bench, (tried, untried) = _Bench(load, config.seed, not varied, how), changes
    base = Tried((), config, objectives)
    singles = [Tried((change,), change.config, objectives) for change in tried]
    level = _SINGLES * LEVEL
    looks = plan_looks(seeds, level) if varied else [Look(1, level)]
    bench.run([base], looks[0].seeds)
    _check(base)
    decides = base.tightest
    unsettled = singles
    for look in looks:
        bench.run([base, *unsettled], look.seeds)
        _check(base)
        bench.judge(base, unsettled, decides, look.level)
        unsettled = [each for each in unsettled if each.verdict and not each.verdict.settled]
        if not unsettled:
            break
    planned = looks[-1].seeds
    advice = Advice(decides, base, singles, untried, base, varied, planned)
    return advice._replace(best=_combined(bench, advice))


def _combined(bench: _Bench, advice: Advice) -> Tried:
    """The best value of each setting that helps, added one by one while the next one helps, too."""
    base = advice.base
    helpful = [each for each in advice.singles if advice.helps(each)]
    helpful.sort(key=lambda each: each.load)
    by_key: dict[str, Tried] = {}
    for each in helpful:
        if not each.changes[0].trial.caveat:
            by_key.setdefault(each.changes[0].key, each)
    firm = list(by_key.values())[:MOST_COMBINED]
    if not firm:
        return base
    best, *others = firm
    # A share for each further change, and one for all of them against the base.
    level = (1 - _SINGLES) * LEVEL / (len(others) + 1)
    for other in others:
        changes = (*best.changes, *other.changes)
        try:
            config = changed(base.config, {each.key: each.value for each in changes})
        except ConfigError:
            continue  # The engine does not start with all of them.
        # What was tightest may no longer be, with the best changes so far.
        candidate, decides = Tried(changes, config, advice.objectives), best.tightest
        bench.run([best, candidate], len(base.runs))
        bench.judge(best, [candidate], decides, level)
        if candidate.helps(best, decides):
            best = candidate
    if best is not firm[0]:
        bench.judge(base, [best], advice.decides, level)
    # Each was judged against those before it: together they need not beat the base.
    best = best if advice.helps(best) else firm[0]
    bench.run([best], len(base.runs))
    return best


def _check(base: Tried) -> None:
    """Refuse a base whose runs do not finish, lack a figure, or leave requests unserved."""
    objectives = base.objectives
    for run in base.runs:
        figures, outcome = run["figures"], run["outcome"]
        if outcome["kind"] != "finished":
            raise ConfigError(
                f"advise: the run ends early with these settings: {outcome['explanation']};"
                f" {outcome['remedy']}"
            )
        for each in objectives.each:
            if each.value(figures) is None:
                raise ConfigError(
                    f"advise: --slo {each}: a run with these settings has no such figure; a goodput"
                    " needs limits, as in --goodput ttft:500"
                )
        each_use = [each.load(figures) for each in objectives.each]
        if objectives.load(run) == inf and inf not in each_use:
            raise ConfigError(
                f"advise: {figures['failed']} requests are not served with these settings, and"
                " --slo allows none; raise --max-model-len, or allow them, as in"
                f" --slo '{objectives.text},rejected<={figures['failed']}'"
            )


def _judge_replay(first: Tried, other: Tried, decides: Objective, level: float) -> Verdict | None:
    """The verdict on two exact replays; without an interval where the trace is too short for one.

    Then the difference is exact for this trace, and says nothing about other traffic.
    """
    before, after = first.mean(decides), other.mean(decides)
    if before is None or after is None:
        return None
    [mine], [theirs] = first.runs, other.runs
    runs = [("first", mine["summary"], mine["requests"])]
    runs.append(("other", theirs["summary"], theirs["requests"]))
    found = compare_replay(runs, level=level, margin=MARGIN)
    verdict = found.verdicts.get(Pair(decides.metric.key, 0, 1))
    if verdict is not None:
        return verdict
    change = after - before
    finding: Finding = "significant" if matters(change, before) else "equal"
    return Verdict(finding if change else "same", change, change, change, 0.0, level)


def _record(exact: bool, result: Result) -> Record:
    record = {"outcome": result.meta["outcome"], "figures": figures_of(result.figures)}
    # Exact replays are compared request by request.
    return record | {"summary": result.summary, "requests": result.requests} if exact else record
