"""A TOML file of replicas whose settings differ."""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from command import run_here

FILE = """
model = "llama-3-8b"
max_model_len = 4096
num_prompts = 40
router = "dynamo-kv"

[router_args]
kv_event_delay_ms = 2

[cost]
model = "constant"
step_us = 9000

[[replicas]]
count = 2
num_gpu_blocks_override = 700

[[replicas]]
num_gpu_blocks_override = 500
max_num_seqs = 8
cost = { step_us = 12000 }
"""


def run_file(tmp_path: Path, text: str, *arguments: str) -> CompletedProcess[str]:
    (tmp_path / "fleet.toml").write_text(text, encoding="utf-8")
    base = ("run", "--trace", "chat", "--config", "fleet.toml", "--no-report", "--out", "out")
    return run_here((*base, *arguments), tmp_path)


def written(tmp_path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The figures of all, and the description of each replica."""
    fleet = json.loads((tmp_path / "out" / "fleet.json").read_text())
    each = [
        json.loads((tmp_path / "out" / f"replica-{number}" / "summary.json").read_text())["meta"]
        for number in range(len(fleet["replicas"]))
    ]
    return fleet, each


def test_each_kind_has_its_own_settings_over_the_shared_ones(tmp_path: Path) -> None:
    result = run_file(tmp_path, FILE)
    assert result.returncode == 0, result.stderr
    fleet, each = written(tmp_path)
    assert fleet["meta"]["router"] == {"name": "dynamo-kv", "args": {"kv_event_delay_ms": 2}}
    assert [meta["num_gpu_blocks"] for meta in each] == [699, 699, 499]
    assert [meta["config"]["max_num_seqs"] for meta in each] == [1024, 1024, 8]
    assert ["9000 us" in cost for cost in fleet["meta"]["cost_sources"]] == [True, True, False]
    assert "12000 us" in fleet["meta"]["cost_sources"][2]
    assert fleet["num_requests"] == 40


def test_flags_count_more_than_the_file(tmp_path: Path) -> None:
    flags = ("--router", "least-loaded", "--num-gpu-blocks-override", "600", "--num-prompts", "9")
    text = FILE.replace("kv_event_delay_ms = 2", "")
    result = run_file(tmp_path, text, *flags)
    assert result.returncode == 0, result.stderr
    fleet, each = written(tmp_path)
    assert fleet["meta"]["router"]["name"] == "least-loaded"
    assert [meta["num_gpu_blocks"] for meta in each] == [599] * 3
    assert fleet["num_requests"] == 9


def test_a_number_of_equal_replicas_is_enough(tmp_path: Path) -> None:
    text = 'model = "llama-3-8b"\nnum_prompts = 9\nreplicas = 2\n'
    assert run_file(tmp_path, text).returncode == 0
    assert len(written(tmp_path)[1]) == 2
    assert run_file(tmp_path, text, "--replicas", "3").returncode == 0
    assert len(written(tmp_path)[1]) == 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("count = 2", "count = 0", "fleet.toml: replicas[0]: count: expected `int` >= 1"),
        ("count = 2", "request_rate = 3.0", "replicas[0]: request_rate is for all replicas"),
        ("count = 2", "max_num_sqs = 3", "replicas[0]: unknown key 'max_num_sqs'"),
        ("count = 2", "router = 'random'", "replicas[0]: unknown key 'router'"),
        ('router = "dynamo-kv"', "router = 3", "fleet.toml: router: expected `str`"),
        ('router = "dynamo-kv"', "replicas = 0", "fleet.toml"),
        ("kv_event_delay_ms", "kv_event_delay", "takes no 'kv_event_delay'"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    result = run_file(tmp_path, FILE.replace(old, new))
    assert result.returncode == 2, result.stdout
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_replicas_are_either_listed_or_counted(tmp_path: Path) -> None:
    result = run_file(tmp_path, FILE, "--replicas", "2")
    assert result.returncode == 2
    assert "--replicas: " in result.stderr
    assert "lists its replicas" in result.stderr


@pytest.mark.parametrize(
    ("listed", "said"),
    [("[]", "replicas: expected `int` >= 1"), ("[3]", "replicas[0]: expected a table of settings")],
)
def test_a_list_of_replicas_is_of_tables_and_not_empty(
    tmp_path: Path, listed: str, said: str
) -> None:
    result = run_file(tmp_path, f"replicas = {listed}")
    assert result.returncode == 2
    assert f"fleet.toml: {said}" in result.stderr
