"""Random fleets: several replicas behind any router decide the same each time, and so do those
that split prefill and decode."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from fuzz.draw import draw_heirs, draw_settings, draw_trace
from fuzz.equal import LIMIT_S, columns_differ, difference, imbalance, limited, quick_livelocks
from fuzz.laws import draw_v1

from kvsim.core.request import DECODE, PREFILL
from kvsim.core.schema import LEGS
from kvsim.errors import ConfigError
from kvsim.fleet import ROUTERS, FleetResult, simulate_fleet, summarise_fleet
from kvsim.fleet.settings import load_settings
from kvsim.results.ledger import TIME_PARTS
from kvsim.run.simulation import simulate
from kvsim.workload import Trace

_ARGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "dynamo-kv": {"use_kv_events": (False, False, False, True)},
    "sglang-cache_aware": {"cache_threshold": (0.0, 0.3, 1.0)},
}
"""Router -> values of its arguments."""
_NOT_SPLIT = ("block_manager", "block_manager_args", "kv_offloading_size", "pipeline_parallel_size")
"""Settings that are refused in a split, or name a manager that does without groups."""


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
        if (twice := _played_twice(trace, settings, router, args, where)) is None:
            return "refused"
        first, _ = twice
        assert sorted(index for each in first.indexes for index in each) == [
            row.index for row in trace.rows
        ], f"a request is with no replica, or with two; {where}"
        if len(settings) == 1 and first.replicas[0].meta["outcome"]["kind"] == "finished":
            _assert_is_the_run(first, trace, settings[0], where)
        return " ".join(sorted({each.meta["outcome"]["kind"] for each in first.replicas}))


def check_split(seed: int, limit_s: float = LIMIT_S) -> str:
    """One random fleet that splits prefill and decode, each side with features of its own; returns
    how all its replicas end."""
    rng = random.Random(f"splits {seed}")
    trace = draw_trace(rng) if rng.random() < 0.6 else draw_heirs(rng)
    adapters = rng.random() < 0.2
    for row in trace.rows:
        row.session = rng.choice((None, "a", "b", f"own {row.index}"))
        row.lora = rng.choice(("", "a", "b")) if adapters else None
    sides = _draw_sides(rng, adapters)
    router = rng.choice(sorted(ROUTERS))
    args = {key: rng.choice(values) for key, values in _ARGS.get(router, {}).items()}
    where = f"splits {seed}: {router} {args}, {sides}"
    with limited(limit_s), quick_livelocks():
        if (twice := _played_twice(trace, sides, router, args, where)) is None:
            return "refused"
        first, second = twice
        assert first.handovers is not None and second.handovers is not None
        found = columns_differ(first.handovers, second.handovers)
        assert not found, f"handovers: {found}; {where}"
        ends = {each.meta["outcome"]["kind"] for each in first.replicas}
        if ends == {"finished"}:
            try:
                assert_conserved(first)
            except AssertionError as error:
                error.add_note(where)
                raise
        return " ".join(sorted(ends))


def _draw_sides(rng: random.Random, adapters: bool) -> list[dict[str, Any]]:
    """Engines that compute prompts and engines that go on, which keep the same KV."""
    first, other = draw_v1(rng), draw_v1(rng)
    both = {key: first[key] for key in ("model", "block_size")}
    other = _sent_as(first, {**other, **both} if rng.random() < 0.7 else first)
    network = {
        "call_us": rng.choice((0.0, 50.0, 9000.0)),
        "bandwidth_gb_s": rng.choice((0.001, 1.0, 100.0)),
        "handshake_ms": rng.choice((0.0, 3.0, 5000.0)),
    }
    lease = {"kv_lease_duration": rng.choice((1, 2, 30))}
    sides = []
    for role, drawn in (("kv_producer", first), ("kv_consumer", other)):
        settings = {key: value for key, value in drawn.items() if key not in _NOT_SPLIT}
        if settings["model"] == "tiny":
            settings.pop("prefix_cache_retention_interval", None)
        if rng.random() < 0.95:
            settings["on_engine_error"] = "stop"
        if rng.random() < 0.8:  # The others may keep fewer tokens than a request has.
            tokens = max(512, settings["max_num_batched_tokens"])
            settings |= {"max_model_len": 512, "max_num_batched_tokens": tokens}
            settings["num_gpu_blocks_override"] = 512 // settings["block_size"] * 3 + 9
        if adapters:
            settings |= {"enable_lora": True, "max_loras": rng.randrange(1, 3)}
        if role == "kv_consumer" and rng.random() < 0.2:
            settings["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": rng.randrange(1, 4),
                "acceptance_rate": rng.random(),
            }
        sides += [
            settings
            | {
                "cost": {**drawn["cost"], "kv_transfer": network},
                "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role},
                "kv_connector_extra_config": lease,
            }
        ] * rng.randint(1, 3)
    return sides


def assert_conserved(result: FleetResult) -> None:
    """Whatever is sent is done once on each side, and no time is lost or counted twice."""
    requests, handovers = result.requests, result.handovers
    assert handovers is not None and result.ways is not None
    done = np.array(requests["status"]) == "completed"
    spent = requests["finish_ns"] - requests["arrival_ns"]
    assert (sum(handovers[name] for name in LEGS)[done] == spent[done]).all()
    first = requests["first_token_ns"] - requests["arrival_ns"]
    assert (sum(handovers[name] for name in LEGS[:-1])[done] == first[done]).all()
    assert (sum(requests[name] for name in TIME_PARTS)[done] == spent[done]).all()
    tokens = {PREFILL: 0, DECODE: 0}
    for role, replica in zip(result.ways.roles, result.replicas, strict=True):
        assert replica.meta["outcome"]["kind"] == "finished"
        tokens[role] += int(replica.requests["output_tokens"].sum())
    assert tokens[DECODE] == int(requests["output_tokens"].sum())
    assert tokens[PREFILL] == int((handovers["moved_bytes"] >= 0).sum())


def _sent_as(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The settings `other`, with requests sent as `first` says."""
    load = load_settings() - {"seed"}
    sent = {key: value for key, value in first.items() if key in load}
    return {key: value for key, value in other.items() if key not in load} | sent


def _played_twice(
    trace: Trace, settings: list[dict[str, Any]], router: str, args: dict[str, Any], where: str
) -> tuple[FleetResult, FleetResult] | None:
    """A fleet and the same again, which are equal; None if it is refused."""
    first, second = (_played(trace, settings, router, args) for _ in range(2))
    if isinstance(first, str) or isinstance(second, str):
        assert first == second, f"{first}; done again: {second}; {where}"
        return None
    _assert_equal(first, second, where)
    return first, second


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
