"""Several replicas in one simulation: one of them is a run, and fast equals exact."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_here
from made import make_trace
from places import ROOT

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.engines.vllm_v1.scheduler import VllmV1Async
from kvsim.errors import ConfigError, EngineStopped
from kvsim.fleet import ROUTERS, FleetResult, read_fleet, simulate_fleet, summarise_fleet
from kvsim.fleet.routers.router import TOKEN_CHARACTERS, Asked, Choice, Router, StreamContent
from kvsim.results.ledger import TIME_PARTS
from kvsim.results.plain import flat
from kvsim.run.simulation import simulate
from kvsim.workload import open_trace
from kvsim.workload.keys import streams

CHAT = str(ROOT / "traces" / "chat.jsonl")
REQUESTS = 80
BASE: dict[str, Any] = {
    "model": "llama-3-8b",
    "num_prompts": REQUESTS,
    "max_model_len": 4096,
    "num_gpu_blocks_override": 700,
}
WAYS: dict[str, dict[str, Any]] = {
    "own times": {},
    "closed loop": {"max_concurrency": 12},
    "pressure": {"num_gpu_blocks_override": 260, "request_rate": 60.0},
    "vllm-0.6.3": {"engine": "vllm-0.6.3"},
    "nano-vllm": {"engine": "nano-vllm", "block_size": 256, "num_gpu_blocks_override": 90},
    "sglang": {"engine": "sglang"},
}
ROUTED = list(ROUTERS)
EVENTS = ("dynamo-kv", "llm-d-precise")
"""Routers that go by what caches report."""
PUBLISHING = ("own times", "closed loop", "pressure", "sglang")
"""Ways with an engine that reports."""


def differences(one: Any, other: Any) -> list[str]:
    """The columns in which two tables differ."""
    assert one.keys() <= other.keys()
    return [key for key in one if not np.array_equal(np.array(one[key]), np.array(other[key]))]


@pytest.mark.parametrize("way", WAYS)
def test_one_replica_is_a_run(way: str) -> None:
    config = {**BASE, **WAYS[way]}
    alone = simulate(CHAT, config)
    fleet = simulate_fleet(CHAT, [config], "random")
    (replica,) = fleet.replicas
    assert not differences(alone.requests, replica.requests)
    assert not differences(alone.requests, fleet.requests)
    assert not differences(alone.steps, replica.steps)
    assert not differences(alone.transitions, replica.transitions)
    assert alone.summary == replica.summary
    figures, its_own = flat(summarise_fleet(fleet)), flat(alone.summary)
    shared = {key for key in figures.keys() & its_own.keys() if not key.startswith("meta.")}
    assert {"completed", "sessions.mean_ttft_ms.first"} <= shared
    for key in shared:
        assert figures[key] == pytest.approx(its_own[key]), key


def test_one_replica_is_a_run_behind_any_router() -> None:
    """Also behind those that measure it, and go on measuring when all requests have ended."""
    config = {**BASE, "num_prompts": 30, "max_concurrency": 5}
    alone = simulate(CHAT, config)
    for router in ROUTED:
        (replica,) = simulate_fleet(CHAT, [config], router).replicas
        for name in ("requests", "steps", "transitions"):
            assert not differences(getattr(alone, name), getattr(replica, name)), router
        assert alone.meta["outcome"] == replica.meta["outcome"], router


@pytest.mark.parametrize("router", ["least-loaded", "sglang-cache_aware"])
def test_every_request_is_with_one_replica(router: str) -> None:
    fleet = simulate_fleet(CHAT, [BASE, {**BASE, "num_gpu_blocks_override": 300}], router)
    assert fleet.requests["index"].tolist() == list(range(REQUESTS))
    assert fleet.requests["replica"].tolist() == list(fleet.chosen)
    figures = summarise_fleet(fleet)
    assert sum(each["num_requests"] for each in figures["replicas"]) == REQUESTS
    rows = {row.id: row for row in open_trace(CHAT).rows}
    for number, replica in enumerate(fleet.replicas):
        assert replica.meta["num_gpu_blocks"] == (699, 299)[number]
        for id, length in zip(
            replica.requests["id"], replica.requests["input_length"], strict=True
        ):
            assert rows[id].input_length == length
        spent = replica.requests["finish_ns"] - replica.requests["released_ns"]
        assert (sum(replica.requests[name] for name in TIME_PARTS) == spent).all()


def test_a_turn_without_delay_is_seen_by_the_next_step_as_in_a_run() -> None:
    """The third request follows the first one, which ends while the second one runs."""
    trace = make_trace([(20, 3, None), (20, 9, None), (20, 1, None)])
    trace.rows[1].arrival_ns, trace.rows[2].after = 0, 0
    config = {"model": "tiny", "engine": "vllm-v1", "async_scheduling": False}
    alone, fleet = simulate(trace, config), simulate_fleet(trace, [config], "random")
    assert not differences(alone.steps, fleet.replicas[0].steps)
    assert alone.requests["waiting_step_ns"][2] == 0


def test_replicas_with_and_without_a_prefix_cache() -> None:
    fleet = simulate_fleet(CHAT, [BASE, {**BASE, "enable_prefix_caching": False}], "round-robin")
    figures = summarise_fleet(fleet)
    assert figures["prefix_cache_hit_rate"] > 0
    assert figures["replicas"][1]["prefix_cache_hit_rate"] is None
    assert "cold_tokens" not in fleet.requests  # Only one of them knows.


def test_a_fleet_does_not_start_again() -> None:
    with pytest.raises(ConfigError, match="on_engine_error: reject is for one engine"):
        simulate_fleet(CHAT, [{**BASE, "on_engine_error": "reject"}] * 2)


def test_each_engine_is_built_for_the_samples_that_clients_ask_for() -> None:
    trace = make_trace([(4, 1, None), (4, 1, None)])
    one = {"model": "tiny", "engine": "vllm-0.6.3"}
    settings = [{**one, "n": 2}, {**one, "n": 2, "max_num_seqs": 1}]
    alone = simulate(trace, settings[1])
    assert alone.meta["outcome"]["kind"] == "deadlock"  # No step has room for two sequences.
    fleet = simulate_fleet(trace, settings)
    ends = [each.meta["outcome"]["kind"] for each in fleet.replicas]
    assert ends == ["finished", "deadlock"]
    with pytest.raises(ConfigError, match="n: vllm-v1 runs with one sample"):
        simulate_fleet(trace, [settings[0], {"model": "tiny", "engine": "vllm-v1", "n": 2}])


def test_replicas_agree_on_how_requests_are_sent() -> None:
    with pytest.raises(ConfigError, match="replica 1: request_rate says how requests are sent to"):
        simulate_fleet(CHAT, [BASE, {**BASE, "request_rate": 5.0}])


class LastOne(Router):
    """Sends everything to the last worker, and counts what it hears."""

    heard: list[str]

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        self.heard.append(f"asked {asked.id}")
        return Choice([alive[-1]])

    def first_token(self, id: str) -> None:
        self.heard.append(f"first {id}")

    def ended(self, id: str) -> None:
        self.heard.append(f"ended {id}")


def test_an_outsiders_router_decides_and_is_told() -> None:
    LastOne.heard = []
    fleet = simulate_fleet(CHAT, [BASE] * 3, f"{__name__}:LastOne")
    assert set(fleet.chosen) == {2}
    assert [len(each.requests["id"]) for each in fleet.replicas] == [0, 0, REQUESTS]
    for id in fleet.requests["id"]:
        assert LastOne.heard.count(f"asked {id}") == LastOne.heard.count(f"ended {id}") == 1
        assert LastOne.heard.index(f"asked {id}") < LastOne.heard.index(f"ended {id}")
    assert any(each.startswith("first") for each in LastOne.heard)


class Dying(VllmV1Async):
    """Dies when it composes its hundredth step."""

    steps = 0

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        self.steps += 1
        if self.steps == 100:
            raise EngineStopped("assertion", "", "it is its hundredth step", "", "Dying")
        return super().compose(batch, now_ns)


@pytest.mark.parametrize("router", ["round-robin", "vllm-dp"])
@pytest.mark.parametrize("sessions", ["closed", "recorded"])
def test_a_replica_whose_engine_dies_gets_no_more(sessions: str, router: str) -> None:
    base = {**BASE, "sessions": sessions}
    fleet = simulate_fleet(CHAT, [{**base, "engine": f"{__name__}:Dying"}, base], router)
    kinds = [each.meta["outcome"]["kind"] for each in fleet.replicas]
    assert kinds == ["assertion", "finished"]
    end_ns = round(fleet.replicas[0].meta["outcome"]["time_s"] * 1e9)
    sent_ns = fleet.requests["arrival_ns"][fleet.requests["replica"] == 0]
    assert len(sent_ns)
    assert (sent_ns <= end_ns).all()
    assert "assertion" not in fleet.replicas[1].requests["reason"]
    assert summarise_fleet(fleet)["completed"] < REQUESTS


def test_content_has_as_much_in_common_as_prompts_have() -> None:
    trace = open_trace(CHAT)
    made = streams(trace)
    rows = trace.rows[:60]
    texts = [StreamContent(made, row).text for row in rows]
    each = TOKEN_CHARACTERS
    assert [len(text) for text in texts] == [each * row.input_length for row in rows]
    shared = 0
    for one, other in pairwise(rows):
        length = min(one.input_length, other.input_length)
        keys = [made[row.index].keys(0, length, 1) for row in (one, other)]
        same = next((i for i in range(length) if keys[0][i] != keys[1][i]), length)
        pair = texts[one.index], texts[other.index]
        alike = next((i for i in range(each * length) if pair[0][i] != pair[1][i]), each * length)
        assert alike == each * same
        shared += same
    assert shared


class Sized(LastOne):
    """Tells which block size it was given."""

    size = 0

    def __init__(self, workers: Sequence[str], seed: int = 0, *, block_size: int) -> None:
        super().__init__(workers, seed)
        Sized.size = block_size


def test_a_router_is_given_the_block_size_of_the_engine() -> None:
    Sized.heard = []
    simulate_fleet(CHAT, [{**BASE, **WAYS["nano-vllm"]}], f"{__name__}:Sized")
    assert Sized.size == 256


def test_what_cannot_be_is_refused() -> None:
    for settings in ({"engine": "vllm-0.6.3"}, {"enable_prefix_caching": False}):
        with pytest.raises(ConfigError, match="replica 1 publishes none"):
            simulate_fleet(CHAT, [BASE, {**BASE, **settings}], "llm-d-precise")
    with pytest.raises(ConfigError, match="one size, and here are 16, 32"):
        simulate_fleet(CHAT, [BASE, {**BASE, "block_size": 32}], "dynamo-kv")
    for args, said in [
        ({"refresh_metrics_interval_ms": 0}, "lets no time pass"),
        ({"kv_event_delay_ms": -1}, "-1 ms is negative"),
    ]:
        with pytest.raises(ConfigError, match=said):
            simulate_fleet(CHAT, [BASE], "llm-d-precise", args)
    with pytest.raises(ConfigError, match="at least one"):
        simulate_fleet(CHAT, [])


def routed(tmp_path: Path, *arguments: str) -> Any:
    base = ("run", "--trace", "chat", "--num-prompts", "60", "--replicas", "2")
    return run_here((*base, *arguments), tmp_path)


def test_the_command_writes_a_folder_for_each_replica(tmp_path: Path) -> None:
    result = routed(
        tmp_path, "--router", "sglang-cache_aware", "--router-set", "cache_threshold=0.9",
        "--out", "out", "--no-report",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "2 replicas behind sglang-cache_aware" in result.stdout
    figures = json.loads((tmp_path / "out" / "fleet.json").read_text())
    run = read_fleet(tmp_path / "out")
    assert figures["meta"]["router"]["args"] == {"cache_threshold": 0.9}
    assert len(run.requests["id"]) == 60
    for number, each in enumerate(figures["replicas"]):
        summary = json.loads((tmp_path / "out" / f"replica-{number}" / "summary.json").read_text())
        sent = int((run.decisions["replica"] == number).sum())
        assert summary["num_requests"] == each["num_requests"] == sent
    again = run_here(("report", "out/replica-1"), tmp_path)
    assert again.returncode == 0, again.stderr


def test_bad_arguments_are_one_line(tmp_path: Path) -> None:
    for arguments, said in [
        (("--router", "nobody"), "unknown 'nobody'"),
        (("--router-set", "x"), "'x' is no KEY=VALUE"),
        (("--router", "bounded-hash", "--router-set", "bound=0"), "bound is 0"),
        (("--step-log", "log"), "show one engine"),
    ]:
        result = routed(tmp_path, *arguments)
        assert result.returncode == 2, result.stdout
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_equal_inputs_give_equal_figures() -> None:
    def run() -> FleetResult:
        return simulate_fleet(CHAT, [BASE] * 3, "power-of-two")

    assert summarise_fleet(run()) == summarise_fleet(run())
