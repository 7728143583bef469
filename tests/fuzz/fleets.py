"""Random fleets: several replicas behind any router decide the same each time."""

from __future__ import annotations

import random
from typing import Any

from fuzz.draw import draw_settings, draw_trace
from fuzz.equal import LIMIT_S, difference, imbalance, limited, quick_livelocks

from kvsim.errors import ConfigError
from kvsim.fleet import ROUTERS, FleetResult, simulate_fleet, summarise_fleet
from kvsim.fleet.settings import load_settings
from kvsim.run.simulation import simulate
from kvsim.workload.trace import Trace

_ARGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "dynamo-kv": {"use_kv_events": (False, False, False, True)},
    "sglang-cache_aware": {"cache_threshold": (0.0, 0.3, 1.0)},
}
"""Router -> values of its arguments."""


def check_fleet(seed: int, limit_s: float = LIMIT_S) -> str:
    """One random fleet; returns how all its replicas end. One alone is a run."""
    rng = random.Random(f"fleets {seed}")
    trace = draw_trace(rng)
    for row in trace.rows:
        row.session = rng.choice((None, "a", "b", f"own {row.index}"))
    settings = [draw_settings(rng)] * rng.choice((1, 2, 3, 5))
    if rng.random() < 0.3:
        others = [draw_settings(rng) for _ in settings]
        settings = [_sent_as(settings[0], each) for each in others]
    if rng.random() < 0.95:
        settings = [{**each, "on_engine_error": "stop"} for each in settings]
    router = rng.choice(sorted(ROUTERS))
    args = {key: rng.choice(values) for key, values in _ARGS.get(router, {}).items()}
    where = f"fleets {seed}: {router} {args}, {settings}"
    with limited(limit_s), quick_livelocks():
        first = _played(trace, settings, router, args)
        second = _played(trace, settings, router, args)
        if isinstance(first, str) or isinstance(second, str):
            assert first == second, f"{first}; done again: {second}; {where}"
            return "refused"
        _assert_equal(first, second, where)
        assert sorted(index for each in first.indexes for index in each) == [
            row.index for row in trace.rows
        ], f"a request is with no replica, or with two; {where}"
        if len(settings) == 1 and first.replicas[0].meta["outcome"]["kind"] == "finished":
            _assert_is_the_run(first, trace, settings[0], where)
        return " ".join(sorted({each.meta["outcome"]["kind"] for each in first.replicas}))


def _sent_as(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The settings `other`, with requests sent as `first` says."""
    load = load_settings() - {"seed"}
    sent = {key: value for key, value in first.items() if key in load}
    return {key: value for key, value in other.items() if key not in load} | sent


def _played(
    trace: Trace, settings: list[dict[str, Any]], router: str, args: dict[str, Any]
) -> FleetResult | str:
    """What the fleet did, or the message that refuses it."""
    try:
        return simulate_fleet(trace, settings, router, args)
    except ConfigError as error:
        return str(error)


def _assert_equal(first: FleetResult, second: FleetResult, where: str) -> None:
    assert list(first.chosen) == list(second.chosen), f"another replica is chosen; {where}"
    for ours, theirs in zip(first.replicas, second.replicas, strict=True):
        found = difference(ours, theirs) or imbalance(ours)
        assert not found, f"{found}; {where}"
    figures = [summarise_fleet(fleet) for fleet in (first, second)]
    for each in figures:
        del each["meta"]
    assert repr(figures[0]) == repr(figures[1]), f"figures of the fleet; {where}"


def _assert_is_the_run(
    fleet: FleetResult, trace: Trace, settings: dict[str, Any], where: str
) -> None:
    alone = simulate(trace, settings)
    for name in ("requests", "steps"):
        ours, theirs = getattr(fleet.replicas[0], name), getattr(alone, name)
        for key in ours:
            assert list(ours[key]) == list(theirs[key]), f"no run of one: {name} {key}; {where}"
