"""Tries values of a knob, each on the same seeds, until the answer has no untried neighbour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, log
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvsim.errors import ConfigError
from kvsim.explain.certainty import paired
from kvsim.results.metrics import Metric
from kvsim.search.runner import REFUSED, Backend, run_local, run_missing
from kvsim.search.size.knobs import LASTING, Knob
from kvsim.search.slo import Objectives
from kvsim.search.store import Store, address
from kvsim.search.sweep import Configuration, Outcome, joined
from kvsim.settings.config import RunConfig
from kvsim.workload.trace import Trace, repeated

NEIGHBOURS = (-0.2, -0.1, -0.05, -0.02, -0.01, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Distances from an answer to try, as shares of it."""
FEW_NEIGHBOURS = (-0.05, -0.01, 0.01, 0.05)
"""The distances to try where runs are long."""
CLOSE, STEEP = 0.05, 2.0
"""A figure that changes `STEEP` times within a share `CLOSE` of the knob falls off a cliff."""

MOVED = 0.01
"""Share of an answer by which it is moved at first where a longer load breaks the objectives, and
up to which the one that keeps them is found."""
_FASTER = 4
"""Factor by which the share grows each time."""
_MOST_TIMES = 2
"""Factor within which an answer is moved."""
_MOST_ROUNDS = 60
_REFINEMENTS = 4
_FURTHER, _FURTHER_NEARBY = 4.0, 1.5
"""Factors by which a ladder grows: at first, and around what a shorter load has found."""


@dataclass
class Laboratory:
    """Runs values of one knob on common random numbers and remembers the results."""

    trace: Trace
    base: RunConfig
    knob: Knob
    objectives: Objectives
    seeds: Sequence[int]
    store: Store
    backend: Backend = run_local
    jobs: int | None = None
    done: Callable[[int], None] = lambda number: None
    near: Sequence[float] = NEIGHBOURS
    further: float = _FURTHER
    """Factor by which the ladder of its knob grows."""
    tried: dict[float, Configuration] = field(default_factory=dict)
    """Tried configurations by value of the knob."""

    def look(self, values: Sequence[float]) -> None:
        """Run these values on every seed, unless they have been run.

        Raises `ConfigError` if the engine refuses all values of the first call.
        """
        fresh = [value for value in dict.fromkeys(values) if value not in self.tried]
        configs = {(v, seed): self.settings(v, seed) for v in fresh for seed in self.seeds}
        keys = {at: address(config, self.trace) for at, config in configs.items()}
        run_missing(
            self.store,
            self.trace,
            {keys[at]: config for at, config in configs.items()},
            backend=self.backend,
            jobs=self.jobs,
            done=self.done,
        )
        outcomes = [
            Outcome({self.knob.key: value}, seed, self.store.load(keys[value, seed]) or {})
            for value, seed in configs
        ]
        found = joined(outcomes, self.objectives)
        self._check(found)
        self.tried |= {each.settings[self.knob.key]: each for each in found}

    def _check(self, found: Sequence[Configuration]) -> None:
        """Raise the engine's refusal if it refuses all first values: the knob is not the reason."""
        if not self.tried and all(each.outcome == REFUSED for each in found):
            raise ConfigError(found[-1].reason)

    def longer(self, times: int, value: float) -> Laboratory:
        """A laboratory for the trace sent `times` over, to search around `value` in few runs."""
        knob = self.knob
        if knob.goal == "most":
            ladder = tuple(knob.shifted(value, share) for share in (-0.5, -0.3, -0.15, 0.0))
        else:
            ladder = tuple(max(knob.snap(value + d), knob.low) for d in (-knob.grain, 0.0))
        return replace(
            self,
            trace=repeated(self.trace, times),
            knob=knob._replace(ladder=ladder),
            near=FEW_NEIGHBOURS,
            further=_FURTHER_NEARBY,
            tried={},
        )

    @property
    def ascending(self) -> list[tuple[float, Configuration]]:
        """The tried configurations, by value."""
        return sorted(self.tried.items())

    def settings(self, value: float, seed: int) -> RunConfig:
        """The settings of a run."""
        changes: Mapping[str, Any] = {self.knob.key: value, "seed": seed}
        return msgspec.structs.replace(self.base, **changes)


def find_boundary(lab: Laboratory, near: Sequence[float] | None = None) -> float | None:
    """The least (or highest) value such that it and all tried values beyond it keep the objectives.

    The search tries the ladder, then bisects, then tries the neighbours, which may move the answer.
    The result is None if no tried value keeps the objectives. Monotony is not assumed: a value on
    the wrong side that keeps them by luck does not count, and a value on the right side that breaks
    them moves the answer. `near`: distances of the neighbours, if not those of the laboratory.
    """
    shares = lab.near if near is None else near
    lab.look(lab.knob.ladder)
    for _ in range(_MOST_ROUNDS):
        good, bad = boundary(lab)
        if lab.knob.grows and (good is None or bad is None):
            further = _further(lab, good is None)
            if further is not None:
                lab.look([further])
                continue
        if good is None:
            return None
        middle = None if bad is None else lab.knob.between(min(good, bad), max(good, bad))
        if middle is not None:
            lab.look([middle])
            continue
        beside = [lab.knob.shifted(good, share) for share in shares]
        if all(value in lab.tried for value in beside):
            return good
        lab.look(beside)
    return boundary(lab)[0]


def boundary(lab: Laboratory) -> tuple[float | None, float | None]:
    """(the last value that keeps the objectives, the first that does not), from the safe end."""
    tried = lab.ascending
    good: float | None = None
    for value, configuration in tried if lab.knob.goal == "most" else reversed(tried):
        if not configuration.meets:
            return good, value
        good = value
    return good, None


def find_beside(lab: Laboratory, start: float) -> float:
    """`start` if it keeps the objectives, or else the first value on its safe side that does, up to
    a share `MOVED`. It is sought in growing steps and then between the last two. If no value does
    within a factor `_MOST_TIMES`, the result is the last one that was tried.
    """
    knob, broken, value = lab.knob, start, start
    share = closest = max(MOVED, knob.grain / start)
    lab.look([value])
    while not lab.tried[value].meets and 1 / _MOST_TIMES < value / start < _MOST_TIMES:
        broken, value, share = value, knob.safer(value, share), share * _FASTER
        if value == broken:
            return value
        lab.look([value])
    while lab.tried[value].meets and abs(value - broken) > closest * start:
        middle = knob.between(min(broken, value), max(broken, value))
        if middle is None:
            return value
        lab.look([middle])
        broken, value = (broken, middle) if lab.tried[middle].meets else (middle, value)
    return value


def find_best(lab: Laboratory) -> float | None:
    """The value whose mean over the seeds is farthest from all limits; None if no run finished.

    The search tries the ladder, then the middles beside the best value, a few times over.
    """
    lab.look(lab.knob.ladder)
    for _ in range(_REFINEMENTS):
        best = _best(lab)
        if best is None:
            return None
        values = sorted(lab.tried)
        place = values.index(best)
        ends = values[max(place - 1, 0) : place + 2]
        middles = [lab.knob.between(low, high) for low, high in pairwise(ends)]
        lab.look([middle for middle in middles if middle is not None])
    return _best(lab)


def sharpen(lab: Laboratory, metric: Metric) -> None:
    """Halve the widest jump of a figure until it is narrow or gone."""
    for _ in range(_MOST_ROUNDS):
        wide = [
            (abs(log(b.figures[metric.key] / a.figures[metric.key])), low, high)
            for (low, a), (high, b) in pairwise(lab.ascending)
            if high - low > CLOSE / 2 * high
            and min(each.figures.get(metric.key, 0) for each in (a, b)) > 0
        ]
        jump, low, high = max(wide, default=(0.0, 0.0, 0.0))
        middle = lab.knob.between(low, high) if jump >= log(STEEP) else None
        if middle is None:
            return
        lab.look([middle])


def _best(lab: Laboratory) -> float | None:
    def rank(value: float) -> tuple[bool, float, float]:
        configuration = lab.tried[value]
        return not configuration.meets, lab.objectives.mean_load(configuration.records), value

    finished = [v for v, each in lab.tried.items() if lab.objectives.mean_load(each.records) < inf]
    return min(finished, key=rank, default=None)


def _further(lab: Laboratory, worse: bool) -> float | None:
    """The next value beyond the ladder: towards the safe end if no value keeps the objectives."""
    down = worse == (lab.knob.goal == "most")
    values = sorted(lab.tried)
    value = values[0] / lab.further if down else values[-1] * lab.further
    value = lab.knob.snap(value)
    inside = lab.knob.low <= value <= lab.knob.high
    return value if inside and value not in lab.tried else None


Tried = Sequence[tuple[float, Configuration]]

_MOST_OF_IT = 0.9
"""A narrower stretch replaces a cliff if it has at least this share of its height."""


class Cliff(NamedTuple):
    """Two close values of the knob with very different figures (means over the seeds)."""

    metric: Metric
    safe: float
    """The value with the better figure."""
    beyond: float
    figure: float
    """The figure at `safe`."""
    figure_beyond: float

    @property
    def times(self) -> float:
        """By how many times the figure grows, or shrinks."""
        ratio = self.figure_beyond / self.figure
        return max(ratio, 1 / ratio)

    @property
    def step(self) -> float:
        """From safe to beyond, as a share of the safe value."""
        return self.beyond / self.safe - 1

    def distance(self, value: float) -> float:
        """From a value of the knob to the safe edge, as a share of the value; 0: at the edge."""
        return self.safe / value - 1


def find_cliff(tried: Tried, metric: Metric, grain: float = 0.0) -> Cliff | None:
    """The highest cliff of a figure among the tried values, ascending; None if there is none.

    A cliff is a change by `STEEP` times or more within a share `CLOSE` of the knob, or within
    `grain`. Of stretches with about the same height, the narrowest is taken.
    """
    found = [
        (abs(log(b / a)), (high - low) / high, (low, a), (high, b))
        for i, (low, one) in enumerate(tried)
        for high, other in tried[i + 1 :]
        if 0 < high - low <= max(CLOSE * high, grain) and low > 0
        if (a := one.figures.get(metric.key, 0)) > 0
        if (b := other.figures.get(metric.key, 0)) > 0
        if abs(log(b / a)) >= log(STEEP)
    ]
    if not found:
        return None
    height = max(each[0] for each in found)
    *_, (low, a), (high, b) = min(
        (each for each in found if each[0] >= _MOST_OF_IT * height), key=lambda each: each[1]
    )
    rises = b > a
    if rises == (metric.better == "higher"):
        return Cliff(metric, high, low, b, a)
    return Cliff(metric, low, high, a, b)


def slope(tried: Tried, value: float, metric: Metric) -> float | None:
    """Change of a figure in per cent, for one per cent of the knob, around a value.

    It is measured between the tried values nearest to `CLOSE` on either side; None if a figure is
    missing or 0.
    """
    near = [each for each in tried if 0 < abs(each[0] - value) <= 1.2 * CLOSE * abs(value)]
    own = next((each for each in tried if each[0] == value), None)
    if own is None or not near:
        return None
    around = [own, *near]
    (low, one), (high, other) = min(around, key=itemgetter(0)), max(around, key=itemgetter(0))
    a, b = (each.figures.get(metric.key, 0) for each in (one, other))
    if not (a > 0 and b > 0 and low > 0):
        return None
    return log(b / a) / log(high / low)


LEVEL = 0.05
"""Error probability of statements that name a confidence."""

LONGER = 4
"""Factor by which the load is extended to test that a rate lasts."""
MOST_REQUESTS = 200_000
"""Most requests of an extended load."""

_SHARES = (-0.2, -0.1, -0.05, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Distances from an answer that a table of its neighbourhood shows, if they were tried."""
_WINDOW = 0.25
_MOST_ROWS = 12


class Answer(NamedTuple):
    """What a search found."""

    value: float | None
    """None if no tried value keeps the objectives, or no run finishes."""
    meets: bool
    cliffs: tuple[Cliff, ...]
    as_good: tuple[float, ...]
    """If the best value is sought: tried values without a significant difference from it."""
    varies: tuple[str, ...]
    """What differs from seed to seed, in words."""
    held: int = 0
    """Requests of the longer load on which it was tried, too; 0 if there was none."""
    too_short: float | None = None
    """Without a value: the one farthest to the safe side that holds for the shorter load only."""


class Search(NamedTuple):
    """A search and what it found."""

    lab: Laboratory
    found: Answer


def answer(lab: Laboratory, varies: Sequence[str]) -> Answer:
    """Search, and refine the jumps of the bounded figures, which may move the answer."""
    best = lab.knob.goal == "best"
    value = find_best(lab) if best else find_boundary(lab)
    metrics = lab.objectives.metrics
    for metric in metrics:
        sharpen(lab, metric)
    if not best and value != boundary(lab)[0]:
        value = find_boundary(lab)
    cliffs = (find_cliff(lab.ascending, metric, lab.knob.grain) for metric in metrics)
    return Answer(
        value,
        value is not None and lab.tried[value].meets,
        tuple(cliff for cliff in cliffs if cliff is not None),
        _as_good(lab, value) if best and value is not None else (),
        tuple(varies),
    )


def searched(lab: Laboratory, varies: Sequence[str]) -> Search:
    """The search as its knob asks for it. `varies`: what differs from seed to seed, in words."""
    if lab.knob.key in LASTING:
        return lasting_answer(lab, varies)
    return Search(lab, answer(lab, varies))


def lasting_answer(lab: Laboratory, varies: Sequence[str]) -> Search:
    """The answer that also holds under a longer load, and the laboratory that found it.

    A short load hides a queue that grows: it ends before the queue is long. So the search itself
    sends the trace `LONGER` times over, and the answer is tried on a load `LONGER` times as long
    again. Where it breaks the objectives there, it is moved until it does not.
    """
    rough = find_boundary(lab, ())
    longest = len(lab.trace.rows) * LONGER**2
    if rough is None or longest > MOST_REQUESTS:
        return Search(lab, answer(lab, varies))
    lab = lab.longer(LONGER, rough)
    found = answer(lab, varies)
    if found.value is None or not found.meets:
        return Search(lab, found)
    longer = lab.longer(LONGER, found.value)
    value = find_beside(longer, found.value)
    lab.look([value])
    if longer.tried[value].meets and lab.tried[value].meets:
        return Search(lab, found._replace(value=value, held=longest))
    return Search(lab, found._replace(value=None, meets=False, held=longest, too_short=value))


def neighbourhood(lab: Laboratory, value: float | None) -> Tried:
    """The tried values near an answer; all, thinned out, without an answer or for a best one."""
    tried = lab.ascending
    if value is None or lab.knob.goal == "best":
        return tried[:: 1 + len(tried) // (2 * _MOST_ROWS)]
    reach = max(_WINDOW * abs(value), lab.knob.grain)
    near = [each for each in tried if abs(each[0] - value) <= reach]
    place = [v for v, _ in near].index(value)
    picked = {v for v, _ in near[max(place - 1, 0) : place + 2]}
    for share in _SHARES:
        picked.add(min(near, key=lambda each: abs(each[0] - value * (1 + share)))[0])
    return [each for each in near if each[0] in picked]


def _as_good(lab: Laboratory, value: float) -> tuple[float, ...]:
    """Finished values without a significant paired difference to the best, ascending."""
    best = _loads(lab, value)
    return tuple(
        other
        for other, configuration in lab.ascending
        if other != value
        and configuration.meets == lab.tried[value].meets
        and _alike(best, _loads(lab, other))
    )


def _loads(lab: Laboratory, value: float) -> Any:
    return np.array([lab.objectives.load(record) for record in lab.tried[value].records])


def _alike(best: Any, other: Any) -> bool:
    if not np.isfinite(other).all():
        return False
    if len(best) == 1:
        return bool(best[0] == other[0])
    return paired(best, other, whole=False, percentile=True).p > LEVEL
