"""The least number of replicas: what one less does, what it costs, for each router."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
from command import run_here

from kvsim.fleet import FleetConfig, make_settings
from kvsim.results.load import state_of
from kvsim.search.runner import Task, run_point
from kvsim.search.size import Bounds, Laboratory, Search, lasting_answer, make_knob
from kvsim.search.size_verdict import compared, cost_of, router_table, size_record, verdict
from kvsim.search.slo import parse_slo
from kvsim.search.store import Store, address
from kvsim.settings.config import make_config, to_table
from kvsim.workload.native import write
from kvsim.workload.spec import Workload, make_trace
from kvsim.writing import json_text

ONE_BY_ONE: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_model_len": 64,
    "async_scheduling": False,
    "request_rate": 25.0,
    "burstiness": inf,
    "cost": {
        "model": "constant",
        "step_us": 10_000,
        "prefill_token_us": 0,
        "decode_seq_us": 0,
        "context_token_ns": 0,
    },
}
"""Ten steps of 10 ms a request: 10 requests/s for each replica, and 25 come every second."""
LOAD = make_trace(Workload("random", requests=60, input_len=20, output_len=10), 1)


def search(folder: Path, router: str, **further: Any) -> Search:
    table = to_table(make_config(ONE_BY_ONE)) | {"router": router, "replicas": 1} | further
    base = make_settings(table)
    knob = make_knob("replicas", LOAD, table, Bounds())
    objectives = parse_slo("p99_ttft<500ms")._replace(steady=True)
    return lasting_answer(
        Laboratory(LOAD, base, knob, objectives, [0], Store(folder), jobs=1), ("arrivals",)
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Search]:
    folder = tmp_path_factory.mktemp("runs")
    return [search(folder, router) for router in ("round-robin", "session-affinity")]


def test_three_replicas_bear_what_two_and_a_half_could(found: list[Search]) -> None:
    lab, answer = found[0]
    assert (answer.value, answer.meets, answer.held) == (3, True, 16 * 60)
    figures = lab.tried[3].figures
    assert figures["request_throughput"] == pytest.approx(25, rel=0.05)
    less = lab.tried[2]
    assert less.overloaded
    assert less.figures["request_throughput"] == pytest.approx(20, rel=0.02)
    assert state_of(less.records[0]["figures"]) == "overloaded"


def test_the_verdict_says_what_one_less_does_and_what_it_costs(found: list[Search]) -> None:
    lab, answer = found[0]
    text = "\n".join(remark.text for remark in verdict(lab, answer, 2.5)).replace("\u00a0", " ")
    assert "The least number of replicas that keeps TTFT p99 < 500 ms: 3 replicas." in text
    assert "With 2 replicas, the objectives do not hold. Overloaded" in text
    assert "Cliff: with 2 replicas instead of 3 replicas (33.3 % less), TTFT p99 is " in text
    assert "also holds with 960" in text
    assert "3 GPUs cost $7.50 an hour" in text
    cost = cost_of(lab, answer, 2.5)
    assert cost is not None
    tokens = lab.tried[3].figures["total_token_rate"]
    assert cost.per_million_tokens == pytest.approx(7.5 / (tokens * 3600) * 1e6)


def test_the_verdict_says_what_holds_for_a_short_load_only(found: list[Search]) -> None:
    lab, answer = found[0]
    short = answer._replace(value=None, meets=False, too_short=6)
    text = verdict(lab, short)[0].text.replace("\u00a0", " ")
    assert text == (
        "No number of replicas up to 6 replicas that was tried keeps TTFT p99 < 500 ms with 960"
        " requests. With 240 they hold from 3 replicas on."
    )


def test_routers_stand_side_by_side(found: list[Search]) -> None:
    assert found[1].found.value is not None
    assert found[1].found.value > 3, "sessions are not spread evenly"
    _, table = router_table(found, 2.5)
    assert [row[0] for row in table] == ["round-robin", "session-affinity"]
    assert compared(found).text.endswith("replicas, behind round-robin.")
    assert "per GPU hour" not in str(verdict(*found[0]))


def test_the_record_has_each_router_with_its_answer(found: list[Search]) -> None:
    record = json.loads(json_text(size_record(found, 2.5)))
    assert record["find"] == "replicas"
    one, other = record["searches"]
    assert (one["router"], one["value"], one["longer_requests"]) == ("round-robin", 3, 960)
    assert (other["router"], other["value"]) == ("session-affinity", found[1].found.value)
    assert one["cost"]["gpus"] == 3
    tried = {each["value"]: each for each in one["tried"]}
    assert tried[2]["seeds_met"] == 0 and tried[3]["seeds_met"] == 1
    assert tried[3]["figures"] == found[0].lab.tried[3].figures


def test_gpus_of_a_replica_count(tmp_path: Path) -> None:
    lab, answer = search(tmp_path, "round-robin", tensor_parallel_size=2)
    cost = cost_of(lab, answer, 1.0)
    assert cost is not None
    assert cost.gpus == 2 * answer.value  # type: ignore[operator]
    assert f", {cost.gpus} GPUs in all. " in verdict(lab, answer)[0].text


def test_a_fleet_is_a_point_of_its_own() -> None:
    """One replica behind a router has the figures of a run, and an address of its own."""
    run, fleet = make_config(ONE_BY_ONE), make_settings({**ONE_BY_ONE, "replicas": 1})
    assert isinstance(fleet, FleetConfig)
    other = make_settings({**ONE_BY_ONE, "replicas": 1, "router": "random"})
    assert len({address(config, LOAD) for config in (run, fleet, other)}) == 3
    one, two = (run_point(Task("0" * 32, config), LOAD) for config in (run, fleet))
    assert one["outcome"]["kind"] == two["outcome"]["kind"] == "finished"
    assert one["engine"] == two["engine"]
    for key in one["figures"].keys() & two["figures"].keys():
        assert one["figures"][key] == pytest.approx(two["figures"][key]), key
    doubled = run_point(Task("0" * 32, make_settings({**ONE_BY_ONE, "replicas": 2})), LOAD)
    assert doubled["engine"]["kv_cache_bytes"] == 2 * one["engine"]["kv_cache_bytes"]


def test_replicas_and_routers_are_axes_of_a_sweep(tmp_path: Path) -> None:
    write(LOAD, str(tmp_path / "load.jsonl"))
    arguments = (
        "sweep", "--trace", "load.jsonl", "--request-rate", "400", "--max-model-len", "256",
        "--grid", "replicas=1,2", "--grid", "router=round-robin,least-loaded",
        "--slo", "p99_ttft<10s", "--jobs", "1", "--out", "out",
    )  # fmt: skip
    result = run_here(arguments, tmp_path)
    assert result.returncode == 0, result.stderr
    points = [json.loads(path.read_text()) for path in (tmp_path / "out/points").glob("*.json")]
    tried = {(each["config"]["replicas"], each["config"]["router"]) for each in points}
    assert len(tried) == len(points) == 4
    assert all(each["figures"]["completed"] == 60 for each in points)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--find", "replicas", "--replicas", "3"], "leave it out"),
        (["--find", "replicas", "--router", "nobody"], "unknown 'nobody'"),
        (["--find", "replicas", "--router-set", "x"], "'x' is no KEY=VALUE"),
        (["--find", "replicas", "--from", "5", "--to", "2"], "nothing between"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    write(LOAD, str(tmp_path / "load.jsonl"))
    base = ("size", "--trace", "load.jsonl", "--slo", "p99_ttft<1s", "--max-model-len", "64")
    result = run_here((*base, "--request-rate", "9", "--jobs", "1", *arguments), tmp_path)
    assert result.returncode == 2, result.stdout
    assert words in result.stderr
    assert len([line for line in result.stderr.splitlines() if "note:" not in line]) == 1
