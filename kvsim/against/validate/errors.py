"""Compares a recording with the predictions of a profile: step by step, and run by run.

There are two separate questions, because a queue multiplies a small error of the first into a large
one of the second:
* *teacher-forced*: the real run's own steps, priced one by one;
* *free-running*: a simulation of the same trace, on its own from the first step to the last.

Beside each error stands the noise: by how much two measurements of the same thing differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvsim.against.validate.setup import MARKS, digest, settings_of
from kvsim.core.plan import Plan
from kvsim.cost.profile import Profile, load_profile
from kvsim.errors import ConfigError
from kvsim.results.numerals import MISSING, SPACE, count, seconds, show
from kvsim.results.plain import plain
from kvsim.results.statistics import Floats, describe, durations_ns
from kvsim.run.assembly import Parts, assemble
from kvsim.run.simulation import simulate
from kvsim.settings.config import RunConfig, make_config
from kvsim.version import __version__
from kvsim.workload import Trace, open_trace

if TYPE_CHECKING:
    from kvsim.run.result import Result


KINDS = ("decode", "prefill", "mixed")
"""Kinds of steps: decodes alone, prompts alone, both."""

Table = dict[str, Any]


class Replay:
    """A cost model and a link that return the recorded times, and note the prices of others."""

    kind = "measured"
    source = "measured: a recording, replayed"

    def __init__(self, run: Mapping[str, Any], parts: Parts) -> None:
        self._cost, self._link = parts.cost, parts.link
        self._steps: Iterator[int] = iter(run["step_ns"])
        self._swaps: Iterator[int] = iter(run["swap_ns"])
        self.kinds: list[int] = []
        """Index into `KINDS` of each step."""
        self.predicted_ns: list[int] = []
        self.predicted_swap_ns: list[int] = []
        self.swapped_blocks: list[int] = []

    def step_ns(self, plan: Plan) -> int:
        """The recorded time of the next step."""
        kind = 0 if not plan.chunks else 2 if plan.decode_seqs else 1
        self.kinds.append(kind)
        self.predicted_ns.append(self._cost.step_ns(plan))
        return _next(self._steps)

    def transfer_ns(self, blocks: int) -> int:
        """The recorded time of the next copy."""
        self.swapped_blocks.append(blocks)
        self.predicted_swap_ns.append(self._link.transfer_ns(blocks))
        return _next(self._swaps)

    @property
    def extrapolated_steps(self) -> int:
        """Number of steps outside the profile's tables."""
        return int(self._cost.describe()["extrapolated_steps"])

    def describe(self) -> Table:
        """Where the times come from."""
        return {"kind": self.kind, "source": self.source}

    def finished(self) -> bool:
        """Whether everything that was recorded has been replayed."""
        return next(self._steps, None) is None and next(self._swaps, None) is None


def replayed(
    policy: Mapping[str, Any], name: str, trace: Trace, config: RunConfig
) -> tuple[Result, Replay]:
    """A real run: its result, and the prices of its steps.

    It is simulated with the times of the run `name` of a policy's recording.

    Raises `ConfigError` if the schedule differs from the recorded one.
    """
    run, used = policy[name], []

    def parts_of(settings: RunConfig) -> Parts:
        parts = assemble(settings)
        used.append(Replay(run, parts))
        return parts._replace(cost=used[-1], link=cast("Any", used[-1]))

    result = simulate(trace, config, parts_of=parts_of)
    same = digest(result.requests[mark].tolist() for mark in MARKS) == run["digest"]
    if not (same and used[-1].finished()):
        raise _other_schedule(f"{policy['name']}, {name}")
    return result, used[-1]


def _next(times: Iterator[int]) -> int:
    time_ns = next(times, None)
    if time_ns is None:
        raise _other_schedule("it has fewer steps")
    return time_ns


def _other_schedule(what: str) -> ConfigError:
    return ConfigError(
        f"the recording does not lead to its own schedule ({what}): it was made by another version"
        " of kvsim; measure again"
    )


SCHEMA = "kvsim.validation/1"
KEYS = ("device", "software", "model", "engine", "profile", "trace", "policies")
LATENCIES = ("ttft", "tpot", "e2el")
STATISTICS = ("mean", "p50", "p99")
SIDES = ("real", "repeat", "simulated")

COUNTS = {
    "preemptions": ("Preemptions", "num_preemptions"),
    "swapped_out_blocks": ("Blocks swapped out", "swapped_out_blocks"),
    "swapped_in_blocks": ("Blocks swapped in", "swapped_in_blocks"),
    "recomputed_tokens": ("Tokens computed again", "recomputed_tokens"),
    "hit_tokens": ("Prompt tokens hit", "prefix_cache_hit_tokens"),
    "steps": ("Steps", "steps"),
    "duration_s": ("Duration", "duration"),
}
"""Name here → label, and key of a run's summary."""


def compare(recording: Mapping[str, Any], profile: str) -> Table:
    """The result of a validation, in plain values, keys in a fixed order.

    `profile`: a path or a shipped name. Raises `ConfigError` if recording, trace and profile do not
    belong together.
    """
    setup, made = recording["setup"], load_profile(profile)
    trace = open_trace(setup["trace"]["path"])
    if trace.sha256 != setup["trace"]["sha256"]:
        raise ConfigError(
            f"{trace.path}: not the trace that was recorded; restore it, or measure again"
        )
    _refuse_other_model(recording["model"], made, profile)
    settings = {policy["name"]: settings_of(policy) for policy in setup["policies"]}
    policies = []
    for policy in recording["policies"]:
        own = settings[policy["name"]]
        config = with_profile(own, profile, recording["engine"], made.fit.swap)
        policies.append(_policy(policy, trace, config))
    result: Table = plain(
        {
            "schema": SCHEMA,
            "kvsim_version": __version__,
            "recorded_with": recording["kvsim_version"],
            **{key: recording[key] for key in ("device", "software", "model", "engine")},
            "profile": {
                "path": profile,
                "source": made.source,
                "created": made.created,
                "device": made.device,
                "error": made.error,
            },
            "trace": setup["trace"],
            "policies": policies,
        }
    )
    return result


def with_profile(
    settings: Mapping[str, Any], path: str, engine: Mapping[str, Any], swap: Mapping[str, Any]
) -> RunConfig:
    """Settings whose times come from a profile, for the kernel and the layout that were run.

    `swap`: by layout and direction, `d2h` and `h2d`, microseconds of a copy and of each of its
    blocks. The simulated link has one price for both directions, so it takes their mean, unless the
    price is set.
    """
    kernel = engine["decode_kernel"].removeprefix("decode_")
    cost: Table = {"model": "table", "profile": path, "decode_kernel": kernel}
    if "link" in settings["cost"]:
        return make_config({**settings, "cost": {**cost, "link": settings["cost"]["link"]}})
    directions = swap.get(engine["kv_layout"], {})
    lines = [directions[way] for way in ("d2h", "h2d") if way in directions]
    if lines:
        call_us, block_us = (float(np.mean(values)) for values in zip(*lines, strict=True))
        cost["link"] = {"block_us": max(block_us, 0.0), "call_us": max(call_us, 0.0)}
    return make_config({**settings, "cost": cost})


def _refuse_other_model(recorded: Mapping[str, Any], made: Profile, path: str) -> None:
    """Refuse a profile of another model: scaling would hide its own error."""
    for key, value in recorded.items():
        found = getattr(made.model, key, value)
        if found != value:
            raise ConfigError(
                f"{path}: model: {key} is {found}, the recording's is {value}; give the profile"
                " that was measured with this model"
            )


def _policy(policy: Mapping[str, Any], trace: Trace, config: RunConfig) -> Table:
    real, replay = replayed(policy, "real", trace, config)
    results = {
        "real": real,
        "repeat": replayed(policy, "repeat", trace, config)[0],
        "simulated": simulate(trace, config),
    }
    latencies = {side: _latencies(result) for side, result in results.items()}
    return {
        "name": policy["name"],
        "settings": _settings(config, real),
        "steps": _steps(policy, replay),
        "copies": _copies(policy, replay),
        "requests": {kind: _figures(kind, latencies) for kind in LATENCIES},
        "counts": {
            name: {side: result.summary[key] for side, result in results.items()}
            for name, (_, key) in COUNTS.items()
        },
        "points": _points(policy, replay),
        "latencies_ms": {
            kind: {side: _listed(latencies[side][kind]) for side in SIDES} for kind in LATENCIES
        },
    }


def _settings(config: RunConfig, result: Result) -> Table:
    """The settings in which policies differ, and the sizes of the pools."""
    keys = ("engine", "block_manager", "prefix_caching", "block_size")
    sizes = ("num_gpu_blocks", "num_cpu_blocks", "max_num_batched_tokens")
    table = {key: result.meta[key] for key in (*keys, *sizes)}
    own = ("preemption_mode", "max_num_seqs", "max_model_len", "enable_chunked_prefill", "n")
    return table | {key: getattr(config, key) for key in own}


def _steps(policy: Mapping[str, Any], replay: Replay) -> Table:
    """Teacher-forced errors: of the model, and of a second measurement of the same steps."""
    measured = _array(policy["real"]["step_ns"])
    again, predicted = _array(policy["replay"]["step_ns"]), _array(replay.predicted_ns)
    kinds = np.array(replay.kinds)
    ran = measured > 0
    table: Table = {
        "count": int(ran.sum()),
        "measured_s": float(measured.sum() / 1e9),
        "extrapolated": replay.extrapolated_steps,
    }
    for name, which in (("all", ran), *((KINDS[k], ran & (kinds == k)) for k in range(3))):
        if which.any():
            table[name] = {
                "count": int(which.sum()),
                "share_of_time": float(measured[which].sum() / measured[ran].sum()),
                "prediction": _errors(predicted[which], measured[which]),
                "noise": _errors(again[which], measured[which]),
            }
    return table


def _copies(policy: Mapping[str, Any], replay: Replay) -> Table | None:
    """Swaps: measured, measured again, and priced; None if there were none."""
    if not replay.swapped_blocks:
        return None
    measured = _array(policy["real"]["swap_ns"])
    again, predicted = _array(policy["replay"]["swap_ns"]), _array(replay.predicted_swap_ns)
    return {
        "count": len(measured),
        "blocks": sum(replay.swapped_blocks),
        "measured_s": float(measured.sum() / 1e9),
        "prediction": _errors(predicted, measured),
        "noise": _errors(again, measured),
    }


def _errors(values: Floats, measured: Floats) -> Table:
    """Relative errors of single values and of their sum."""
    distance = np.abs(values / measured - 1)
    return {
        "median": float(np.median(distance)),
        "p95": float(np.percentile(distance, 95)),
        "max": float(distance.max()),
        "total": float(values.sum() / measured.sum() - 1),
    }


def _latencies(result: Result) -> dict[str, Floats]:
    """Milliseconds of each latency, by request; NaN where it has none."""
    found = durations_ns(result.requests)
    return {kind: np.asarray(found[kind], float) / 1e6 for kind in LATENCIES}


def _figures(kind: str, latencies: Mapping[str, Mapping[str, Floats]]) -> Table:
    """Each statistic of a latency in milliseconds, its error, and its noise."""
    described = {
        side: describe(values[kind][~np.isnan(values[kind])]) for side, values in latencies.items()
    }
    return {
        statistic: {
            **(figures := {side: described[side][statistic] for side in SIDES}),
            "error": _relative(figures["simulated"], figures["real"]),
            "noise": _relative(figures["repeat"], figures["real"]),
        }
        for statistic in STATISTICS
    }


def _listed(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def _relative(value: float | None, base: float | None) -> float | None:
    return value / base - 1 if value is not None and base else None


def _points(policy: Mapping[str, Any], replay: Replay) -> Table:
    """Every step that took time, in order: its kind and its times in microseconds."""
    runs = {"measured_us": policy["real"]["step_ns"], "again_us": policy["replay"]["step_ns"]}
    ran = [i for i, ns in enumerate(policy["real"]["step_ns"]) if ns > 0]
    columns = {**runs, "predicted_us": replay.predicted_ns}
    return {"kind": [replay.kinds[i] for i in ran]} | {
        name: [values[i] / 1000 for i in ran] for name, values in columns.items()
    }


def _array(times_ns: list[int]) -> Floats:
    return np.array(times_ns, dtype=np.float64)


Head = list[str]
Rows = list[list[str]]


def share(value: float | None) -> str:
    """An unsigned error: `2.1 %`; small errors keep two figures."""
    if value is None:
        return MISSING
    digits = 2 if value < 0.00995 else 1 if value < 0.9995 else 0
    return f"{100 * value:.{digits}f}{SPACE}%"


def signed_share(value: float | None) -> str:
    """A signed error: `+2.1 %`."""
    if value is None:
        return MISSING
    return f"{'−' if value < 0 else '+'}{share(abs(value))}"


def sentence(policy: Mapping[str, Any]) -> str:
    """One sentence on one policy."""
    steps = policy["steps"]["all"]
    error, noise = steps["prediction"], steps["noise"]
    return (
        f"{policy['name']}: a step is priced within {share(error['median'])} in the median"
        f" (measuring it again: {share(noise['median'])}), {share(error['p95'])} at p95"
        f" ({share(noise['p95'])}); all steps together {signed_share(error['total'])}"
        f" ({signed_share(noise['total'])})"
    )


def error_rows(result: Mapping[str, Any]) -> tuple[Head, Rows]:
    """A row per figure, a column per policy: the error, in brackets the noise."""
    policies = result["policies"]
    every = [policy["steps"]["all"] for policy in policies]
    rows = [
        [label, *(_beside(say, each["prediction"][key], each["noise"][key]) for each in every)]
        for label, key, say in (
            ("Step, median", "median", share),
            ("Step, p95", "p95", share),
            ("All steps", "total", signed_share),
        )
    ]
    for kind in LATENCIES:
        for statistic in STATISTICS:
            figures = [policy["requests"][kind][statistic] for policy in policies]
            cells = (_beside(signed_share, each["error"], each["noise"]) for each in figures)
            rows.append([f"{kind.upper()} {statistic}", *cells])
    return ["", *(policy["name"] for policy in policies)], rows


def count_rows(result: Mapping[str, Any]) -> tuple[Head, Rows]:
    """A row per figure, a column per policy."""
    policies = result["policies"]
    rows = []
    for name, (label, _) in COUNTS.items():
        say = seconds if name == "duration_s" else count
        counts = [policy["counts"][name] for policy in policies]
        rows.append([label, *(" / ".join(say(each[side]) for side in SIDES) for each in counts)])
    return ["", *(policy["name"] for policy in policies)], rows


def latency_rows(policy: Mapping[str, Any]) -> tuple[Head, Rows]:
    """Every statistic of every latency: three sides, the error and the noise."""
    head = ["", "real", "real again", "simulated", "error", "noise"]
    rows = []
    for kind in LATENCIES:
        for statistic in STATISTICS:
            figures = policy["requests"][kind][statistic]
            times = [show(figures[side], "ms") for side in SIDES]
            errors = [signed_share(figures[key]) for key in ("error", "noise")]
            rows.append([f"{kind.upper()} {statistic}", *times, *errors])
    return head, rows


def _beside(say: Callable[[float | None], str], error: float | None, noise: float | None) -> str:
    return f"{say(error)} ({say(noise)})"
