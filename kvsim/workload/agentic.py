"""Sessions of coding agents with the published marginals, and the hints that a client could give.

vLLM's AgentX post (vllm.ai/blog/2026-09-08-vllm-agentx, as vLLM #57103 quotes it) has medians of
43 turns a session, 142,000 tokens a prompt and 444 an output, hits above 96 %, and subagents in
44 % of the sessions. vllm-project/router #285 has the pauses of 32 tasks: 86.46 % of an agent's
requests follow within 1 s, 95.12 % within 10 s.

Chosen here: how turns, growth and pauses are spread around these figures, which tools take which
pauses, the shared beginning of 18,000 tokens, what a compaction keeps, and how long subagents work.

A turn's hints say what its client knows when it sends it or reads its answer, and never how long
the pause will be: `tool` that its answer calls, `pause_s` that this tool takes in the median,
`ttl_s` within which it nearly always returns, `retain` 1 if the session surely goes on, `release`
where a session or a subagent ends, `prefetch` where a long pause will end.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import exp, log
from random import Random
from typing import Any, NamedTuple

from kvsim.workload.drawn import Quantiles, Segments, Turn, draw, quantiles

_NS_PER_MS = 1_000_000
_FIRST_TOKEN_MS, _TOKEN_MS = 500, 12
"""Assumed service times, for the recorded arrivals of turns after the first."""


class _Tool(NamedTuple):
    share: float
    pause_ms: Quantiles
    pause_s: float
    """Median."""
    ttl_s: float


TOOLS = {
    "file": _Tool(0.80, quantiles("0 20, 0.5 150, 0.9 600, 1 999"), 0.15, 1),
    "shell": _Tool(0.1512, quantiles("0 300, 0.427 999, 0.8 4000, 1 9999"), 1.4, 10),
    "wait": _Tool(0.0488, quantiles("0 10000, 0.5 60000, 0.9 240000, 1 900000"), 60, 300),
}
"""What an answer calls: the files at hand, a command, or what takes minutes (a build, a person)."""

PROMPT = quantiles("0 50000, 0.5 105000, 0.9 140000, 1 160000")
GROWTH = quantiles("0 40, 0.25 300, 0.5 1000, 0.75 2300, 0.9 4500, 0.99 12000, 1 22000")
OUTPUT = quantiles("0 40, 0.25 190, 0.5 444, 0.75 800, 0.9 1600, 0.99 5000, 1 8000")
_MEDIAN_TURNS, _SPREAD_TURNS = 43, 0.7
_SUBAGENTS = 0.44
"""Share of sessions that have any."""
_SUB_TURNS, _SUB_PROMPT = quantiles("0 3, 0.5 8, 1 24"), quantiles("0 2000, 0.5 9000, 1 30000")
MAX_TOKENS = 200_000
"""A prompt beyond that is compacted first: its beginning stays, a summary follows."""
_SHARED: Segments = (("tools", 14_000), ("rules", 4_000))
_SUMMARY_TOKENS = 85_000


def agentic_turns(random: Random, per_s: float) -> Iterator[Turn]:
    """Turns of sessions that begin at random (Poisson), for ever, in order of arrival."""
    clock_s, coming = 0.0, list[Turn]()
    for number in count():
        clock_s += random.expovariate(per_s)
        start_ns = round(clock_s * 1000) * _NS_PER_MS
        coming += _session(random, f"s{number}", start_ns)
        coming.sort(key=lambda turn: turn.arrival_ns)
        ready = sum(turn.arrival_ns < start_ns for turn in coming)
        yield from coming[:ready]
        del coming[:ready]


def _session(random: Random, name: str, start_ns: int) -> list[Turn]:
    """The turns of a session and of its subagents."""
    turns = max(2, round(exp(log(_MEDIAN_TURNS) + _SPREAD_TURNS * random.gauss(0, 1))))
    branches = set[int]()
    if random.random() < _SUBAGENTS:
        branches = {random.randrange(1, turns) for _ in range(random.choice((1, 1, 2, 3)))}
    made = _thread(random, name, start_ns, draw(PROMPT, random), turns)
    found: list[Turn] = []
    late_ns = 0
    for number, turn in enumerate(made):
        turn.arrival_ns += late_ns
        if number in branches:
            before = made[number - 1]
            begin_ns = _end_ns(before) + 50 * _NS_PER_MS
            length = draw(_SUB_TURNS, random)
            inner = _thread(random, f"{name}/{number}", begin_ns, draw(_SUB_PROMPT, random), length)
            inner[0].after, inner[0].think_ns = before, 50 * _NS_PER_MS
            before.hints = {"tool": "agent", "pause_s": 60, "ttl_s": 300, "retain": 1}
            turn.after, turn.think_ns = inner[-1], 20 * _NS_PER_MS
            came_ns = _end_ns(inner[-1]) + turn.think_ns
            late_ns, turn.arrival_ns = late_ns + came_ns - turn.arrival_ns, came_ns
            found += inner
        found.append(turn)
    return found


def _thread(random: Random, name: str, start_ns: int, prompt: int, turns: int) -> list[Turn]:
    """The turns of one thread, which begins with what all sessions share."""
    shared = sum(tokens for _, tokens in _SHARED)
    made = [Turn(start_ns, shared + prompt, draw(OUTPUT, random), _SHARED, name, 0)]
    while len(made) < turns:
        before = made[-1]
        before.hints, pause_ns = _call(random)
        keep, grown = before.input_length + before.output_length, max(1, draw(GROWTH, random))
        if keep + grown > MAX_TOKENS:
            keep, grown = shared, _SUMMARY_TOKENS
        made.append(
            Turn(
                _end_ns(before) + pause_ns,
                keep + grown,
                draw(OUTPUT, random),
                session=name,
                turn=len(made),
                before=before,
                keep=keep,
                think_ns=pause_ns,
            )
        )
    made[-1].hints = {"release": True}
    return made


def _call(random: Random) -> tuple[dict[str, Any], int]:
    """The hints of an answer that calls a tool, and the pause in ns."""
    [name] = random.choices(list(TOOLS), [tool.share for tool in TOOLS.values()])
    tool = TOOLS[name]
    hints: dict[str, Any] = {"tool": name, "pause_s": tool.pause_s, "ttl_s": tool.ttl_s}
    hints |= {"prefetch": True} if name == "wait" else {"retain": 1}
    return hints, draw(tool.pause_ms, random) * _NS_PER_MS


def _end_ns(turn: Turn) -> int:
    return turn.arrival_ns + (_FIRST_TOKEN_MS + _TOKEN_MS * turn.output_length) * _NS_PER_MS
