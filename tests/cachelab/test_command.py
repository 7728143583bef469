"""`kvsim cache`: what it prints, what it refuses, and its pages in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import run_here

from kvsim.cachelab.audit import Audit
from kvsim.cachelab.study import study_trace
from kvsim.cachelab.wording import Audited, sentences
from kvsim.pages.cache import build_audit, build_curve
from kvsim.workload import open_trace
from kvsim.workload.reuse import Counting

AGENTS = str(Path(__file__).resolve().parents[2] / "traces/agents.jsonl")


def test_the_answer_in_words() -> None:
    found = run_here("cache", "curve", AGENTS, "--gib", "8", "--model", "llama-3.1-8b")
    assert found.returncode == 0, found.stderr
    text = " ".join(found.stdout.split())
    assert "At 8.0 GiB, LRU finds 30.0 % of the prompt tokens: 56.1 % of what any" in text
    assert "Twice the memory gives +10.8 points with LRU; the best policy could give" in text
    assert "4,096 65,536 8.0 GiB 30.0 % 53.5 %" in text


def test_figures_as_json() -> None:
    found = run_here("cache", "curve", AGENTS, "--capacity", "4096", "--json")
    record = json.loads(found.stdout)
    point = next(each for each in record["points"] if each["capacity_blocks"] == 4096)
    assert record["input_tokens"] == 4_854_766
    assert point["lru_tokens"] <= point["optimum_tokens"] <= record["ceiling_tokens"]
    reused = record["reused_tokens_by_distance"]
    assert sum(map(sum, reused.values())) == record["ceiling_tokens"]


def test_policies_beside_the_optimum() -> None:
    command = ("cache", "policies", AGENTS, "--capacity", "4096", "--block-size", "64")
    found = run_here(*command, "--policy", "lru", "--policy", "sglang-lru", "--json")
    record = json.loads(found.stdout)
    lru, tree = record["policies"]
    assert lru["single_blocks_tokens"] == lru["closed_tokens"] <= record["optimum_tokens"]["4096"]
    assert tree["single_blocks_tokens"] is None
    assert tree["interval"][0] <= tree["gain_over_lru"] <= tree["interval"][1]


def test_an_audit_of_a_run_and_of_other_evictions(tmp_path: Path) -> None:
    made = run_here(
        *("run", "--trace", AGENTS, "--engine", "vllm-v1", "--num-gpu-blocks-override", "4000"),
        *("--num-prompts", "120", "--out", str(tmp_path / "run"), "--no-report"),
    )
    assert made.returncode == 0, made.stderr
    page = tmp_path / "audit.html"
    command = ("cache", "audit", str(tmp_path / "run"), "--eviction", "belady")
    found = run_here(*command, "--json")
    first, oracle = json.loads(found.stdout)
    for each in (first, oracle):
        named = {k: v for k, v in each.items() if k not in ("run", "oracle", "prompt_tokens")}
        assert sum(named.values()) == each["prompt_tokens"] > 0
    assert (first["oracle"], oracle["oracle"]) == (False, True)
    shown = run_here(*command, "--out", str(page))
    assert "belady (ORACLE)" in shown.stdout
    assert "belady (ORACLE)" in page.read_text(encoding="utf-8")
    changed = tmp_path / "run" / "summary.json"
    text = changed.read_text(encoding="utf-8")
    sha256 = json.loads(text)["meta"]["trace"]["sha256"]
    changed.write_text(text.replace(sha256, "0" * 64), encoding="utf-8")
    refused = run_here(*command)
    assert refused.returncode == 1 or "has changed since; run it again" in refused.stderr


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
            "eviction: no 'arcc'; did you mean 'arc'",
        ),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], words: str) -> None:
    found = run_here("cache", *arguments)
    assert found.returncode == 2
    assert words in " ".join(found.stderr.split())


def test_a_trace_that_repeats_nothing_says_so() -> None:
    api = str(Path(AGENTS).with_name("api.jsonl"))
    assert sentences(study_trace(open_trace(api), Counting(16), capacities=[100])) == [
        "No prompt repeats what an earlier one had: no cache finds anything."
    ]


def test_the_pages_are_drawn_without_a_complaint(opened: Callable[..., Any]) -> None:
    study = study_trace(
        open_trace(AGENTS), Counting(64), capacities=[1024], block_bytes=64 * 131_072
    )
    page = opened("cache-curve", build_curve(study))
    assert page.noise == []
    assert page.locator("h1").inner_text() == "Caches of every size: agents.jsonl"
    assert page.locator(".js-plotly-plot").count() == 3
    page.close()
    found = Audit(100, 50, 20, 10, 5, 0, 5, 0, 10, 0)
    runs = [Audited("lru", found), Audited("belady", found, oracle=True)]
    page = opened("cache-audit", build_audit(runs), drawn=False)
    assert page.noise == []
    assert "belady (ORACLE)" in page.locator("body").inner_text()
    page.close()
