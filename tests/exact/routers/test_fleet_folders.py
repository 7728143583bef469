"""Folders of several replicas: written, read, drawn, compared, or refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_here
from marks import long
from msgspec.structs import replace
from places import ROOT

from kvsim.fleet import (
    FleetRun,
    contender,
    explain_fleets,
    find_bounds,
    fleet_run,
    read_fleet,
    simulate_contender,
    simulate_fleet,
    summarise_fleet,
)
from kvsim.settings.config import make_config
from kvsim.workload import open_trace

CHAT = str(ROOT / "traces" / "chat.jsonl")
SETTINGS = {"num_prompts": 60, "max_model_len": 4096, "num_gpu_blocks_override": 300}
FLAGS = [f"--{key.replace('_', '-')}={value}" for key, value in SETTINGS.items()]
BASE = ["--trace", CHAT, *FLAGS]


def replayed(router: str) -> FleetRun:
    settings: dict[str, Any] = {"model": "llama-3-8b", **SETTINGS}
    result = simulate_fleet(CHAT, [settings] * 2, router, explain=True)
    return fleet_run(result, summarise_fleet(result, find_bounds(open_trace(CHAT), result)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two fleets, `turns` and `hash`, and a run of one engine, `one`."""
    folder = tmp_path_factory.mktemp("fleets")
    for name, *more in (
        ("turns", "--replicas", "2"),
        ("hash", "--replicas", "2", "--router", "session-affinity"),
        ("one", "--no-report"),
    ):
        made = run_here(("run", *BASE, "--out", name, *more), folder)
        assert made.returncode == 0, made.stderr
    return folder


def test_what_is_read_is_what_was_made(folders: Path) -> None:
    made, read = replayed("round-robin"), read_fleet(folders / "turns")
    assert {**read.summary, "meta": None} == {**made.summary, "meta": None}
    assert read.requests.keys() >= made.requests.keys()
    for name, column in made.requests.items():
        assert np.array_equal(np.asarray(column), np.asarray(read.requests[name])), name
    for name, column in made.decisions.items():
        assert np.array_equal(column, read.decisions[name]), name


def test_replicas_keep_the_seeds_that_they_were_given() -> None:
    settings: dict[str, Any] = {"model": "llama-3-8b", **SETTINGS, "num_prompts": 8}
    each = [make_config({**settings, "seed": seed}) for seed in (3, 7)]
    fleet, trace = contender(each, "round-robin", {}), open_trace(CHAT)
    for first, seeds in ((3, [3, 7]), (5, [5, 9])):
        run = simulate_contender(trace, replace(fleet, seed=first))
        assert [one.summary["meta"]["seed"] for one in run.replicas] == seeds


def test_report_makes_the_same_page_again(folders: Path) -> None:
    page = folders / "turns" / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert run_here(("report", "turns"), folders).returncode == 0
    assert page.read_bytes() == before


def test_why_finds_the_replica_of_a_request(folders: Path) -> None:
    run = read_fleet(folders / "hash")
    for id in run.requests["id"][:3]:
        told = run_here(("why", "hash", "--request", id), folders)
        assert told.returncode == 0, told.stderr
        place = run.requests["id"].index(id)
        replica = f"hash/replica-{run.requests['replica'][place]}"
        assert told.stdout == run_here(("why", replica, "--request", id), folders).stdout


def test_diff_names_the_first_request_that_went_elsewhere(folders: Path) -> None:
    told = run_here(("diff", "turns", "hash", "--out", "difference"), folders)
    assert told.returncode == 0, told.stderr
    one, other = read_fleet(folders / "turns"), read_fleet(folders / "hash")
    elsewhere = np.flatnonzero(one.requests["replica"] != other.requests["replica"])
    first = elsewhere[np.argmin(one.decisions["time_ns"][elsewhere])]
    said = (
        f"{len(elsewhere)} of 60\u00a0requests went to another replica."
        f" Request {first} was the first of them."
    )
    assert said in told.stdout
    assert "router: round-robin → session-affinity" in told.stdout
    record = json.loads((folders / "difference" / "diff.json").read_text())
    assert said in record["first_divergence_words"]
    page = (folders / "difference" / "diff.html").read_text()
    for section in ("Where the difference comes from", "Replicas", "Decisions", "Settings"):
        assert f"<h2>{section}</h2>" in page
    sums = {fall["metric"]: fall["difference_ns"] for fall in record["waterfalls"]}
    assert sums.keys() == {"ttft", "e2el"}


def test_a_fleet_is_as_itself(folders: Path) -> None:
    run = read_fleet(folders / "turns")
    explained = explain_fleets(("a", run), ("b", run))
    assert explained.same
    assert explained.divergence_words == ["Both routers sent every request to the same replica."]


@pytest.mark.parametrize(
    "command",
    [
        ("diff", "turns", "one"),
        ("diff", "one", "turns"),
        ("timeline", "turns", "--out", "tracks.json"),
        ("why", "turns/replica-9", "--request", "1"),
        ("why", "turns", "--request", "nobody"),
        ("report", "turns/replica-9"),
    ],
)
def test_what_shows_one_engine_is_refused_in_one_line(
    folders: Path, command: tuple[str, ...]
) -> None:
    told = run_here(command, folders)
    assert told.returncode == 2
    assert len(told.stderr.splitlines()) == 1
    if {"nobody", "turns/replica-9"}.isdisjoint(command):
        assert "turns: holds several replicas; give the folder of one" in told.stderr


def test_damaged_folders_are_refused(folders: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"

    def told() -> str:
        result = run_here(("report", "damaged"), tmp_path)
        assert result.returncode == 2, result.stdout
        assert len(result.stderr.splitlines()) == 1
        return result.stderr

    shutil.copytree(folders / "turns", damaged)
    shutil.copy(folders / "hash" / "routing.parquet", damaged)
    assert "files of different runs" in told()
    shutil.copy(folders / "one" / "steps.parquet", damaged / "routing.parquet")
    assert "routing.parquet: column request is missing" in told()
    (damaged / "routing.parquet").unlink()
    assert "routing.parquet: no such file" in told()
    (damaged / "fleet.json").write_text("{}")
    assert "fleet.json: not a kvsim summary" in told()
    shutil.copy(folders / "turns" / "routing.parquet", damaged)
    text = (folders / "turns" / "fleet.json").read_text()
    meta = json.loads(text)["meta"]
    for change, said in [
        ({"routing": None}, "routing: None, but the tables give"),
        ({"routing": {"bounds": 7}}, "routing: {'bounds': 7}, but the tables give"),
        ({"replicas": 3}, "replicas: 3, but the tables give"),
        ({"load_imbalance": 7.0}, "load_imbalance: 7.0, but the tables give"),
        ({"meta": {**meta, "replicas": 3}}, "replica-2: no such folder"),
        ({"meta": {**meta, "replicas": 0}}, "files of different runs"),
        ({"meta": {**meta, "router": "x"}}, "meta.router: expected"),
        ({"meta": {**meta, "router": None}}, "meta.router: expected"),
        ({"meta": {**meta, "prefix_caching": None}}, "meta.prefix_caching: expected"),
    ]:
        (damaged / "fleet.json").write_text(json.dumps({**json.loads(text), **change}))
        assert said in told()


def test_compare_sets_routers_side_by_side(tmp_path: Path) -> None:
    routers = "round-robin,session-affinity,least-loaded"
    base = ("compare", *BASE, "--replicas", "2", "--out", "out")
    told = run_here((*base, "--router", routers), tmp_path)
    assert told.returncode == 0, told.stderr
    assert "router: round-robin, session-affinity, least-loaded" in told.stdout
    for name in routers.split(","):
        run = read_fleet(tmp_path / "out" / name)
        assert run.summary["meta"]["router"]["name"] == name
        assert len(run.replicas) == 2
    page = (tmp_path / "out" / "comparison.html").read_text()
    for section in ("Differences", "Why", "All figures", "Decisions and replicas"):
        assert f"<h2>{section}</h2>" in page


@long
def test_compare_tests_routers_on_seeds_and_on_one_replay(tmp_path: Path) -> None:
    pair = ("--replicas", "2", "--router", "round-robin,session-affinity", "--json", "--jobs", "1")
    replay = run_here(("compare", *BASE, *pair, "--seeds", "2"), tmp_path)
    assert replay.returncode == 0, replay.stderr
    record = json.loads(replay.stdout)
    assert record["method"] == "stretches" or record["seeds"] == [0, 1]
    drawn = run_here(("compare", *BASE, *pair, "--seeds", "2", "--request-rate", "40"), tmp_path)
    assert json.loads(drawn.stdout)["seeds"] == [0, 1]


@pytest.mark.parametrize("arguments", [(), ("--replicas", "2"), ("--router", "random")])
def test_compare_needs_two(arguments: tuple[str, ...], tmp_path: Path) -> None:
    told = run_here(("compare", *BASE, *arguments), tmp_path)
    assert told.returncode == 2
    assert "give two configurations or more" in told.stderr
    assert len(told.stderr.splitlines()) == 1
