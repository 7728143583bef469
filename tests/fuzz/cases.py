"""The case of a seed, and what checks it: random configurations, random policies of outsiders."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fuzz import outsiders
from fuzz.draw import (
    TICK_NS,
    draw_configuration,
    draw_features,
    draw_heirs,
    draw_settings,
    draw_trace,
)
from fuzz.equal import LIMIT_S, assert_equal_runs
from fuzz.fleets import check_fleet, check_split
from fuzz.laws import check_world

from kvsim.engines import BLOCK_MANAGERS, ENGINES

_SWITCHES = ("async_scheduling", "disable_async_output_proc")
"""Settings that choose between the schedulers of an engine: who names a class has chosen."""


def check_configuration(seed: int, limit_s: float = LIMIT_S) -> str:
    """One random configuration; returns how both its runs end."""
    trace, settings = draw_configuration(seed)
    return assert_equal_runs(trace, settings, f"configuration {seed}", limit_s=limit_s).kind


def check_sglang(seed: int, limit_s: float = LIMIT_S) -> str:
    """SGLang, with clients that announce what they may generate; returns how both runs end."""
    rng = random.Random(f"sglang {seed}")
    trace = draw_trace(rng) if rng.random() < 0.8 else draw_heirs(rng)
    announced = rng.choice((0.0, 0.5, 1.0))
    for row in trace.rows:
        if rng.random() < announced:
            row.ignore_eos = rng.random() < 0.3
            more = 0 if row.ignore_eos else rng.choice((0, 0, 1, rng.randrange(30)))
            row.max_new_tokens = row.output_length + more
    settings = draw_settings(rng, "sglang")
    args = settings["scheduler_args"]
    if rng.random() < 0.7:  # The others are composed step by step.
        for key in ("enable_mixed_chunk", "prefill_decode_interval", "enable_priority_scheduling"):
            args.pop(key, None)
    return assert_equal_runs(trace, settings, f"sglang {seed}", limit_s=limit_s).kind


def check_policy(seed: int, limit_s: float = LIMIT_S) -> str:
    """One random policy in a random configuration; returns how both its runs end."""
    rng = random.Random(f"policy {seed}")
    trace = draw_trace(rng)
    draw = rng.choice((_draw_scheduler, _draw_scheduler, _draw_manager, _draw_cost, _draw_victim))
    settings, policy = draw(rng, seed)
    overridden = getattr(policy, "overridden", ())
    variant = getattr(policy, "variant", "other")
    end = assert_equal_runs(
        trace,
        settings,
        f"policy {seed}: {variant} {overridden} of {getattr(policy, '__base__', policy)}",
        may_crash=variant == "other",
        balanced=variant != "other",
        limit_s=limit_s,
        notes=getattr(policy, "notes", None),
    ).kind
    return f"{variant}: {end}"


def check_features(seed: int, limit_s: float = LIMIT_S) -> str:
    """vLLM V1 with groups of layers, a tier in CPU memory, or both, sometimes with adapters, drafts
    and clients that give up; returns how both runs end."""
    rng = random.Random(f"features {seed}")
    trace = draw_trace(rng) if rng.random() < 0.6 else draw_heirs(rng)
    settings = draw_features(rng)
    impatient, adapters = rng.random() < 0.3, rng.random() < 0.3
    for row in trace.rows:
        if impatient and rng.random() < 0.4:
            row.abort_after_ns = rng.randrange(60 * TICK_NS)
        if adapters:
            row.lora = rng.choice(("", "a", "b", "c"))
    if adapters:
        settings |= {"enable_lora": True, "max_loras": rng.randrange(1, 4)}
    if rng.random() < 0.15:
        method, drafts = rng.choice(("ngram", "eagle")), rng.randrange(1, 4)
        settings["speculative_config"] = {
            "method": method,
            "num_speculative_tokens": drafts,
            "acceptance_rate": rng.random(),
            "drafter_us": 100,
        }
    return assert_equal_runs(trace, settings, f"features {seed}", limit_s=limit_s).kind


KINDS: dict[str, Callable[..., str]] = {
    "configurations": check_configuration,
    "features": check_features,
    "fleets": check_fleet,
    "policies": check_policy,
    "sglang": check_sglang,
    "splits": check_split,
    "worlds": check_world,
}
"""Kind of cases -> what checks the case of a seed."""


def _draw_scheduler(rng: random.Random, seed: int) -> tuple[dict[str, Any], Any]:
    policy = outsiders.scheduler(seed)
    built_in = policy.__mro__[1]
    engine = outsiders.SCHEDULERS[built_in]
    settings = draw_settings(rng, engine)
    settings["engine"] = f"fuzz.outsiders:Scheduler{seed}"
    for key in _SWITCHES:
        settings.pop(key, None)
    if built_in is ENGINES[engine].asynchronous:
        settings.pop("n", None)
    own = settings.get("block_manager") or (
        ENGINES[engine].prefix_manager
        if settings.get("enable_prefix_caching", ENGINES[engine].enable_prefix_caching)
        else ENGINES[engine].block_manager
    )
    if engine != "vllm-0.6.3" and rng.random() < 0.9:
        settings["block_manager"] = _by_class(BLOCK_MANAGERS[own])
    if "block_manager" in settings:
        settings.pop("enable_prefix_caching", None)
    return settings, policy


def _draw_manager(rng: random.Random, seed: int) -> tuple[dict[str, Any], Any]:
    policy = outsiders.manager(seed)
    name = next(name for name, kind in BLOCK_MANAGERS.items() if kind is policy.__mro__[1])
    engines = [
        engine
        for engine, entry in ENGINES.items()
        if name in (entry.block_manager, entry.prefix_manager, *entry.others)
    ]
    settings = draw_settings(rng, rng.choice(engines), name)
    settings["block_manager"] = f"fuzz.outsiders:Manager{seed}"
    settings.pop("enable_prefix_caching", None)
    return settings, policy


def _draw_cost(rng: random.Random, seed: int) -> tuple[dict[str, Any], Any]:
    policy = outsiders.cost(seed)
    settings = draw_settings(rng)
    drawn = settings["cost"] if settings["cost"]["model"] == "constant" else {}
    if issubclass(policy, outsiders.BareCost):
        drawn = {}
    settings["cost"] = {**drawn, "model": f"fuzz.outsiders:Cost{seed}"}
    return settings, policy


def _draw_victim(rng: random.Random, seed: int) -> tuple[dict[str, Any], Any]:
    settings = draw_settings(rng)
    settings["victim"] = f"fuzz.outsiders:Victim{seed}"
    return settings, outsiders.victim(seed)


def _by_class(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
