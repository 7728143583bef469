"""Tries one correction at a time, and says how much of the misfit each would remove.

Each correction has one number. It is fitted by running the replay again until predictions are on
average neither too high nor too low. The right correction then fits every figure; a wrong one
trades errors of one figure for errors of another. So what counts is the misfit that is left, the
mean distance of the logarithms of predicted and measured figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp, log
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvsim.against.matched import FITTED, STATISTICS, Matched, matched
from kvsim.cost import Cost
from kvsim.errors import ConfigError
from kvsim.fleet.ranks import EngineResult, figures_of, simulate_engine
from kvsim.results.numerals import percent
from kvsim.results.statistics import describe
from kvsim.run.assembly import Parts, assemble
from kvsim.settings.config import RunConfig
from kvsim.workload.assumed import assume_hit_rate
from kvsim.workload.trace import Trace

if TYPE_CHECKING:
    from kvsim.core.plan import Plan


class Change(NamedTuple):
    """A change of step times."""

    prompts: float = 1.0
    """Factor on the time of steps that compute prompt tokens; `decodes` is the factor on all
    others."""
    decodes: float = 1.0
    step_ns: float = 0.0
    """Nanoseconds added to every step."""
    start_ns: float = 0.0
    """Nanoseconds added to the first step."""


class Slowed:
    """A cost model whose times are changed."""

    def __init__(self, cost: Cost, change: Change) -> None:
        self._cost, self._change = cost, change
        self._start_ns = change.start_ns

    @property
    def kind(self) -> str:
        """The kind of the changed cost model."""
        return self._cost.kind

    @property
    def source(self) -> str:
        """The source of the changed cost model, and the change."""
        return f"{self._cost.source}, changed by {self._change}"

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        factor = self._change.prompts if plan.chunks else self._change.decodes
        start_ns, self._start_ns = self._start_ns, 0.0
        return round(self._cost.step_ns(plan) * factor + self._change.step_ns + start_ns)

    def describe(self) -> dict[str, Any]:
        """The description of the changed cost model, and the change."""
        return {**self._cost.describe(), "source": self.source, "change": self._change._asdict()}


def with_change(change: Change) -> Callable[[RunConfig], Parts]:
    """Returns the factory of a run's objects, for `simulate`, with changed step times."""

    def parts_of(config: RunConfig) -> Parts:
        parts = assemble(config)
        return parts._replace(cost=Slowed(parts.cost, change))

    return parts_of


_MOST_RUNS = 6
_BALANCED = 2e-4
_WIDEST = log(4)
"""A factor beyond 1/4 to 4 is no correction."""
_FULL = 0.95
"""Share of the pool from which its size may matter."""


class Found(NamedTuple):
    """A correction, fitted."""

    name: str
    value: float
    """A factor, milliseconds, blocks, or a share."""
    words: str
    remedy: str
    misfit: float
    """What is left with it."""


class _Knob(NamedTuple):
    """One correction: `replay(x)` is the prediction with it; at 0 it changes nothing."""

    name: str
    replay: Callable[[float], Matched]
    start: Callable[[float], float]
    """A first guess from the balance."""
    low: float
    high: float
    value: Callable[[float], float]
    words: Callable[[float], str]
    remedy: str


class _Bench(NamedTuple):
    """What corrections are tried on: a measured run, and its replay without any."""

    trace: Trace
    config: RunConfig
    figures: Mapping[str, Any]
    """Those of the replay."""
    base: Matched
    done: Callable[[int], None]

    def replay(
        self, change: Change, trace: Trace | None = None, config: RunConfig | None = None
    ) -> Matched:
        """The prediction with the times of steps changed, or of another trace or configuration."""
        given = trace or self.trace, config or self.config
        run = simulate_engine(*given, parts_of=with_change(change))
        self.done(1)
        return matched(trace or self.trace, run)


def errors(pairs: Matched) -> dict[str, float]:
    """The logarithm of predicted by measured, of each statistic of each latency that has both."""
    found = {}
    for kind in FITTED:
        measured, predicted = (describe(side) for side in pairs.pairs(kind))
        for name in STATISTICS:
            one, other = measured[name], predicted[name]
            if one and other:
                found[f"{name}_{kind}_ms"] = log(other / one)
    return found


def misfit(pairs: Matched) -> float:
    """The mean size of `errors`."""
    return _mean({key: abs(error) for key, error in errors(pairs).items()})


def corrections(
    trace: Trace,
    config: RunConfig,
    result: EngineResult,
    done: Callable[[int], None] = lambda number: None,
) -> list[Found]:
    """Corrections that leave less misfit than `result` has, the best first.

    `done` is called with 1 after every further run.
    """
    bench = _Bench(trace, config, figures_of(result), matched(trace, result), done)
    knobs = [*_factors(bench), *_constants(bench), *_blocks(bench), *_hits(bench)]
    fitted = (_fit(knob, bench.base) for knob in knobs)
    return sorted((each for each in fitted if each is not None), key=lambda each: each.misfit)


def _factors(bench: _Bench) -> list[_Knob]:
    """Factors of the times of steps."""

    def factor(name: str, make: Callable[[float], Change], which: str, remedy: str) -> _Knob:
        return _Knob(
            name,
            lambda x: bench.replay(make(exp(x))),
            lambda balance: -balance,
            -_WIDEST,
            _WIDEST,
            exp,
            lambda value: f"{which} takes {value:.3f} times as long",
            remedy,
        )

    return [
        factor(
            "step_times",
            lambda f: Change(f, f),
            "every step",
            "measure a profile of this machine with kvsim calibrate, or check GPU and dtype",
        ),
        factor(
            "prefill",
            lambda f: Change(prompts=f),
            "a step with prompts",
            "check the times of prompts in the profile, and max_num_batched_tokens",
        ),
        factor(
            "decode",
            lambda f: Change(decodes=f),
            "a step without prompts",
            "check the times of decodes in the profile, and --enforce-eager",
        ),
    ]


def _constants(bench: _Bench) -> list[_Knob]:
    """Times that come on top: of every step, and before every first token."""
    base = bench.base
    first_ms = 1e3 * float(base.predicted_s["ttft"].mean())
    step_ms = bench.figures["mean_itl_ms"] or first_ms
    return [
        _Knob(
            "host",
            lambda ms: bench.replay(Change(step_ns=ms * 1e6)),
            lambda balance: -balance * step_ms,
            0.0,
            3 * step_ms,
            float,
            lambda ms: f"every step takes {ms:.2f} ms longer",
            "host time: scheduling, sampling, detokenisation; none of it is in kernel times",
        ),
        _Knob(
            "first_token",
            lambda ms: _delayed(base, ms / 1e3),
            lambda balance: -balance * first_ms,
            0.0,
            10 * first_ms,
            float,
            lambda ms: f"every first token reaches the client {ms:.1f} ms later",
            "network, tokenizer and front end of the server, which are not simulated",
        ),
    ]


def _blocks(bench: _Bench) -> list[_Knob]:
    """The size of the pool, where it was full."""
    blocks = bench.figures["meta"]["num_gpu_blocks"]
    if (bench.figures["kv_cache_usage_max"] or 0) < _FULL:
        return []

    def replay(x: float) -> Matched:
        number = round(blocks * exp(x))
        config = msgspec.structs.replace(bench.config, num_gpu_blocks_override=number)
        return bench.replay(Change(), config=config)

    return [
        _Knob(
            "blocks",
            replay,
            lambda balance: balance,
            -_WIDEST,
            _WIDEST,
            lambda x: round(blocks * exp(x)),
            lambda number: f"the pool has {number:,} blocks, not {blocks:,}",
            "take the count of the server with --startup-log or --num-gpu-blocks-override",
        )
    ]


def _hits(bench: _Bench) -> list[_Knob]:
    """Shared prefixes, where the server caches them and the trace cannot know them."""
    trace, meta = bench.trace, bench.figures["meta"]
    if any(row.content for row in trace.rows) or not meta["prefix_caching"]:
        return []

    def replay(share: float) -> Matched:
        shared = assume_hit_rate(trace, share, meta["block_size"], seed=bench.config.seed)
        return bench.replay(Change(), shared)

    return [
        _Knob(
            "hits",
            replay,
            lambda balance: min(balance, 0.5),
            0.0,
            0.95,
            float,
            lambda share: f"{percent(share)} of the prompt tokens hit the prefix cache",
            "the file does not hold prompts; give a trace that does, and this one with --measured",
        )
    ]


def _fit(knob: _Knob, base: Matched) -> Found | None:
    """The knob where predictions are balanced, by the secant method; the least misfit counts."""
    before, x0 = _balance(base), 0.0
    x = min(max(knob.start(before), knob.low), knob.high)
    best: tuple[float, float] = (misfit(base), 0.0)
    for _ in range(_MOST_RUNS):
        if x == x0:
            break
        try:
            tried = knob.replay(x)
        except ConfigError:  # as of a pool that is too small for a request
            break
        best = min(best, (misfit(tried), x))
        after = _balance(tried)
        if abs(after) < _BALANCED or after == before:
            break
        x0, x, before = x, x - after * (x - x0) / (after - before), after
        x = min(max(x, knob.low), knob.high)
    left, x = best
    if x == 0:
        return None
    value = knob.value(x)
    return Found(knob.name, value, knob.words(value), knob.remedy, left)


def _delayed(base: Matched, seconds: float) -> Matched:
    """The prediction, with every first token, and all after it, this much later."""
    later = {kind: base.predicted_s[kind] + seconds for kind in ("ttft", "e2el")}
    return base._replace(predicted_s={**base.predicted_s, **later})


def _balance(pairs: Matched) -> float:
    return _mean(errors(pairs))


def _mean(values: Mapping[str, float]) -> float:
    return fmean(values.values()) if values else 0.0
