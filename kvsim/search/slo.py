"""Service-level objectives on a run: `p99_ttft<2s,p99_tpot<60ms`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.results.load import OVERLOADED, state_of
from kvsim.results.metrics import LATENCIES, NAMED, Metric
from kvsim.results.numerals import show
from kvsim.settings.config import nearest

ALIASES = {
    "hit_rate": "prefix_cache_hit_rate",
    "goodput": "request_goodput",
    "preemptions": "num_preemptions",
}
"""Short names of figures → their keys in a summary."""

_WRITTEN = re.compile(r"\s*([\w.]+)\s*(<=|>=|<|>)\s*([^<>=]+?)\s*")
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "min": 60e3}
_NUMBER = re.compile(r"([-+.\deE]+?)\s*(us|ms|s|min|%|)")


class Objective(NamedTuple):
    """A bound on one figure of a summary."""

    metric: Metric
    below: bool
    """Whether the limit is an upper bound."""
    limit: float
    """The limit in the unit of the metric."""
    strict: bool

    def met(self, figures: Mapping[str, Any]) -> bool:
        """Whether the figures of a run keep the bound."""
        value = self.value(figures)
        if value is None:
            return False
        if self.strict:
            return value < self.limit if self.below else value > self.limit
        return value <= self.limit if self.below else value >= self.limit

    def value(self, figures: Mapping[str, Any]) -> float | None:
        """The figure; a latency that no request has counts as 0, as it does for goodput."""
        value: float | None = figures.get(self.metric.key)
        if value is None and self.metric.unit == "ms" and figures.get("completed"):
            return 0.0
        return value

    def load(self, figures: Mapping[str, Any]) -> float:
        """How much of the limit is used: 1 is the limit, more is beyond it."""
        value = self.value(figures)
        if value is None:
            return math.inf
        part, whole = (value, self.limit) if self.below else (self.limit, value)
        # Where the divisor is 0: 1 at the limit, and infinitely far beyond it.
        return part / whole if whole else math.inf if part else 1.0

    def __str__(self) -> str:
        sign = ("<" if self.below else ">") + ("" if self.strict else "=")
        return f"{self.metric.label} {sign} {show(self.limit, self.metric.unit)}"


class Objectives(NamedTuple):
    """Bounds that must all hold."""

    text: str
    each: tuple[Objective, ...]
    steady: bool = False
    """Whether an overloaded run breaks them, because a longer one would."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The bounded figures, each once."""
        return tuple(dict.fromkeys(objective.metric for objective in self.each))

    def limit(self, metric: Metric) -> float | None:
        """The first limit of this figure; None if it has none."""
        return next((each.limit for each in self.each if each.metric.key == metric.key), None)

    def met(self, record: Mapping[str, Any]) -> bool:
        """Whether a run finished, served every request and keeps every bound.

        Unserved requests are in no percentile. So they count as breaking any bound, unless a bound
        on `completed` or `rejected` says how many are acceptable.
        """
        figures = record["figures"]
        return (
            record["outcome"]["kind"] == "finished"
            and (self._count_unserved() or figures["failed"] == 0)
            and not (self.steady and state_of(figures) == OVERLOADED)
            and all(objective.met(figures) for objective in self.each)
        )

    def load(self, record: Mapping[str, Any]) -> float:
        """Load of the bound nearest to its limit or farthest beyond; inf after another failure.

        At most 1 if all bounds are met, up to the difference between `<` and `<=`.
        """
        figures = record["figures"]
        if record["outcome"]["kind"] != "finished":
            return math.inf
        if figures["failed"] and not self._count_unserved():
            return math.inf
        return max((objective.load(figures) for objective in self.each), default=0.0)

    def met_by(self, records: Iterable[Mapping[str, Any]]) -> int:
        """How many of these runs, one for each seed, keep every bound."""
        return sum(map(self.met, records))

    def mean_load(self, records: Iterable[Mapping[str, Any]]) -> float:
        """Load of the tightest bound, on the mean of these runs; 1 is its limit."""
        return fmean(map(self.load, records))

    def _count_unserved(self) -> bool:
        return any(each.metric.key in ("completed", "rejected") for each in self.each)


def parse_slo(text: str) -> Objectives:
    """Bounds between commas: a figure of `summary.json`, `<`, `<=`, `>` or `>=`, and a limit.

    Endings `_ms` and `_s` of the figure may be left out; limits in time need a unit: us, ms, s or
    min. Raises `ConfigError`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"--slo {text!r}: expected p99_ttft<2s,p99_tpot<60ms or the like")
    objectives = tuple(_objective(f"--slo {part}", part) for part in parts)
    seen = [(objective.metric.key, objective.below) for objective in objectives]
    for place, pair in enumerate(seen):
        if pair in seen[:place]:
            raise ConfigError(f"--slo {parts[place]}: {pair[0]} is bounded twice on this side")
    return Objectives(text, objectives)


def metric_of(where: str, name: str) -> Metric:
    """The metric with this name. Raises `ConfigError` with the nearest name."""
    named = known_metrics()
    key = ALIASES.get(name, name)
    if key in named:
        return named[key]
    if name in LATENCIES:
        raise ConfigError(f"{where}: which {name}? say mean_{name}, p50_{name}, p99_{name}, ...")
    raise ConfigError(
        f"{where}: no figure {name!r};{nearest(name, [*named, *ALIASES])}"
        " summary.json of a run lists them all"
    )


def known_metrics() -> dict[str, Metric]:
    """Figures that can be bounded, by key and by key without its unit."""
    further = [
        Metric(f"p95_{kind}_ms", f"{label} p95", "ms", "lower", "Latency")
        for kind, label in LATENCIES.items()
    ]
    named = NAMED | {metric.key: metric for metric in further}
    short: Iterable[tuple[str, Metric]] = (
        (key.removesuffix("_ms").removesuffix("_s"), metric) for key, metric in named.items()
    )
    return dict(short) | named


def _objective(where: str, text: str) -> Objective:
    written = _WRITTEN.fullmatch(text)
    if written is None:
        raise ConfigError(f"{where}: expected FIGURE<LIMIT or FIGURE>LIMIT, as in p99_ttft<2s")
    name, sign, limit = written.groups()
    metric = metric_of(where, name)
    return Objective(metric, sign[0] == "<", _limit(where, metric, limit), len(sign) == 1)


def _limit(where: str, metric: Metric, text: str) -> float:
    parts = _NUMBER.fullmatch(text)
    try:
        number, unit = (float(parts[1]), parts[2]) if parts else (math.nan, "")
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{where}: {text!r} is not a limit; give a number, as in p99_ttft<2s")
    if metric.unit in ("ms", "s"):
        if unit not in _MS:
            raise ConfigError(f"{where}: a time needs a unit; write {text}ms or {text}s")
        return number * _MS[unit] / (1.0 if metric.unit == "ms" else 1e3)
    if unit == "%" and metric.unit == "share":
        return number / 100
    if unit:
        raise ConfigError(f"{where}: {metric.label} has no unit {unit!r}; write {parts[1]}")  # type: ignore[index]
    return number
