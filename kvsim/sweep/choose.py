"""Joins the seeds of each configuration and ranks the configurations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from kvsim.report.load import OVERLOADED, rates_words, state_of
from kvsim.report.metrics import METRICS, Metric
from kvsim.report.numerals import count, plural, show
from kvsim.report.wording import Remark, time_source
from kvsim.sweep.grid import Settings
from kvsim.sweep.points import REFUSED
from kvsim.sweep.records import Record
from kvsim.sweep.slo import Objectives, parse_slo
from kvsim.sweep.sweep import Outcome, Plan
from kvsim.sweep.table import reason

BLOCKS = Metric("num_gpu_blocks", "GPU blocks", "blocks", "lower", "Memory")
"""A figure of the engine that sweeps compare beside those of a summary."""

LOADS = frozenset(("request_rate", "time_scale", "max_concurrency"))
"""Settings that change the load on the engine."""

_NAMED = {metric.key: metric for metric in METRICS}
TTFT, TPOT = _NAMED["p99_ttft_ms"], _NAMED["p99_tpot_ms"]
THROUGHPUT, PREEMPTIONS = _NAMED["output_throughput"], _NAMED["num_preemptions"]


class Configuration(NamedTuple):
    """The runs of one combination of settings, one per seed."""

    number: int
    """From 1, in the order of the sweep."""
    settings: Settings
    records: Sequence[Record]
    figures: dict[str, float]
    """Means over the seeds of the figures that every seed defines; empty if a run did not
    finish."""
    met: int
    """Seeds on which all objectives are met."""
    load: float
    """Load of the tightest objective on the worst seed: 1 is its limit; inf if a run did not
    finish."""

    @property
    def outcome(self) -> str:
        """`finished`, or the outcome of the first run that did not finish."""
        kinds = [str(record["outcome"]["kind"]) for record in self.records]
        return next((kind for kind in kinds if kind != "finished"), "finished")

    @property
    def reason(self) -> str:
        """The reason of that outcome, in words; empty if all runs finished."""
        return next(filter(None, map(reason, self.records)), "")

    @property
    def overloaded(self) -> bool:
        """Whether the engine did not keep up on some seed."""
        finished = (each for each in self.records if each["outcome"]["kind"] == "finished")
        return any(state_of(record["figures"]) == OVERLOADED for record in finished)

    @property
    def meets(self) -> bool:
        """Whether every seed meets all objectives."""
        return self.met == len(self.records)


class Chosen(NamedTuple):
    """A sweep with its configurations ranked."""

    configurations: list[Configuration]
    objectives: Objectives | None
    metrics: tuple[Metric, ...]
    """The figures to show first: those with objectives, latency, throughput, blocks."""
    by_blocks: bool
    """Whether the configurations have different numbers of GPU blocks."""
    best: list[Configuration]
    """Ranked configurations, best first; all finished and, if there are objectives, meet them."""
    rule: str
    """The rule of the ranking, in words."""
    verdict: list[Remark]


def choose(plan: Plan, outcomes: Sequence[Outcome]) -> Chosen:
    """Rank the configurations of a sweep.

    With objectives, only configurations that meet all of them on every seed are ranked. The highest
    throughput is first if the load is varied; else the fewest blocks, if their number varies; else
    the farthest from any limit. Without objectives, the ranking is the Pareto front of TTFT and
    throughput.
    """
    objectives = None if plan.slo is None else parse_slo(plan.slo)
    configurations = joined(outcomes, objectives)
    by_blocks = len({c.figures[BLOCKS.key] for c in configurations if c.figures}) > 1
    bound = () if objectives is None else objectives.metrics
    blocks = [BLOCKS] if by_blocks and "num_gpu_blocks_override" not in plan.axes else []
    metrics = tuple(dict.fromkeys([*bound, TTFT, TPOT, THROUGHPUT, PREEMPTIONS, *blocks]))
    best, rule = _ranked(plan, configurations, objectives, by_blocks)
    verdict = _verdict(configurations, objectives, best)
    return Chosen(configurations, objectives, metrics, by_blocks, best, rule, verdict)


def pareto(
    configurations: Sequence[Configuration], one: Metric, other: Metric
) -> list[Configuration]:
    """The Pareto front of two figures, in order of `one`; of equal configurations, the first stays.

    No other configuration is better in one of the figures without being worse in the other.
    """

    def costs(configuration: Configuration) -> tuple[float, float]:
        pair = (configuration.figures[one.key], one), (configuration.figures[other.key], other)
        a, b = (-value if metric.better == "higher" else value for value, metric in pair)
        return a, b

    defined = [c for c in configurations if {one.key, other.key} <= c.figures.keys()]
    front: list[Configuration] = []
    for configuration in sorted(defined, key=costs):
        if not front or costs(configuration)[1] < costs(front[-1])[1]:
            front.append(configuration)
    return sorted(front, key=lambda configuration: configuration.figures[one.key])


def sources(groups: Iterable[Sequence[Record]]) -> list[tuple[str, bool]]:
    """The sources of the runs' step times, each once, and whether each is measured."""
    costs = (r["time_source"] for group in groups for r in group if "time_source" in r)
    return list({time_source({"cost": c}): c["kind"] == "measured" for c in costs}.items())


def words(settings: Settings) -> str:
    """`watermark 0.05 · preemption_mode swap`."""
    return " · ".join(f"{key} {value_words(value)}" for key, value in settings.items()) or "base"


def value_words(value: Any) -> str:
    """A setting's value as in a configuration file, but without quotes."""
    if value is None:
        return "default"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def joined(outcomes: Sequence[Outcome], objectives: Objectives | None) -> list[Configuration]:
    """The configurations of these points, each with all its seeds, in order of first appearance."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(json.dumps(outcome.settings), []).append(outcome)
    made = []
    for number, group in enumerate(groups.values(), 1):
        records = [outcome.record for outcome in group]
        met, load = len(records), 0.0
        if objectives is not None:
            met = sum(map(objectives.met, records))
            load = max(map(objectives.load, records))
        made.append(Configuration(number, group[0].settings, records, _means(records), met, load))
    return made


def _means(records: Sequence[Record]) -> dict[str, float]:
    if any(record["outcome"]["kind"] != "finished" for record in records):
        return {}
    tables = [{**record["figures"], BLOCKS.key: _blocks(record)} for record in records]
    return {
        key: fmean(table[key] for table in tables)
        for key in tables[0]
        if all(table[key] is not None for table in tables)
    }


def _blocks(record: Record) -> int:
    return int(record["engine"]["num_gpu_blocks"])


def _ranked(
    plan: Plan,
    configurations: Sequence[Configuration],
    objectives: Objectives | None,
    by_blocks: bool,
) -> tuple[list[Configuration], str]:
    if objectives is None:
        return pareto(configurations, TTFT, THROUGHPUT), (
            "No other configuration has both a lower TTFT p99 and a higher throughput."
        )
    meeting = [configuration for configuration in configurations if configuration.meets]
    said = "Of those that meet all objectives on every seed, "
    if LOADS & set(plan.axes):
        key = THROUGHPUT.key
        return sorted(meeting, key=lambda c: (-c.figures[key], c.number)), (
            f"{said}the highest throughput first."
        )
    if by_blocks:
        return sorted(meeting, key=lambda c: (c.figures[BLOCKS.key], c.load, c.number)), (
            f"{said}the fewest GPU blocks first, then the farthest from its limits."
        )
    return sorted(meeting, key=lambda c: (c.load, c.number)), (
        f"{said}the farthest from its limits first."
    )


def _verdict(
    configurations: Sequence[Configuration],
    objectives: Objectives | None,
    best: Sequence[Configuration],
) -> list[Remark]:
    number, remarks = len(configurations), []
    if objectives is not None:
        bounds = " and ".join(map(str, objectives.each))
        text = f"{count(len(best))} of {plural(number, 'configuration')} meet {bounds}."
        remarks.append(Remark(text, "plain" if best else "bad"))
        if not best:
            remarks += _nearest_miss(configurations)
    if best:
        first = best[0]
        figures = ", ".join(
            f"{metric.label} {show(first.figures[metric.key], metric.unit)}"
            for metric in (TTFT, TPOT, THROUGHPUT)
            if metric.key in first.figures
        )
        figures += f"; {rates_words(first.figures)}"
        name = "Best" if objectives is not None else "Lowest TTFT p99"
        remarks.append(Remark(f"{name}: {words(first.settings)} ({figures})."))
    behind = sum(configuration.overloaded for configuration in configurations)
    if behind:
        text = f"Overloaded in {plural(behind, 'configuration')}: more was offered than served."
        remarks.insert(0, Remark(text, "warning"))
    refused = sum(configuration.outcome == REFUSED for configuration in configurations)
    ended = sum(c.outcome not in (REFUSED, "finished") for c in configurations)
    if refused:
        remarks.append(
            Remark(f"{plural(refused, 'configuration')} refused at start-up.", "warning")
        )
    if ended:
        text = f"The engine stopped before the end in {plural(ended, 'configuration')}."
        remarks.append(Remark(text, "bad"))
    return remarks


def _nearest_miss(configurations: Sequence[Configuration]) -> list[Remark]:
    finished = [c for c in configurations if c.load < float("inf")]
    if not finished:
        return []
    nearest = min(finished, key=lambda configuration: configuration.load)
    over = f"{100 * (nearest.load - 1):.0f} %"
    return [Remark(f"Nearest: {words(nearest.settings)}, {over} beyond a limit on a seed.")]
