"""The shipped traces come from their commands, and look like the traces they are made after."""

from __future__ import annotations

import hashlib
import statistics
from pathlib import Path
from random import Random

import numpy as np
import pytest
from made import read_with, without_lines
from places import ROOT

from kvsim.errors import ConfigError
from kvsim.workload import ParentContent, native, open_trace, synthetic
from kvsim.workload.synthetic import CALLS, KINDS, SESSIONS, synthesise

TRACES = ROOT / "traces"


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"agentx"}))
def test_a_shipped_trace_is_what_its_command_makes(kind: str, tmp_path: Path) -> None:
    shipped = TRACES / f"{kind}.jsonl"
    trace = synthesise(kind)
    native.write(trace, str(tmp_path / "again"))
    content = shipped.read_bytes()
    assert (tmp_path / "again").read_bytes() == content
    assert trace.sha256 == hashlib.sha256(content).hexdigest()
    assert len(content) < 300_000
    command = trace.source["command"]
    assert command == f"kvsim trace synth {kind} --seed 0"
    readme = (TRACES / "README.md").read_text()
    assert f"{command} --out traces/{kind}.jsonl" in readme


@pytest.mark.parametrize("kind", KINDS)
def test_a_synthetic_trace_keeps_the_rules_of_its_format(kind: str, tmp_path: Path) -> None:
    trace = synthesise(kind, 7, requests=90)
    native.write(trace, str(tmp_path / "x"))
    again = read_with(native.read, str(tmp_path / "x"))
    assert again.rows == trace.rows
    assert trace.source["command"].endswith("--seed 7 --requests 90")
    assert without_lines(synthesise(kind, 8, requests=90)) != without_lines(trace)
    assert synthesise(kind, 7, requests=40).rows == trace.rows[:40]


def near(values: list[int], published_quantiles: dict[int, float], tolerance: float) -> None:
    for share, expected in published_quantiles.items():
        assert np.percentile(values, share) == pytest.approx(expected, rel=tolerance), share


def test_chats_are_like_azure_prompts_and_mooncake_outputs() -> None:
    trace = open_trace(str(TRACES / "chat.jsonl"))
    prompts = [row.input_length for row in trace.rows]
    outputs = [row.output_length for row in trace.rows]
    near(prompts, {50: 1020, 90: 2735, 99: 4142}, 0.15)
    assert np.mean(prompts) == pytest.approx(1155, rel=0.15)
    near(outputs, {50: 350, 90: 597, 99: 1119}, 0.05)
    assert np.mean(outputs) == pytest.approx(343, rel=0.05)
    assert max(row.input_length + row.output_length for row in trace.rows) < 8192


def test_calls_are_like_azure_code() -> None:
    trace = open_trace(str(TRACES / "api.jsonl"))
    prompts = [row.input_length for row in trace.rows]
    near(prompts, {50: 1469, 90: 5188, 99: 7436}, 0.05)
    near([row.output_length for row in trace.rows], {50: 13, 90: 55, 99: 251}, 0.05)
    gaps = np.diff([row.arrival_ns or 0 for row in trace.rows])
    assert gaps.std() / gaps.mean() == pytest.approx(13.15, rel=0.2)


def test_agents_are_like_weka_sessions() -> None:
    trace = open_trace(str(TRACES / "agents.jsonl"))
    near([row.output_length for row in trace.rows], {50: 212, 90: 865}, 0.1)
    turns = [row for row in trace.rows if isinstance(row.content, ParentContent)]
    whole = rewritten = 0
    for row in turns:
        assert isinstance(row.content, ParentContent)
        parent = trace.rows[row.content.parent]
        kept_all = row.content.keep == parent.input_length + parent.output_length
        whole += kept_all
        rewritten += not kept_all
        assert row.session == parent.session
        assert row.turn == (parent.turn or 0) + 1
    assert rewritten / len(turns) == pytest.approx(SESSIONS["agents"].rewriting, abs=0.03)
    near([row.delay_ns // 1_000_000 for row in turns], {25: 5000, 50: 10_000, 90: 60_000}, 0.1)
    assert (
        max(row.input_length + row.output_length for row in trace.rows)
        <= SESSIONS["agents"].max_tokens
    )


def test_drawing_gives_the_quantiles() -> None:
    random = Random(1)
    values = [synthetic.draw(CALLS["input"], random) for _ in range(20_000)]
    near(values, {10: 147, 25: 578, 50: 1469, 75: 2745, 90: 5188}, 0.05)
    assert np.mean(values) == pytest.approx(synthetic.mean(CALLS["input"]), rel=0.02)
    assert (min(values), max(values)) >= (3, 7300)


def test_a_rate_sets_what_begins_in_a_second() -> None:
    slow, fast = (synthesise("api", requests=500, rate=rate) for rate in (1.0, 10.0))
    spans = [trace.rows[-1].arrival_ns or 0 for trace in (slow, fast)]
    assert spans[0] == pytest.approx(10 * spans[1], rel=1e-6)
    sessions = [row for row in synthesise("chat", rate=50.0).rows if row.turn == 0]
    assert len(sessions) / ((sessions[-1].arrival_ns or 0) / 1e9) == pytest.approx(50, rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "chats"}, "unknown 'chats'; did you mean 'chat'"),
        ({"kind": "chat", "requests": 0}, "requests: 0 is not above 0"),
        ({"kind": "chat", "rate": 0.0}, "rate: 0 is not in"),
        ({"kind": "chat", "rate": float("nan")}, "rate: nan is not in"),
    ],
)
def test_impossible_wishes_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        synthesise(**arguments)  # type: ignore[arg-type]


def test_agentx_has_the_published_marginals() -> None:
    """vLLM's AgentX post and vllm-project/router #285 (`kvsim.workload.synthetic`)."""
    rows = synthesise("agentx", 0, requests=12_000).rows
    sessions: dict[str, list[int]] = {}
    for row in rows:
        sessions.setdefault(row.session or "", []).append(row.index)
    ended = [name for name, turns in sessions.items() if rows[turns[-1]].extra == {"release": True}]
    whole = [name for name in ended if "/" not in name]
    parents = {name.split("/")[0] for name in sessions if "/" in name}
    assert statistics.median(len(sessions[name]) for name in whole) == pytest.approx(43, rel=0.1)
    assert statistics.median(row.input_length for row in rows) == pytest.approx(142_000, rel=0.05)
    assert statistics.median(row.output_length for row in rows) == pytest.approx(444, rel=0.05)
    assert len(parents & set(whole)) / len(whole) == pytest.approx(0.44, abs=0.1)
    kept = sum(
        row.content.keep if isinstance(row.content, ParentContent) else 18_000 for row in rows
    )
    assert kept / sum(row.input_length for row in rows) == pytest.approx(0.96, abs=0.01)
    pauses = [
        row.delay_ns / 1e9
        for row in rows
        if row.after >= 0 and rows[row.after].session == row.session
    ]
    assert sum(pause < 1 for pause in pauses) / len(pauses) == pytest.approx(0.8646, abs=0.01)
    assert sum(pause < 10 for pause in pauses) / len(pauses) == pytest.approx(0.9512, abs=0.01)
