"""`kvsim cache`: what it prints, what it refuses."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest
from command import run_here
from made import jsonl, make_trace
from marks import long
from places import ROOT

from kvsim.explain.cache_curve import Asked, open_recording, study_recording, study_trace
from kvsim.explain.cache_eviction import Recorded, audit
from kvsim.report import read_results, read_transitions
from kvsim.report.pages.cache import sentences
from kvsim.workload import open_trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting
from kvsim.workload.source import Source

AGENTS = str(ROOT / "traces/agents.jsonl")


def test_the_answer_in_words() -> None:
    found = run_here(["cache", "curve", AGENTS, "--gib", "8", "--model", "llama-3.1-8b"])
    assert found.returncode == 0, found.stderr
    text = " ".join(found.stdout.split())
    assert "At 8.0 GiB, LRU finds 30.0 % of the prompt tokens: 56.1 % of what any" in text
    assert "Twice the memory gives +10.8 points with LRU; the best policy could give" in text
    assert "4,096 65,536 8.0 GiB 30.0 % 53.5 %" in text


def test_figures_as_json() -> None:
    found = run_here(["cache", "curve", AGENTS, "--capacity", "4096", "--json"])
    record = json.loads(found.stdout)
    point = next(each for each in record["points"] if each["capacity_blocks"] == 4096)
    assert record["input_tokens"] == sum(row.input_length for row in open_trace(AGENTS).rows)
    assert point["lru_tokens"] <= point["optimum_tokens"] <= record["ceiling_tokens"]
    reused = record["reused_tokens_by_distance"]
    assert sum(map(sum, reused.values())) == record["ceiling_tokens"]


def test_policies_beside_the_optimum() -> None:
    command = ["cache", "policies", AGENTS, "--capacity", "4096", "--block-size", "64"]
    found = run_here([*command, "--policy", "lru", "--policy", "sglang-lru", "--json"])
    record = json.loads(found.stdout)
    lru, tree = record["policies"]
    assert lru["single_blocks_tokens"] == lru["closed_tokens"] <= record["optimum_tokens"]["4096"]
    assert tree["single_blocks_tokens"] is None
    assert tree["interval"][0] <= tree["gain_over_lru"] <= tree["interval"][1]


@long
def test_an_audit_of_a_run_and_of_other_evictions(tmp_path: Path) -> None:
    made = run_here(
        [
            *("run", "--trace", AGENTS, "--engine", "vllm-v1", "--num-gpu-blocks-override", "4000"),
            *("--num-prompts", "120", "--out", str(tmp_path / "run"), "--no-report"),
        ]
    )
    assert made.returncode == 0, made.stderr
    page = tmp_path / "audit.html"
    command = ["cache", "audit", str(tmp_path / "run"), "--eviction", "belady"]
    found = run_here([*command, "--json"])
    first, oracle = json.loads(found.stdout)
    for each in (first, oracle):
        named = {k: v for k, v in each.items() if k not in ("run", "oracle", "prompt_tokens")}
        assert sum(named.values()) == each["prompt_tokens"] > 0
    assert (first["oracle"], oracle["oracle"]) == (False, True)
    shown = run_here([*command, "--out", str(page)])
    assert "belady (ORACLE)" in shown.stdout
    assert "belady (ORACLE)" in page.read_text(encoding="utf-8")
    changed = tmp_path / "run" / "summary.json"
    text = changed.read_text(encoding="utf-8")
    sha256 = json.loads(text)["meta"]["trace"]["sha256"]
    changed.write_text(text.replace(sha256, "0" * 64), encoding="utf-8")
    refused = run_here(command)
    assert refused.returncode == 2
    assert "has changed since; run it again" in refused.stderr


def test_a_stream_counts_what_the_whole_trace_gives(tmp_path: Path) -> None:
    """Random prompts of two scopes and two salts, and unique ones."""
    rng = Random(7)
    facts = {"block_size": 4, "hash_kind": "prefix", "partial_hash": True}
    lines: list[dict[str, Any]] = [{"kvsim_trace": 1, **facts}]
    for _ in range(300):
        length = rng.randint(1, 40)
        row: dict[str, Any] = {"input_length": length, "output_length": 1, "tags": {}}
        if rng.random() < 0.9:
            branch = 100 * rng.randrange(3)
            row["hash_runs"] = [[branch, 1], [branch + rng.choice([1, 50]), -(-length // 4) - 1]]
            row["hash_runs"] = [run for run in row["hash_runs"] if run[1]]
            if length % 4:  # The id of a partial block is its own.
                *full, (start, count) = row["hash_runs"]
                own = [10**6 + 10 * (start + count) + length % 4, 1]
                row["hash_runs"] = [*full, [start, count - 1], own] if count > 1 else [*full, own]
            row["scope"], row["salt"] = rng.choice("ab"), rng.choice("xy")
        lines.append(row)
    path = tmp_path / "recording.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shown = ["--capacity", "9", "--warm-up", "20", "--json"]
    whole, streamed = (
        json.loads(run_here(["cache", how, str(path), *shown]).stdout)
        for how in ("curve", "stream")
    )
    for point in whole["points"]:
        point["optimum_tokens"] = None
    whole["reused_tokens_by_distance"] = {}
    assert whole == streamed
    assert 0 < whole["points"][3]["lru_tokens"] < whole["ceiling_tokens"]
    text = run_here(["cache", "stream", str(path), "--capacity", "9"]).stdout
    assert "LRU finds 5.3" in text
    assert "optimum" not in text


def test_a_stream_keeps_no_rows(tmp_path: Path) -> None:
    """A row takes no memory of its own, but for what the curve collects and then sums up."""
    found = []
    for number in (500, 2000):
        rows = [
            {"input_length": 64, "output_length": 1, "hash_ids": [i % 8]} for i in range(number)
        ]
        header = {"kvsim_trace": 1, "block_size": 64, "hash_kind": "prefix", "partial_hash": True}
        path = jsonl(tmp_path, header, *rows)
        tracemalloc.start()
        with Source(path) as source:
            study_recording(*open_recording(source), Asked())
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (found[1] - found[0]) / 1500 < 100


def test_an_audit_of_each_replica_of_a_fleet(tmp_path: Path) -> None:
    """Each of its requests is known by its own prompt."""
    fleet = tmp_path / "fleet"
    few = ["--num-prompts", "60", "--num-gpu-blocks-override", "2500", "--no-report"]
    made = run_here(["run", "--trace", AGENTS, *few, "--replicas", "2", "--out", str(fleet)])
    assert made.returncode == 0, made.stderr
    both = json.loads(run_here(["cache", "audit", str(fleet), "--json"]).stdout)
    assert [each["run"] for each in both] == ["replica-0", "replica-1"]
    summary, requests, steps = read_results(fleet / "replica-1")
    trace = open_trace(AGENTS)
    every, index = streams(trace), {row.id: row.index for row in trace.rows}
    own = [every[index[id]] for id in requests["id"]]
    log = read_transitions(fleet / "replica-1", summary)
    found = audit(Recorded(summary, requests, steps, log, own))
    assert both[1] == {"run": "replica-1", "oracle": False, **found._asdict()}
    alone = json.loads(run_here(["cache", "audit", str(fleet / "replica-1"), "--json"]).stdout)
    assert {**alone[0], "run": "replica-1"} == both[1]
    for folder, words in ((fleet, "is a fleet, and"), (fleet / "replica-1", "is a replica, and")):
        refused = run_here(["cache", "audit", str(folder), "--eviction", "lru"])
        assert (refused.returncode, words in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("curve", AGENTS, "--gib", "8"), "--gib: needs --model"),
        (
            ("curve", AGENTS, "--gib", "0.000001", "--model", "llama-3.1-8b"),
            "hold no block of 2,097,152 bytes; give more",
        ),
        (("curve", AGENTS, "--warm-up", "600"), "--warm-up: 600 of 600 requests"),
        *(
            (("curve", AGENTS, "--gib", gib, "--model", "tiny"), f"--gib: {gib} is not above 0 and")
            for gib in ("inf", "0", "-1")
        ),
        (("curve", AGENTS, "--capacity", "9" * 30), "not in the range 1<=x<="),
        (("stream", AGENTS), "no native trace of chained hash ids; use kvsim cache curve"),
        (("sample", AGENTS, "--capacity", "9", "--rate", "2"), "rate: 2 is not above 0"),
        (
            ("policies", AGENTS, "--capacity", "9", "--policy", "arcc"),
            "eviction: unknown 'arcc'; did you mean 'arc'",
        ),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], words: str) -> None:
    found = run_here(["cache", *arguments])
    assert found.returncode == 2
    assert words in " ".join(found.stderr.split())


def test_a_trace_that_repeats_nothing_says_so() -> None:
    trace = make_trace([(40, 9, None)] * 3)
    assert sentences(study_trace(trace, Counting(16), Asked([100]))) == [
        "No prompt repeats what an earlier one had: no cache finds anything."
    ]
