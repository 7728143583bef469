"""`kvsim cache`: what it prints, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run_here
from made import make_trace
from places import ROOT

from kvsim.cachelab.study import Asked, study_trace
from kvsim.cachelab.wording import sentences
from kvsim.workload.reuse import Counting

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
    assert record["input_tokens"] == 4_854_766
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("curve", AGENTS, "--gib", "8"), "--gib: needs --model"),
        (
            ("curve", AGENTS, "--gib", "0.000001", "--model", "llama-3.1-8b"),
            "hold no block of 2,097,152 bytes; give more",
        ),
        (("curve", AGENTS, "--warm-up", "600"), "--warm-up: 600 of 600 requests"),
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
