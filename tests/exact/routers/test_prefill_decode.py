"""Prefill and decode on engines of their own: followed by hand, conserved, written, refused.

A step takes 10 ms and 1 ms more for each prompt token; a block has 16 tokens. A transfer takes 1 ms
and 1 ms more for each block, and the first handshake 5 ms.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from command import run_here
from fuzz.draw import draw_clients, draw_trace
from fuzz.equal import LIMIT_S, limited
from fuzz.fleets import assert_conserved
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from places import ROOT
from worlds import MS, trace

from kvsim.core.schema import LEGS
from kvsim.errors import ConfigError
from kvsim.fleet import (
    ROUTERS,
    FleetResult,
    build_fleet,
    explain_fleets,
    fleet_run,
    read_fleet,
    simulate_fleet,
    summarise_fleet,
)
from kvsim.fleet.folder import write_fleet
from kvsim.fleet.page import build_comparison
from kvsim.report import write_results
from kvsim.run.simulation import simulate
from kvsim.workload import Trace

BLOCK_BYTES = 16 * 24 * 2 * 2 * 64 * 2
"""16 tokens of 24 layers, keys and values of 2 heads of 64 values of 2 bytes."""
NETWORK = {"call_us": 1000.0, "bandwidth_gb_s": BLOCK_BYTES / MS, "handshake_ms": 5.0}
COST = {"model": "constant", "step_us": 10_000, "prefill_token_us": 1_000}
COST |= {"decode_seq_us": 0, "context_token_ns": 0}
TWO = trace((0, 20, 3), (1, 10, 2))


def side(role: str, network: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The settings of an engine."""
    return {
        "engine": "vllm-v1",
        "model": "qwen2.5-0.5b",
        "hardware": "h100",
        "num_gpu_blocks_override": 100,
        "max_model_len": 64,
        "async_scheduling": False,
        "cost": {**COST, "kv_transfer": {**NETWORK, **(network or {})}},
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role},
        **more,
    }


def split(
    sent: Trace, prefill: int = 1, decode: int = 1, router: str = "round-robin", **more: Any
) -> FleetResult:
    kinds = [side("kv_producer", **more)] * prefill + [side("kv_consumer", **more)] * decode
    result = simulate_fleet(sent, kinds, router, explain=True)
    assert_conserved(result)
    return result


def legs_ms(result: FleetResult, request: int) -> list[float]:
    assert result.handovers is not None
    return [int(result.handovers[name][request]) / MS for name in LEGS]


def test_two_requests_by_hand() -> None:
    """r0 prefills until 30, is read until 38, and decodes from 49. r1 waits for r0's prompt. It
    comes to the decode engine at 50 while a step runs until 59; its blocks are there at 61, and the
    next step ends at 69."""
    result = split(TWO)
    # queue, prefill, queue, handshake, queue, transfer, resume, last token, decode
    assert legs_ms(result, 0) == [0, 30, 0, 5, 0, 3, 0, 11, 20]
    assert legs_ms(result, 1) == [29, 20, 9, 0, 0, 2, 8, 11, 10]
    assert [int(t) / MS for t in result.requests["first_token_ns"]] == [49, 80]
    assert [int(t) / MS for t in result.requests["finish_ns"]] == [69, 90]
    assert result.handovers is not None
    assert list(result.handovers["moved_bytes"]) == [2 * BLOCK_BYTES, BLOCK_BYTES]
    # While r1's prompt is computed, r0's two blocks are still kept.
    assert list(result.replicas[0].steps["used_blocks"]) == [2, 3]
    assert result.requests["waiting_load_ns"].tolist() == [8 * MS, 10 * MS]


def test_the_network_moves_one_prompt_at_a_time() -> None:
    """Both prompts are done at 40: r0's blocks move from 45 to 48, r1's until 50."""
    result = split(trace((0, 20, 1), (0, 10, 1)))
    assert legs_ms(result, 0) == [0, 40, 0, 5, 0, 3, 0, 11, 0]
    assert legs_ms(result, 1) == [0, 40, 0, 5, 3, 2, 9, 11, 0]


def test_every_pair_of_engines_has_lanes_and_a_handshake_of_its_own() -> None:
    """r0 and r1 have a prefill and a decode engine each: neither waits for the other."""
    result = split(trace((0, 20, 1), (0, 20, 1)), prefill=2, decode=2)
    assert legs_ms(result, 0) == legs_ms(result, 1) == [0, 30, 0, 5, 0, 3, 0, 11, 0]
    assert list(result.handovers["prefill_replica"]) == [0, 1]  # type: ignore[index]
    assert list(result.requests["replica"]) == [2, 3]


SCARCE = {"num_gpu_blocks_override": 4, "max_model_len": 32}
"""Room for one prompt of 20 tokens, as one block is never used."""


def test_blocks_that_nobody_has_read_hold_up_the_next_prompt() -> None:
    """r0's blocks are free at 38, and not before: r1 could have begun at 30."""
    result = split(trace((0, 20, 1), (1, 20, 1)), **SCARCE)
    assert legs_ms(result, 1)[:2] == [37, 30]


@pytest.mark.parametrize(
    ("duration", "run_out", "begins"),
    [(1, 2, 1030), (2, 0, 3033), (30, 0, 3033)],
)
def test_a_lease_ends_unless_heartbeats_prolong_it(
    duration: int, run_out: int, begins: int
) -> None:
    """The handshake takes 3 s, so that r0's blocks are read at 30 + 3,000 + 3 ms. Heartbeats of a
    lease of 1 s add nothing to it (two thirds of it are 0 s), those of one of 2 s add a second."""
    more = {**SCARCE, "kv_connector_extra_config": {"kv_lease_duration": duration}}
    result = split(trace((0, 20, 1), (1, 20, 1)), network={"handshake_ms": 3000.0}, **more)
    figures = summarise_fleet(result)
    assert figures["handovers"]["leases_run_out"] == run_out
    assert int(result.replicas[0].requests["first_scheduled_ns"][1]) == begins * MS
    assert figures["completed"] == 2
    # The timers of leases do not prolong the run.
    assert figures["duration"] < 4


def test_heartbeats_come_a_sixth_of_the_lease_apart() -> None:
    """With 6 s, a heartbeat each second makes it 4 s more: 10 s of a handshake are bridged. From
    the last one on it would last 4 s; without heartbeats it had ended after 6."""
    more = {"kv_connector_extra_config": {"kv_lease_duration": 6}}
    result = split(trace((0, 20, 1)), network={"handshake_ms": 10_000.0}, **more)
    assert summarise_fleet(result)["handovers"]["leases_run_out"] == 0


@settings(max_examples=examples(6), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_nothing_is_lost_between_the_sides(seed: int) -> None:
    rng = random.Random(seed)
    sent, clients = draw_trace(rng), draw_clients(rng)
    network = {
        "call_us": rng.choice((0.0, 50.0, 9000.0)),
        "bandwidth_gb_s": rng.choice((0.01, 1.0, 100.0)),
        "handshake_ms": rng.choice((0.0, 3.0, 5000.0)),
    }
    more: dict[str, Any] = {
        "num_gpu_blocks_override": rng.randrange(40, 120),
        "max_model_len": 512,
        "max_num_seqs": rng.choice((2, 4, 16)),
        "async_scheduling": rng.random() < 0.5,
        "enable_prefix_caching": rng.random() < 0.7,
        "seed": seed,
        **clients,
    }
    router = rng.choice(["round-robin", "least-loaded", "random", "session-affinity"])
    result = split(sent, rng.randint(1, 3), rng.randint(1, 3), router, network=network, **more)
    assert len(result.requests["id"]) == len(sent.rows[: more.get("num_prompts")])


@pytest.mark.parametrize("others", [1, 0])
def test_a_prompt_that_the_prefill_side_rejects_goes_no_further(others: int) -> None:
    result = split(trace((0, 100, 1), *[(0, 20, 1)] * others))
    assert result.requests["status"] == ["rejected", "completed"][: 1 + others]
    assert list(result.requests["replica"]) == [0, 1][: 1 + others]
    assert legs_ms(result, 0) == [-1 / MS] * len(LEGS)


@pytest.mark.parametrize("router", ["round-robin", "llm-d-default"])
def test_without_a_decode_engine_prompts_are_lost(router: str) -> None:
    """Beside r0, the first step of r1 is padded to four tokens and cut to two, so that the decode
    engine dies. It had read both prompts; nobody reads the third before its lease runs out."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "acceptance_rate": 0.5}
    more = {"kv_connector_extra_config": {"kv_lease_duration": 1}}
    dies = {"speculative_config": drafts, "long_prefill_token_threshold": 2}
    kinds = [side("kv_producer", **more), side("kv_consumer", **more, **dies)]
    with limited(LIMIT_S):
        result = simulate_fleet(trace((0, 20, 9), (1, 20, 9), (500, 20, 9)), kinds, router)
    assert [each.meta["outcome"]["kind"] for each in result.replicas] == [
        "finished",
        "engine-error",
    ]
    assert result.requests["reason"] == ["engine-error", "engine-error", "not-served"]
    figures = summarise_fleet(result)["handovers"]
    assert (figures["handovers"], figures["leases_run_out"]) == (3, 1)


def test_equal_runs_are_equal() -> None:
    first, other = split(TWO, 2, 1), split(TWO, 2, 1)
    assert summarise_fleet(first) == summarise_fleet(other)


@pytest.fixture(scope="module")
def split_and_mixed() -> tuple[FleetResult, FleetResult]:
    sent = trace(*((7 * i, 10 + i % 30, 1 + i % 9) for i in range(60)))
    mixed = {**side("kv_producer"), "kv_transfer_config": {}}
    return split(sent, 1, 2), simulate_fleet(sent, [mixed] * 3, explain=True)


def test_a_folder_gives_back_what_was_made(
    split_and_mixed: tuple[FleetResult, FleetResult], tmp_path: Path
) -> None:
    result, _ = split_and_mixed
    run = fleet_run(result, summarise_fleet(result))

    def write(number: int, folder: str) -> None:
        replica = run.replicas[number]
        write_results(folder, *replica[:3], transitions=replica.transitions)

    write_fleet(tmp_path, run, write, build_fleet(run))
    read = read_fleet(tmp_path)
    assert read.summary == {**run.summary, "meta": read.summary["meta"]}
    assert read.handovers is not None and run.handovers is not None
    for name, column in run.handovers.items():
        assert list(read.handovers[name]) == list(column), name
    for name, column in run.requests.items():
        assert list(read.requests[name]) == list(column), name


def test_a_split_is_compared_with_mixed_replicas(
    split_and_mixed: tuple[FleetResult, FleetResult],
) -> None:
    """The parts of the difference add up to it, and the page names the roles."""
    one, other = (fleet_run(each, summarise_fleet(each)) for each in split_and_mixed)
    for fall in explain_fleets(("split", one), ("mixed", other)).waterfalls:
        assert sum(change for _, change in fall.changes()) == fall.difference
    page = build_comparison([("split", one), ("mixed", other)])
    assert "0 prefill" in page and "last prompt token again" in page
    assert "Replica 2 decode" in build_fleet(one)


def test_the_command_splits(tmp_path: Path) -> None:
    flags = ["--trace", str(ROOT / "traces" / "chat.jsonl"), "--num-prompts", "8"]
    flags += ["--prefill-replicas", "1", "--decode-replicas", "2", "--out", "out"]
    flags += ["--set", "kv_connector_extra_config.kv_lease_duration=1"]
    done = run_here(("run", *flags), tmp_path)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.replace("\xa0", " ")
    assert "1 prefill replica and 2 decode replicas behind round-robin" in shown
    assert "of KV moved from prefill to decode, of 8 prompts" in " ".join(shown.split())
    assert "leases ran out" in " ".join(shown.split())  # The handshake takes 2 s.
    assert (tmp_path / "out" / "handovers.parquet").exists()
    again = run_here(("diff", "out", "out"), tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{}], "needs both sides"),
        ([{}, {}], "no replica is kv_consumer"),
        ([{}, {"kv_transfer_config": {}}], "no replica is kv_consumer"),
        ([{}, {"role": "kv_consumer"}, {"kv_transfer_config": {}}], "replica 2 has none"),
        ([{}, {"role": "kv_consumer", "block_size": 32}], "block_size: .* 16, 32"),
        ([{}, {"role": "kv_consumer", "model": "qwen2.5-1.5b"}], "model: "),
        ([{}, {"role": "kv_consumer", "engine": "sglang", "async_scheduling": None}], "sglang"),
        ([{"n": 2}, {"role": "kv_consumer", "n": 2}], "--n 1"),
        ([{"kv_offloading_size": 1.0}, {"role": "kv_consumer"}], "leave one of the two out"),
        ([{"kv_connector_extra_config": {"kv_lease": 1}}, {"role": "kv_consumer"}], "kv_lease"),
        (
            [{"kv_connector_extra_config": {"kv_lease_duration": 0}}, {"role": "kv_consumer"}],
            "at least 1 s",
        ),
        ([{"network": {"bandwidth_gb_s": 0.0}}, {"role": "kv_consumer"}], "bandwidth above 0"),
        ([{"network": {"handshake_ms": -1.0}}, {"role": "kv_consumer"}], "use milliseconds"),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_line(
    changes: list[dict[str, Any]], message: str
) -> None:
    kinds = [side(**{"role": "kv_producer", **change}) for change in changes]
    with pytest.raises(ConfigError, match=message) as error:
        simulate_fleet(TWO, kinds)
    assert "\n" not in str(error.value)


def test_half_a_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="give both sides"):
        simulate(TWO, side("kv_producer"))


@pytest.mark.parametrize(
    "flags",
    [
        ["run", "--prefill-replicas", "1"],
        ["run", "--prefill-replicas", "1", "--decode-replicas", "1", "--replicas", "2"],
        [
            "sweep",
            "--prefill-replicas",
            "1",
            "--decode-replicas",
            "1",
            "--grid",
            "seed=1,2",
            "--out",
            "x",
        ],
    ],
)
def test_flags_that_make_no_split_are_refused(flags: list[str], tmp_path: Path) -> None:
    done = run_here((*flags, "--trace", str(ROOT / "traces" / "chat.jsonl")), tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "-replicas" in done.stderr


HEEDS_EVENTS = ("dynamo-kv", "llm-d-precise")
PREFILL_SIDE, DECODE_SIDE = side("kv_producer"), side("kv_consumer")
MIXED = {**PREFILL_SIDE, "kv_transfer_config": {}}


@pytest.mark.parametrize(
    "kinds",
    [[MIXED], [MIXED] * 3, [PREFILL_SIDE] * 2 + [DECODE_SIDE] * 2],
    ids=["one", "several", "split"],
)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_comes_to_an_end(router: str, kinds: list[dict[str, Any]]) -> None:
    """The last request comes when all others are over, and routers look at idle replicas."""
    sent = trace(*((7 * i, 10 + i % 30, 1 + i % 9) for i in range(20)), (5000, 20, 3))
    if router in HEEDS_EVENTS and DECODE_SIDE in kinds:
        with pytest.raises(ConfigError, match="those of a prefill/decode split are not simulated"):
            simulate_fleet(sent, kinds, router)
        return
    with limited(LIMIT_S):
        result = simulate_fleet(sent, kinds, router)
    assert result.requests["status"] == ["completed"] * 21


def test_dynamo_splits_without_kv_events() -> None:
    kinds = [PREFILL_SIDE, DECODE_SIDE]
    result = simulate_fleet(TWO, kinds, "dynamo-kv", {"use_kv_events": False})
    assert result.requests["status"] == ["completed"] * 2


def test_time_that_passes_without_progress_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake of 10 s is more than a thousand looks, or a hundred."""
    monkeypatch.setattr("kvsim.fleet.dispatch.PATIENCE_LOOKS", 1000)
    kinds = [side(role, {"handshake_ms": 10_000.0}) for role in ("kv_producer", "kv_consumer")]
    every_ms = "min_stats_update_interval_ms"
    result = simulate_fleet(TWO, kinds, "vllm-dp", {every_ms: 100})
    assert result.requests["status"] == ["completed"] * 2
    with pytest.raises(ConfigError, match="1,000 times in a row while they computed nothing"):
        simulate_fleet(TWO, kinds, "vllm-dp", {every_ms: 1})
    # Where no replica has a request, there is nothing to wait for.
    simulate_fleet(trace((0, 20, 3), (20_000, 10, 2)), [MIXED] * 2, "vllm-dp", {every_ms: 1})
