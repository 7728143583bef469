"""Fits the constants of a machine, which no kernel table holds, to a short real run.

| constant | unit | what it stands for |
|---|---|---|
| `linear_factor` | 1 | linear layers and experts in the engine over those timed alone |
| `step_us` | us a step | what the GPU waits for between two steps |
| `prompt_step_us` | us a step with prompts | the same, of what only such steps do |
| `all_reduce_factor` | 1 | all-reduces over the hardware's figures |

Mean and percentiles of the latencies of the first part are met as well as possible, in their
logarithms: a Gauss-Newton search whose slopes are replays with one constant moved. A constant that
explains little is refused, because the run does not identify it. Where nothing was measured of
uneven batches, the run also decides whether they are priced (`kvsim.cost.tail`). The rest of the
run, of which no measured time is used, judges the profile.

The very first requests are left out: an engine loads a kernel when it first runs it, and no later
step pays for that. In three published runs of vLLM 0.19, the first token of the first request comes
70, 80 and 460 ms later than in a replay (github.com/casys-kaist/LLMServingSim, `bench/examples`).
In an overloaded run, all who wait are that much later, too. So where this explains as much as a
constant has to, the first step of a replay takes so much longer; a profile does not keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import expm1
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvsim.against.matched import (
    FITTED,
    Change,
    Matched,
    errors,
    matched,
    measured_seconds,
    with_change,
)
from kvsim.cost.profile import Curve, ExpertGrid, Fit, Profile, Tail
from kvsim.cost.table import multiplied
from kvsim.errors import ConfigError
from kvsim.fleet import simulate_engine
from kvsim.machine.hardware import LINKS, AllReduce
from kvsim.results.statistics import Floats
from kvsim.run.assembly import assemble
from kvsim.settings.config import RunConfig
from kvsim.workload.trace import Trace

WORTH = 0.1
"""Share of the misses that a constant has to take away."""
ENOUGH = 0.002
"""A mean miss, of 1, that nothing has to explain."""
WARM_UP = 10
"""First requests of a run, which are neither fitted nor judged."""
FEWEST = 20
"""Fewest requests of either part."""
_ROUNDS = 5


class Constant(NamedTuple):
    """One constant: its value that changes nothing, the change that slopes are taken over, and its
    bounds."""

    nothing: float
    step: float
    low: float
    high: float


CONSTANTS = {
    "linear_factor": Constant(1.0, 0.02, 0.9, 1.1),
    "step_us": Constant(0.0, 200.0, 0.0, 2000.0),
    "prompt_step_us": Constant(0.0, 2000.0, 0.0, 20_000.0),
    "all_reduce_factor": Constant(1.0, 0.1, 0.25, 4.0),
}

Values = dict[str, float]


def fit_run(
    profile: Profile,
    trace: Trace,
    config: RunConfig,
    first: int,
    done: Callable[[int], None] = lambda number: None,
) -> Profile:
    """`profile` with constants fitted to the first `first` measured requests of `trace`, without
    the `WARM_UP` at its start.

    `config` holds the settings of the server that was measured; what prices its steps is replaced.
    `done` is called with 1 after each replay. Constants, their standard errors, the run, its late
    start and the errors on the rest are kept in `Profile.fitted`. Raises `ConfigError` where a part
    has fewer than `FEWEST` measured requests, and where the profile was fitted before.
    """
    if profile.fitted:
        raise ConfigError(
            "profile: its constants were fitted before (fitted.run); give the profile that they"
            " were fitted to"
        )
    used = bench = _Bench(profile, trace, config, first, done)
    found, refused = _chosen(bench)
    for other in (_Bench.pricing_unevenly, _Bench.starting_late):
        tried = other(used, found.values) if found.left > ENOUGH else None
        if tried is not None:
            also = _chosen(tried)
            if also[0].left < (1 - WORTH) * found.left:
                used, (found, refused) = tried, also
    constants = {name: _rounded(value) for name, value in found.values.items()}
    fitted = {
        "constants": constants,
        "standard_errors": {name: _rounded(error) for name, error in found.spread.items()},
        "refused": refused,
        "uneven_batches": used.prices_uneven,
        "start_s": round(used.late_s(constants), 6),
        "run": Path(trace.path).name,
        "run_sha256": trace.sha256,
        "warm_up_requests": WARM_UP,
        "fitted_requests": len(bench.part),
        "judged_requests": len(bench.rest),
        "error_percent": used.judged(constants),
        "error_percent_before": bench.judged({}),
    }
    shown = ", ".join(f"{name} {value:g}" for name, value in constants.items()) or "none"
    label = f"{shown}, fitted to the first {first} requests of {fitted['run']}"
    made = with_constants(used.profile, constants)
    terms = {**made.terms, "constants of the machine": label}
    return replace(made, fitted=fitted, terms=terms)


def with_constants(profile: Profile, values: Values) -> Profile:
    """`profile` with these constants in its fits, at every block size."""
    others = {size: _changed(fit, values) for size, fit in profile.others.items()}
    return replace(profile, fit=_changed(profile.fit, values), others=others)


def priced_by(profile: Profile | str, config: RunConfig) -> RunConfig:
    """The settings, with this profile, or that of a path, in place of what prices steps."""
    kept = {key: each for key, each in config.cost.items() if key in LINKS}
    return replace(config, cost={**kept, "model": "table", "profile": profile})


def _changed(fit: Fit, values: Values) -> Fit:
    full = {name: values.get(name, constant.nothing) for name, constant in CONSTANTS.items()}
    linear, reduces = full["linear_factor"], full["all_reduce_factor"]
    if isinstance(fit.experts, ExpertGrid):
        fit = multiplied(fit, {"experts": linear})
    a0, a1, a2 = fit.step
    return replace(
        fit,
        dense=_times(fit.dense, linear),
        head=_times(fit.head, linear),
        step=(a0 + full["step_us"], a1, a2),
        prompt_step_us=fit.prompt_step_us + full["prompt_step_us"],
        all_reduce=fit.all_reduce.slowed(reduces)
        if isinstance(fit.all_reduce, AllReduce)
        else fit.all_reduce,
    )


def _times(curve: Any, factor: float) -> Any:
    assert isinstance(curve, Curve)
    return replace(curve, us=[round(us * factor, 3) for us in curve.us])


class _Bench:
    """A measured run, and its replays with other constants."""

    def __init__(
        self,
        profile: Profile,
        trace: Trace,
        config: RunConfig,
        first: int,
        done: Callable[[int], None],
        late: bool = False,
    ) -> None:
        """`late`: whether the first step takes as much longer as the first token of the run came
        later than it would with the same constants."""
        self.profile, self._trace, self._config, self._done = profile, trace, config, done
        self._first, self._late = first, late
        tail = profile.fit.tail
        self.prices_uneven = isinstance(tail, Tail) and tail.used
        self.reduces = isinstance(profile.fit.all_reduce, AllReduce)
        seconds = measured_seconds(trace.path, trace.rows)
        self._measured = np.flatnonzero(~np.isnan(sum(seconds[kind] for kind in FITTED)))
        if not len(self._measured):
            raise ConfigError(
                f"{trace.path}: no request has measured times (observed: ttft_s and e2e_s, with"
                " more than one output token); give a result of vllm bench serve --save-detailed"
            )
        self.part, self.rest = self._measured[WARM_UP:first], self._measured[first:]
        if min(len(self.part), len(self.rest)) < FEWEST:
            raise ConfigError(
                f"{trace.path}: {len(self.part)} measured requests to fit after the first"
                f" {WARM_UP}, and {len(self.rest)} to judge; give a run with at least {FEWEST} of"
                " each (--first)"
            )

    def replay(self, values: Values) -> Matched:
        """What was measured, and the replay of it."""
        late = Change(start_ns=self.late_s(values) * 1e9)
        parts_of = with_change(late) if late.start_ns else assemble
        result = simulate_engine(self._trace, self._priced(values), parts_of=parts_of)
        self._done(1)
        pairs = matched(self._trace, result)
        if not np.isin(self._measured, pairs.rows).all():
            raise ConfigError(
                f"{self._trace.path}: the replay does not complete every measured request;"
                " `kvsim run` with the same settings says why"
            )
        return pairs

    def late_s(self, values: Values) -> float:
        """How much longer the first step takes, in seconds."""
        if not self._late or self._measured[0] > 0:
            return 0.0
        alone = replace(self._priced(values), num_prompts=1)
        first = matched(self._trace, simulate_engine(self._trace, alone))
        return max(0.0, float(first.measured_s["ttft"][0] - first.predicted_s["ttft"][0]))

    def _priced(self, values: Values) -> RunConfig:
        """The settings, with prices of the profile with these constants."""
        return priced_by(with_constants(self.profile, values), self._config)

    def pricing_unevenly(self, values: Values) -> _Bench | None:
        """The bench with the term of uneven batches, where no measurement decided on it; None:
        there is no such question."""
        tail = self.profile.fit.tail
        if not isinstance(tail, Tail) or tail.used or "uneven" in self.profile.error:
            return None
        fit = replace(self.profile.fit, tail=replace(tail, used=True))
        return self._with(replace(self.profile, fit=fit), self._late)

    def starting_late(self, values: Values) -> _Bench | None:
        """The bench with a first step that takes longer, if that is a share of `WORTH` of the first
        token's time with these constants."""
        tried, first = self._with(self.profile, True), self._trace.rows[self._measured[0]]
        least_s = WORTH * (first.observed or {})["ttft_s"]
        return tried if tried.late_s(values) > least_s else None

    def _with(self, profile: Profile, late: bool) -> _Bench:
        return _Bench(profile, self._trace, self._config, self._first, self._done, late)

    def misses(self, values: Values) -> Floats:
        """The errors of the part (`kvsim.against.matched.errors`)."""
        return np.array(list(errors(self.replay(values), self.part).values()))

    def judged(self, values: Values) -> dict[str, float]:
        """The errors on the rest, in percent."""
        found = errors(self.replay(values), self.rest)
        return {name: round(100 * expm1(error), 2) for name, error in found.items()}


class _Found(NamedTuple):
    """Constants that meet the part best, their standard errors, and the size of what is left."""

    values: Values
    spread: Values
    left: float


def _chosen(bench: _Bench) -> tuple[_Found, dict[str, str]]:
    """The constants that the run shows, and why not the others.

    They are taken on one after the other, each time the one that leaves least, as long as it takes
    away a share of `WORTH` of what was left.
    """
    found = _Found({}, {}, _size(bench.misses({})))
    open_names = [name for name in CONSTANTS if name != "all_reduce_factor" or bench.reduces]
    while open_names and found.left > ENOUGH:
        tried = {name: _search(bench, found.values, name) for name in open_names}
        best = min(tried, key=lambda name: tried[name].left)
        if tried[best].left > (1 - WORTH) * found.left:
            gains = {name: 1 - each.left / found.left for name, each in tried.items()}
            return found, {
                name: f"would explain {max(gain, 0):.1%} of what is left: the run does not show it"
                for name, gain in gains.items()
            }
        found = tried[best]
        open_names.remove(best)
    return found, dict.fromkeys(open_names, "there is nothing left that it could explain")


def _search(bench: _Bench, start: Values, further: str) -> _Found:
    """Fit one constant more than those of `start`, all of them again."""
    values = {**start, further: CONSTANTS[further].nothing}
    names = list(values)
    misses = bench.misses(values)
    spread = dict.fromkeys(names, float("inf"))
    for number in range(_ROUNDS):
        closer = 2**number  # A replay is a staircase: slopes over wide steps first.
        slopes = np.column_stack([_slope(bench, values, misses, name, closer) for name in names])
        weights = _weights(misses)
        scaled = slopes * weights[:, None]
        move = -np.linalg.lstsq(scaled, misses * weights, rcond=None)[0]
        spread = dict(zip(names, _standard_errors(scaled, misses * weights), strict=True))
        there, share = values, 1.0
        # A move that makes it worse is too far: half of it is tried, and half again.
        for _ in range(3):
            moved = {
                name: float(np.clip(values[name] + share * by, *CONSTANTS[name][2:]))
                for name, by in zip(names, move, strict=True)
            }
            found = bench.misses(moved)
            if _size(found) < _size(misses):
                there, misses = moved, found
                break
            share /= 2
        if there is values:
            break
        values = there
    return _Found(values, spread, _size(misses))


def _slope(bench: _Bench, values: Values, misses: Floats, name: str, closer: int) -> Floats:
    step = CONSTANTS[name].step / closer
    slope: Floats = (bench.misses({**values, name: values[name] + step}) - misses) / step
    return slope


def _weights(misses: Floats) -> Floats:
    """Huber's, so that one percentile far off does not decide."""
    far = np.abs(misses)
    limit = 2 * max(float(np.median(far)), 1e-6)
    weights: Floats = np.sqrt(np.minimum(1.0, limit / np.maximum(far, 1e-12)))
    return weights


def _size(misses: Floats) -> float:
    return float(np.abs(misses).mean())


def _standard_errors(slopes: Floats, misses: Floats) -> list[float]:
    """Returns the standard error of each constant, estimated from the misses that are left;
    infinite if the run does not determine the constant."""
    spare = max(len(misses) - slopes.shape[1], 1)
    noise = float(misses @ misses) / spare
    square = slopes.T @ slopes
    if np.linalg.matrix_rank(square) < len(square):
        return [float("inf")] * len(square)
    return [float(each) for each in np.sqrt(noise * np.diag(np.linalg.inv(square)))]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
