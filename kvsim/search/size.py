"""Tries values of a knob, each on the same seeds, until the answer has no untried neighbour.

A knob is the setting to search, with the values to try first, and what counts as the answer. The
load that a search is about is made here, too: longer, or with prefixes that are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product, takewhile
from math import inf, log
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from kvsim.errors import ConfigError, check_choice
from kvsim.explain.certainty import LEVEL, paired
from kvsim.fleet.settings import FleetConfig, make_settings, parted
from kvsim.machine.memory import pool_setting
from kvsim.results.metrics import Metric
from kvsim.run.assembly import assemble
from kvsim.search.compare import Load, redrawn
from kvsim.search.runner import REFUSED, Backend, run_local, run_missing
from kvsim.search.slo import Objectives
from kvsim.search.store import Store, address
from kvsim.search.sweep import Configuration, joined
from kvsim.settings.config import RunConfig, make_config
from kvsim.workload.spec import assume_hit_rate
from kvsim.workload.trace import Trace, beginning, repeated

Goal = Literal["least", "most", "best"]

_PLENTY = 1 << 40
"""A number of blocks with which every engine starts."""
_LADDER = 1.5
"""Ratio of neighbouring values at first."""
_WATERMARKS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
_FEW_REPLICAS, _MOST_REPLICAS = (1, 2, 4), 1024
_CHUNK_GRAIN = 64
"""Token budgets are multiples of this, and so of all usual block sizes."""

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


class Knob(NamedTuple):
    """A setting to be searched."""

    key: str
    goal: Goal
    """The least or the highest value that keeps the objectives, or the best value of all."""
    ladder: tuple[float, ...]
    """Values to try first, ascending."""
    snap: Callable[[float], float]
    """Rounds to the nearest value that differs from others."""
    unit: str
    low: float
    high: float
    """Bounds of the search."""
    grows: bool = False
    """Whether the ladder may be extended beyond its end."""
    grain: float = 0.0
    """Values that differ by no more are close, however small they are."""

    @property
    def name(self) -> str:
        """What is searched, in words."""
        return "number of replicas" if self.key == "replicas" else self.key

    def between(self, low: float, high: float) -> float | None:
        """A value between two others; None if there is none."""
        # The mean ratio; where rounding makes it an end, the mean may still lie between.
        middle = self.snap(math.sqrt(low * high) if low > 0 else (low + high) / 2)
        if low < middle < high:
            return middle
        middle = self.snap((low + high) / 2)
        return middle if low < middle < high else None

    def shifted(self, value: float, share: float) -> float:
        """The value changed by a share of itself, within the bounds."""
        return min(max(self.snap(value * (1 + share)), self.low), self.high)

    def safer(self, value: float, share: float) -> float:
        """The value changed by a share of itself, or to the next one, towards the safe end."""
        if self.goal == "most":
            return self.shifted(value, -share)
        return max(self.shifted(value, share), self.snap(value + self.grain))


class Bounds(NamedTuple):
    """Where to search; None stands for the knob's own ends."""

    low: float | None = None
    high: float | None = None

    def within(self, low: float, high: float) -> tuple[float, float]:
        """Where to search, if these are the knob's own ends."""
        return low if self.low is None else self.low, high if self.high is None else self.high


def open_arrivals(config: RunConfig) -> RunConfig:
    """The configuration under which a rate can be searched: every request comes at its time.

    Clients that wait for a reply send less to a server that is slow, so no rate would be too high.
    Raises `ConfigError` where such clients are asked for.
    """
    if config.max_concurrency is not None:
        raise ConfigError(
            "--find request_rate: with max_concurrency, requests wait outside the server, so no"
            " rate is too high; leave it out"
        )
    if config.sessions == "closed":
        raise ConfigError(
            "--find request_rate: closed sessions wait for replies and send less than the rate;"
            " use --sessions recorded"
        )
    return msgspec.structs.replace(config, sessions="recorded")


def make_knob(name: str, trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    """The knob with a name of `KNOBS`, for a trace and the settings that stay fixed.

    Raises `ConfigError` for an unknown name, for a setting that would make the knob ineffective,
    for bounds that the setting does not take, and for those with no value between them.
    """
    check_choice("--find", name, KNOBS)
    for given in bounds:
        if given is not None and not 0 <= given < math.inf:
            raise ConfigError(f"--from and --to: {given:g} is not a number above 0")
    knob = KNOBS[name](trace, base, bounds)
    knob = knob._replace(low=knob.snap(knob.low), high=knob.snap(knob.high))
    for option, given in (("--from", bounds.low), ("--to", bounds.high)):
        if given is not None:
            make_settings({**base, knob.key: knob.snap(given)}, option)
    if not knob.low < knob.high:
        raise ConfigError(
            f"--find {name}: nothing between {knob.low:g} and {knob.high:g}; set --from and --to"
        )
    return knob


def _blocks(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    """From the fewest blocks with which the engine starts to as many as the base has."""
    _, engine = parted(base)
    parts = assemble(make_config({**engine, "num_gpu_blocks_override": _PLENTY}))
    assert isinstance(parts.config.max_model_len, int) and parts.config.block_size is not None
    # An engine does not start unless one request of the longest length fits.
    fewest = -(-parts.config.max_model_len // parts.config.block_size)
    most = inf
    if bounds.high is None:
        most = float(assemble(make_config(engine)).memory.num_gpu_blocks)
    ends = bounds.within(fewest, most)
    ladder = _geometric(*ends, round)
    return Knob("num_gpu_blocks_override", "least", ladder, round, "blocks", *ends)


def _utilization(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    decides = pool_setting(make_config(parted(base)[1]))
    if decides != "gpu_memory_utilization":
        raise ConfigError(
            f"--find gpu_memory_utilization: has no effect beside {decides}; leave that out, or use"
            " --find num_gpu_blocks"
        )

    low, high = bounds.within(0.05, 0.99)
    ladder = tuple(_thousandths(low + (high - low) * k / 12) for k in range(13))
    return Knob("gpu_memory_utilization", "least", ladder, _thousandths, "share", low, high)


def _rate(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    """Around the rate of the base or the trace, and further as needed."""
    centre = _rate_of(trace, base)
    low, high = bounds.within(centre / 1024, centre * 1024)
    steps = (centre * 2.0**k for k in range(-3, 4))
    ladder = tuple(_figures(rate) for rate in steps if low <= rate <= high)
    if bounds != Bounds() or len(ladder) < 2:
        ladder = tuple(dict.fromkeys((_figures(low), *ladder, _figures(high))))
    return Knob("request_rate", "most", ladder, _figures, "requests/s", low, high, grows=True)


def _replicas(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    """From one replica, as far up as needed."""
    low, high = bounds.within(1, _MOST_REPLICAS)
    ladder = _FEW_REPLICAS if bounds == Bounds() else _geometric(low, high, round)
    return Knob("replicas", "least", ladder, round, "replicas", low, high, grows=True, grain=1.0)


def _watermark(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    low, high = bounds.within(_WATERMARKS[0], _WATERMARKS[-1])
    inner = [each for each in _WATERMARKS if low <= each <= high]
    ladder = tuple(sorted({_thousandths(low), *inner, _thousandths(high)}))
    return Knob("watermark", "best", ladder, _thousandths, "share", low, high)


def _offload(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    """From a tier of hardly any use to one larger than a server's memory."""
    ends = bounds.within(1.0, 1024.0)
    ladder = _geometric(*ends, _figures)
    return Knob("kv_offloading_size", "least", ladder, _figures, "GiB", *ends)


def _chunk(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    ends = bounds.within(128, 16384)
    ladder = _geometric(*ends, _grains)
    return Knob("max_num_batched_tokens", "best", ladder, _grains, "tokens", *ends)


def _seqs(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    ends = bounds.within(1, min(1024, len(trace.rows)))
    return Knob("max_num_seqs", "best", _geometric(*ends, round), round, "", *ends)


KNOBS: dict[str, Callable[[Trace, Mapping[str, Any], Bounds], Knob]] = {
    "num_gpu_blocks": _blocks,
    "gpu_memory_utilization": _utilization,
    "kv_offloading_size": _offload,
    "request_rate": _rate,
    "replicas": _replicas,
    "watermark": _watermark,
    "max_num_batched_tokens": _chunk,
    "max_num_seqs": _seqs,
}
"""Values of `--find`."""

LASTING = "request_rate", "replicas"
"""Knobs whose answer has to hold for a load without end."""


def _thousandths(value: float) -> float:
    return round(value, 3)


def _figures(value: float) -> float:
    return float(f"{value:.3g}")


def _grains(value: float) -> float:
    return max(1, round(value / _CHUNK_GRAIN)) * _CHUNK_GRAIN


def _geometric(low: float, high: float, snap: Callable[[float], float]) -> tuple[float, ...]:
    """Values of about the same ratio, both ends included."""
    if not 0 < low < high:
        return snap(low), snap(high)
    steps = max(1, math.ceil(math.log(high / low) / math.log(_LADDER)))
    values = (snap(low * (high / low) ** (k / steps)) for k in range(steps + 1))
    return tuple(takewhile(lambda value: value <= high, dict.fromkeys(values)))


def _rate_of(trace: Trace, base: Mapping[str, Any]) -> float:
    given = base.get("request_rate")
    if given is not None and 0 < given < math.inf:
        return float(given)
    times = [row.arrival_ns for row in trace.rows if row.arrival_ns is not None]
    if len(times) > 1 and times[-1] > times[0]:
        return (len(times) - 1) * 1e9 / (times[-1] - times[0])
    return 1.0


_AT_RANDOM = (
    "the turns of sessions are sent at random times like all requests; none waits for the one"
    " before it"
)

Made = tuple[Trace, RunConfig, list[str]]
"""A load, its configuration, and what to say of them."""


def endless(trace: Trace, config: RunConfig, find: str) -> Made:
    """The load of a search whose answer has to last, which will be made longer. With open arrivals,
    where there is a rate and no client waits."""
    notes, waits = list[str](), config.sessions == "closed" or config.max_concurrency is not None
    if find == "request_rate" or (config.request_rate is not None and not waits):
        if config.sessions == "auto" and any(row.after >= 0 for row in trace.rows):
            notes.append(_AT_RANDOM)
        config = open_arrivals(config)
    shorter = beginning(trace, config.num_prompts)
    return shorter, msgspec.structs.replace(config, num_prompts=None), notes


def sharing(trace: Trace, config: RunConfig, hit_rate: float, prefixes: int) -> Made:
    """The trace with assumed prefixes, and a configuration with the cache that they need."""
    if config.enable_prefix_caching is False:
        raise ConfigError("--hit-rate: prefix caching is off; leave out --no-enable-prefix-caching")
    config = msgspec.structs.replace(config, enable_prefix_caching=True)
    block_size = assemble(config).config.block_size
    assert block_size is not None
    shared = assume_hit_rate(trace, hit_rate, block_size, prefixes=prefixes, seed=config.seed)
    return shared, config, shared.notes[len(trace.notes) :]


def what_varies(trace: Trace, config: RunConfig, find: str) -> tuple[str, ...]:
    """What differs from seed to seed when a knob is searched."""
    if find == "request_rate":
        config = msgspec.structs.replace(config, request_rate=1.0)
    routed = ("the draws of the router",) if isinstance(config, FleetConfig) else ()
    return redrawn(Load(trace), [("", config)]) + routed


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
        configs = {at: self.settings(*at) for at in product(fresh, self.seeds)}
        keys = {at: address(config, self.trace) for at, config in configs.items()}
        run_missing(
            self.store,
            self.trace,
            {keys[at]: config for at, config in configs.items()},
            backend=self.backend,
            jobs=self.jobs,
            done=self.done,
        )
        runs = [({self.knob.key: at[0]}, self.store.load(keys[at]) or {}) for at in configs]
        found = joined(runs, self.objectives)
        if not self.tried and all(each.outcome == REFUSED for each in found):
            raise ConfigError(found[-1].reason)  # The knob is not the reason.
        self.tried |= {each.settings[self.knob.key]: each for each in found}

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


def find_boundary(lab: Laboratory) -> float | None:
    """The least (or highest) value such that it and all tried values beyond it keep the objectives.

    The search tries the ladder, then bisects, then tries the neighbours, which may move the answer.
    The result is None if no tried value keeps the objectives. Monotony is not assumed: a value on
    the wrong side that keeps them by luck does not count, and a value on the right side that breaks
    them moves the answer.
    """
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
        beside = [lab.knob.shifted(good, share) for share in lab.near]
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
    # A whole number moves by one at least.
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
            # Within less, both ends count as close, and more values would show no more.
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
    # The safe end is down where the highest value is sought, and up where the least is.
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


def find_cliff(tried: Tried, metric: Metric, grain: float = 0.0) -> Cliff | None:
    """The highest cliff of a figure among the tried values, ascending; None if there is none.

    A cliff is a change by `STEEP` times or more within a share `CLOSE` of the knob, or within
    `grain`. Of stretches with about the same height, the narrowest is taken.
    """
    found = [
        (abs(log(b / a)), (high - low) / high, (low, a), (high, b))
        for (low, one), (high, other) in combinations(tried, 2)
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

    @property
    def kept(self) -> float | None:
        """The value, if it keeps the objectives."""
        return self.value if self.meets else None


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
    again. Where it breaks the objectives there, it is moved until it does not. Should it then break
    them on the shorter load, which it may by chance, the search goes on beyond it.
    """
    # On the short load, and without neighbours: it only tells where the longer load is searched.
    rough = find_boundary(replace(lab, near=()))
    longest = len(lab.trace.rows) * LONGER**2
    if rough is None or longest > MOST_REQUESTS:
        return Search(lab, answer(lab, varies))
    lab = lab.longer(LONGER, rough)
    found = answer(lab, varies)
    while found.kept is not None:
        longer = lab.longer(LONGER, found.kept)
        value = find_beside(longer, found.kept)
        lab.look([value])
        if not lab.tried[value].meets:
            found = answer(lab, varies)
        elif longer.tried[value].meets:
            return Search(lab, found._replace(value=value, held=longest))
        else:
            unkept = found._replace(value=None, meets=False, held=longest, too_short=value)
            return Search(lab, unkept)
    return Search(lab, found)


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
    loads = {
        each: np.array([lab.objectives.load(record) for record in tried.records])
        for each, tried in lab.ascending
        if tried.meets == lab.tried[value].meets
    }
    best = loads.pop(value)
    return tuple(other for other, load in loads.items() if _alike(best, load))


def _alike(best: Any, other: Any) -> bool:
    if not np.isfinite(other).all():
        return False
    if len(best) == 1:
        return bool(best[0] == other[0])
    return paired(best, other, whole=False, percentile=True).p > LEVEL
