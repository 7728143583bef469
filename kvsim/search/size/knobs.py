"""Knobs: the setting to search, the values to try first, and what counts as the answer.

The load that a search is about is made here, too: longer, or with prefixes that are assumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import msgspec

from kvsim.errors import ConfigError, check_choice
from kvsim.fleet.settings import FleetConfig, parted
from kvsim.machine.memory import pool_setting
from kvsim.run.assembly import assemble
from kvsim.search.replicates import Load, redrawn
from kvsim.settings.config import RunConfig, make_config
from kvsim.workload.spec import assume_hit_rate
from kvsim.workload.trace import Trace, beginning

Goal = Literal["least", "most", "best"]

_PLENTY = 1 << 40
"""A number of blocks with which every engine starts."""
_LADDER = 1.5
"""Ratio of neighbouring values at first."""
_WATERMARKS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
_FEW_REPLICAS, _MOST_REPLICAS = (1, 2, 4), 1024
_CHUNK_GRAIN = 64
"""Token budgets are multiples of this, and so of all usual block sizes."""


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
    and for bounds with no value between them.
    """
    check_choice("--find", name, KNOBS)
    for given in bounds:
        if given is not None and not 0 <= given < math.inf:
            raise ConfigError(f"--from and --to: {given:g} is not a number above 0")
    knob = KNOBS[name](trace, base, bounds)
    knob = knob._replace(low=knob.snap(knob.low), high=knob.snap(knob.high))
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
    fewest = -(-parts.config.max_model_len // parts.config.block_size)
    low = fewest if bounds.low is None else bounds.low
    high = bounds.high
    if high is None:
        high = float(assemble(make_config(engine)).memory.num_gpu_blocks)
    ladder = _geometric(low, high, round)
    return Knob("num_gpu_blocks_override", "least", ladder, round, "blocks", low, high)


def _utilization(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    decides = pool_setting(make_config(parted(base)[1]))
    if decides != "gpu_memory_utilization":
        raise ConfigError(
            f"--find gpu_memory_utilization: has no effect beside {decides}; leave that out, or use"
            " --find num_gpu_blocks"
        )

    low, high = _ends(bounds, 0.05, 0.99)
    ladder = tuple(_thousandths(low + (high - low) * k / 12) for k in range(13))
    return Knob("gpu_memory_utilization", "least", ladder, _thousandths, "share", low, high)


def _rate(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    """Around the rate of the base or the trace, and further as needed."""
    centre = _rate_of(trace, base)
    low, high = _ends(bounds, centre / 1024, centre * 1024)
    steps = (centre * 2.0**k for k in range(-3, 4))
    ladder = tuple(_figures(rate) for rate in steps if low <= rate <= high)
    if bounds.low is not None or bounds.high is not None or len(ladder) < 2:
        ladder = tuple(dict.fromkeys((_figures(low), *ladder, _figures(high))))
    return Knob("request_rate", "most", ladder, _figures, "requests/s", low, high, grows=True)


def _replicas(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    """From one replica, as far up as needed."""
    low, high = _ends(bounds, 1, _MOST_REPLICAS)
    given = bounds.low is not None or bounds.high is not None
    ladder = _geometric(low, high, round) if given else _FEW_REPLICAS
    return Knob("replicas", "least", ladder, round, "replicas", low, high, grows=True, grain=1.0)


def _watermark(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    low, high = _ends(bounds, _WATERMARKS[0], _WATERMARKS[-1])
    inner = [each for each in _WATERMARKS if low <= each <= high]
    ladder = tuple(sorted({_thousandths(low), *inner, _thousandths(high)}))
    return Knob("watermark", "best", ladder, _thousandths, "share", low, high)


def _offload(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    """From a tier of hardly any use to one larger than a server's memory."""
    ends = _ends(bounds, 1.0, 1024.0)
    ladder = _geometric(*ends, _figures)
    return Knob("kv_offloading_size", "least", ladder, _figures, "GiB", *ends)


def _chunk(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    ends = _ends(bounds, 128, 16384)
    ladder = _geometric(*ends, _grains)
    return Knob("max_num_batched_tokens", "best", ladder, _grains, "tokens", *ends)


def _seqs(trace: Trace, base: Mapping[str, Any], bounds: Bounds) -> Knob:
    ends = _ends(bounds, 1, min(1024, len(trace.rows)))
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


def _ends(bounds: Bounds, low: float, high: float) -> tuple[float, float]:
    return (
        low if bounds.low is None else bounds.low,
        high if bounds.high is None else bounds.high,
    )


def _geometric(low: float, high: float, snap: Callable[[float], float]) -> tuple[float, ...]:
    """Values of about the same ratio, both ends included."""
    if not 0 < low < high:
        return (low, high)
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
