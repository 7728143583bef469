"""Makes traces of four kinds of load, reproducibly, after public traces.

| kind | what | after |
|---|---|---|
| `chat` | short conversations over shared system prompts | Azure prompts, Mooncake outputs |
| `api` | bursts of completion calls, most of them on files seen before | Azure code |
| `agents` | sessions that append to a growing context until it is full | WEKA Claude Code |
| `agentx` | long sessions of tool calls, with subagents and hints | vLLM's AgentX post |

Lengths and times have the quantiles below. Other figures have no public source (what is shared, how
many turns a chat has). They are chosen here, and the trace's `source.note` says so.

For `agentx`, vLLM's AgentX post (vllm.ai/blog/2026-09-08-vllm-agentx, as vLLM #57103 quotes it) has
medians of 43 turns a session, 142,000 tokens a prompt and 444 an output, hits above 96 %, and
subagents in 44 % of the sessions. vllm-project/router #285 has the pauses of 32 tasks: 86.46 % of
an agent's requests follow within 1 s, 95.12 % within 10 s. Chosen here: how turns, growth and
pauses are spread around these figures, which tools take which pauses, the shared beginning of
18,000 tokens, what a compaction keeps, and how long subagents work.

A turn's hints say what its client knows when it sends it or reads its answer, and never how long
the pause will be: `tool` that its answer calls, `pause_s` that this tool takes in the median,
`ttl_s` within which it nearly always returns, `retain` 1 if the session surely goes on, `release`
where a session or a subagent ends, `prefetch` where a long pause will end.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice, pairwise
from math import exp, log
from random import Random
from typing import Any, NamedTuple

from kvsim.core.vectors import added
from kvsim.errors import ConfigError, nearest
from kvsim.workload import native
from kvsim.workload.trace import Content, ParentContent, Row, SegmentContent, Trace

Quantiles = tuple[tuple[float, float], ...]
Segments = tuple[tuple[str, int], ...]


def quantiles(text: str) -> Quantiles:
    """Points as `SHARE VALUE, ...`."""
    points = (point.split() for point in text.split(","))
    return tuple((float(share), float(value)) for share, value in points)


def draw(quantiles: Quantiles, random: Random) -> int:
    """A random whole number with these quantiles, linear in between."""
    share = random.random()
    above = bisect_right(quantiles, share, key=lambda point: point[0])
    (low_share, low), (high_share, high) = quantiles[above - 1], quantiles[above]
    return round(low + (high - low) * (share - low_share) / (high_share - low_share))


def mean(quantiles: Quantiles) -> float:
    """The mean of the values of `draw`, before rounding."""
    return added((q - p) * (low + high) / 2 for (p, low), (q, high) in pairwise(quantiles))


@dataclass(slots=True)
class Turn:
    """A request without a position in the file yet."""

    arrival_ns: int
    input_length: int
    output_length: int
    segments: Segments = ()
    session: str | None = None
    turn: int | None = None
    before: Turn | None = None
    """The turn with whose tokens its prompt begins."""
    keep: int = 0
    think_ns: int = 0
    index: int = -1
    """Its position in the file, once it has one."""
    after: Turn | None = None
    """The turn that it waits for, if that is not `before`."""
    hints: dict[str, Any] | None = None
    """What it says to policies, as keys of its own (`x_NAME`) by NAME."""


AZURE_CODE_INPUT = quantiles(
    "0 3, 0.05 75, 0.1 147, 0.25 578, 0.5 1469, 0.75 2745, 0.9 5188, 0.95 7303, 0.99 7436, 1 7437"
)
"""Prompt tokens; mean 2,048."""

AZURE_CODE_OUTPUT = quantiles(
    "0 6, 0.1 7, 0.25 9, 0.5 13, 0.75 24, 0.9 55, 0.95 90, 0.99 251, 0.995 359, 0.999 825, 1 1899"
)
"""Output tokens; mean 27.9."""

AZURE_CODE_GAP_US = quantiles(
    "0 0, 0.05 100, 0.1 200, 0.25 2100, 0.5 63800, 0.75 104000,"
    " 0.9 272900, 0.95 400800, 0.99 2205100, 0.995 9978300, 0.999 79232500, 1 217169000"
)
"""Microseconds between arrivals; mean 389,653, coefficient of variation 13.15."""

MOONCAKE_OUTPUT = quantiles(
    "0 1, 0.05 10, 0.1 24, 0.25 157, 0.5 350, 0.75 472, 0.9 597, 0.95 698, 0.99 1119, 1 2000"
)
"""Output tokens; mean 343."""

WEKA_GROWTH = quantiles(
    "0 0, 0.1 0, 0.25 44, 0.5 274, 0.75 993, 0.9 2731, 0.95 5104, 0.99 16152, 1 23830"
)
"""Tokens that a turn adds to prompt and output of the turn before, cut at the 99.5 % quantile."""

WEKA_OUTPUT = quantiles(
    "0 1, 0.05 88, 0.1 101, 0.25 137, 0.5 212, 0.75 427, 0.9 865, 0.95 1464, 0.99 4659, 1 5900"
)
"""Output tokens, cut at the 99.5 % quantile."""

WEKA_THINK_MS = quantiles(
    "0 0, 0.05 3000, 0.1 4000, 0.25 5000, 0.5 10000, 0.75 38000, 0.8 60000, 1 60000"
)
"""Think times in milliseconds, cut at 60 s as in the replay tool of the same authors."""

WEKA_REWRITES = 0.069
"""Share of turns that do not extend the turn before but rewrite history."""


_NS_PER_MS = 1_000_000
_FIRST_TOKEN_MS, _TOKEN_MS = 200, 20
"""Assumed service times, for the recorded arrivals of turns after the first."""
_SLOWEST, _FASTEST = 1e-6, 1e6
"""Rates in 1/s whose times stay within the trace format."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """A load of sessions whose turns continue the turn before."""

    systems: tuple[Segments, ...]
    """Shared beginnings of prompts; the k-th is chosen 1/k times as often as the first."""
    first: Quantiles
    """Tokens of a session's first message."""
    message: Quantiles
    """Tokens that a later turn adds to prompt and output of the turn before."""
    output: Quantiles
    think_ms: Quantiles
    going_on: float
    """Chance of another turn."""
    rewriting: float
    """Chance that a turn keeps only a part of the conversation."""
    max_tokens: int
    """A session ends before a request with more tokens than this, prompt and output together."""


CHAT = Sessions(
    systems=((("assistant", 280),), (("support", 560),), (("tutor", 140),)),
    first=((0, 4), (0.5, 150), (0.75, 400), (0.9, 1100), (0.99, 3000), (1, 4000)),
    message=((0, 2), (0.5, 60), (0.75, 160), (0.9, 400), (0.99, 1400), (1, 3000)),
    output=MOONCAKE_OUTPUT,
    think_ms=((0, 1000), (0.5, 8000), (0.9, 30_000), (1, 90_000)),
    going_on=0.66,
    rewriting=0.0,
    max_tokens=8191,
)
AGENTS = Sessions(
    systems=(
        (("tools", 1480), ("coder", 640)),
        (("tools", 1480), ("reviewer", 420)),
        (("tools", 1480), ("researcher", 560)),
    ),
    first=((0, 60), (0.5, 500), (0.9, 3200), (1, 8000)),
    message=WEKA_GROWTH,
    output=WEKA_OUTPUT,
    think_ms=WEKA_THINK_MS,
    going_on=1.0,
    rewriting=WEKA_REWRITES,
    max_tokens=23_999,
)


def synthesise(
    kind: str, seed: int = 0, *, requests: int | None = None, rate: float | None = None
) -> Trace:
    """A trace of a kind of `KINDS`. Equal arguments give equal traces.

    `requests`: number of requests. `rate`: sessions or (`api`) requests that begin per second on
    average. Both default to those of the shipped traces. Raises `ConfigError`.
    """
    load = kind_of(kind)
    size = load.requests if requests is None else requests
    per_s = load.rate if rate is None else rate
    if size < 1:
        raise ConfigError(f"requests: {size} is not above 0")
    if not _SLOWEST <= per_s <= _FASTEST:
        raise ConfigError(f"rate: {per_s:g} is not in {_SLOWEST:g} .. {_FASTEST:g}")
    rows: list[Row] = []
    for turn in islice(load.turns(Random(f"{kind} {seed}"), per_s), size):
        turn.index = len(rows)
        rows.append(_row(turn))
    command = f"kvsim trace synth {kind} --seed {seed}"
    command += "" if requests is None else f" --requests {requests}"
    command += "" if rate is None else f" --rate {rate:g}"
    return made_trace(kind, rows, command, load.note)


def kind_of(name: str) -> Kind:
    """The kind with this name. Raises `ConfigError`."""
    if name not in KINDS:
        near, known = nearest(name, (*KINDS, "random")), ", ".join(KINDS)
        raise ConfigError(
            f"kind of trace: unknown {name!r};{near} choose from {known}; on the command line also"
            " random"
        )
    return KINDS[name]


def made_trace(kind: str, rows: list[Row], command: str, note: str) -> Trace:
    """A trace of these rows, with the checksum of its native file."""
    source = {"format": "synthetic", "command": command, "note": note}
    trace = Trace(path=f"{kind}.jsonl", format="native", sha256="", rows=rows, source=source)
    text = "".join(f"{line}\n" for line in native.lines(trace))
    trace.sha256 = hashlib.sha256(text.encode()).hexdigest()
    return trace


def _row(turn: Turn) -> Row:
    before = turn.before
    content: Content | None = None
    if before is not None:
        content = ParentContent(before.index, turn.keep)
    elif turn.segments:
        content = SegmentContent(turn.segments)
    return Row(
        index=turn.index,
        id=str(turn.index),
        line=turn.index + 2,
        arrival_ns=turn.arrival_ns,
        input_length=turn.input_length,
        output_length=turn.output_length,
        content=content,
        after=-1 if (after := turn.after or before) is None else after.index,
        delay_ns=turn.think_ns,
        session=turn.session,
        turn=turn.turn,
        extra=turn.hints,
    )


def _session_turns(load: Sessions, random: Random, per_s: float) -> Iterator[Turn]:
    """Turns of all sessions, in order of arrival, for ever; sessions begin at random (Poisson)."""
    waiting: list[tuple[int, int, Turn]] = []
    serial = count()
    clock_s = 0.0
    for number in count():
        clock_s += random.expovariate(per_s)
        start_ns = round(clock_s * 1000) * _NS_PER_MS
        while waiting and waiting[0][0] <= start_ns:
            turn = heapq.heappop(waiting)[2]
            yield turn
            following = _next_turn(load, turn, random)
            if following is not None:
                heapq.heappush(waiting, (following.arrival_ns, next(serial), following))
        first = _first_turn(load, start_ns, f"s{number}", random)
        heapq.heappush(waiting, (start_ns, next(serial), first))


def _first_turn(load: Sessions, start_ns: int, session: str, random: Random) -> Turn:
    weights = [1 / (k + 1) for k in range(len(load.systems))]
    system = random.choices(load.systems, weights)[0]
    length = sum(tokens for _, tokens in system)
    return Turn(
        arrival_ns=start_ns,
        input_length=length + draw(load.first, random),
        output_length=draw(load.output, random),
        segments=system,
        session=session,
        turn=0,
    )


def _next_turn(load: Sessions, turn: Turn, random: Random) -> Turn | None:
    """The turn that follows, or None if the session ends."""
    if random.random() >= load.going_on:
        return None
    keep = turn.input_length + turn.output_length
    if random.random() < load.rewriting:
        keep = round(keep * random.random())
    think_ns = draw(load.think_ms, random) * _NS_PER_MS
    service_ns = (_FIRST_TOKEN_MS + _TOKEN_MS * turn.output_length) * _NS_PER_MS
    following = Turn(
        arrival_ns=turn.arrival_ns + service_ns + think_ns,
        input_length=keep + max(1, draw(load.message, random)),
        output_length=draw(load.output, random),
        session=turn.session,
        turn=(turn.turn or 0) + 1,
        before=turn,
        keep=keep,
        think_ns=think_ns,
    )
    fits = following.input_length + following.output_length <= load.max_tokens
    return following if fits else None


_INSTRUCTIONS = 48
"""Tokens of the instructions that begin every call long enough for them."""
_OPEN_FILES = 24
"""Files that calls are about, at any time."""
_SAME_FILE = 0.7
"""Chance that a call is about an open file; otherwise it opens a new one."""


def _api_turns(random: Random, per_s: float) -> Iterator[Turn]:
    """Completion calls: instructions, then a part of a file, then tokens unique to the call."""
    clock_us = 0
    scale = 1e6 / mean(AZURE_CODE_GAP_US) / per_s
    files = [f"file-{number}" for number in range(_OPEN_FILES)]
    for number in count(_OPEN_FILES):
        length = draw(AZURE_CODE_INPUT, random)
        segments: Segments = ()
        if length > _INSTRUCTIONS + 16:
            place = random.randrange(_OPEN_FILES)
            if random.random() >= _SAME_FILE:
                files[place] = f"file-{number}"
            shared = round((length - _INSTRUCTIONS) * random.uniform(0.5, 0.95))
            segments = (("instructions", _INSTRUCTIONS), (files[place], shared))
        yield Turn(
            arrival_ns=clock_us * 1000,
            input_length=length,
            output_length=draw(AZURE_CODE_OUTPUT, random),
            segments=segments,
        )
        clock_us += round(draw(AZURE_CODE_GAP_US, random) * scale)


# Of `agentx`, up to the kinds.
_FIRST_MS, _NEXT_MS = 500, 12
"""Milliseconds until the first token of an answer, and to each further one."""


class _Tool(NamedTuple):
    share: float
    pause_ms: Quantiles
    pause_s: float
    """Median."""
    ttl_s: float


_TOOLS = {
    "file": _Tool(0.80, quantiles("0 20, 0.5 150, 0.9 600, 1 999"), 0.15, 1),
    "shell": _Tool(0.1512, quantiles("0 300, 0.427 999, 0.8 4000, 1 9999"), 1.4, 10),
    "wait": _Tool(0.0488, quantiles("0 10000, 0.5 60000, 0.9 240000, 1 900000"), 60, 300),
}
"""What an answer calls: the files at hand, a command, or what takes minutes (a build, a person)."""

_PROMPT = quantiles("0 50000, 0.5 105000, 0.9 140000, 1 160000")
_GROWTH = quantiles("0 40, 0.25 300, 0.5 1000, 0.75 2300, 0.9 4500, 0.99 12000, 1 22000")
_OUTPUT = quantiles("0 40, 0.25 190, 0.5 444, 0.75 800, 0.9 1600, 0.99 5000, 1 8000")
_MEDIAN_TURNS, _SPREAD_TURNS = 43, 0.7
_SUBAGENTS = 0.44
"""Share of sessions that have any."""
_SUB_TURNS, _SUB_PROMPT = quantiles("0 3, 0.5 8, 1 24"), quantiles("0 2000, 0.5 9000, 1 30000")
_MOST_TOKENS = 200_000
"""A prompt beyond that is compacted first: its beginning stays, a summary follows."""
_SHARED: Segments = (("tools", 14_000), ("rules", 4_000))
_SUMMARY_TOKENS = 85_000


def _agentx_turns(random: Random, per_s: float) -> Iterator[Turn]:
    """Turns of sessions that begin at random (Poisson), for ever, in order of arrival."""
    clock_s, coming = 0.0, list[Turn]()
    for number in count():
        clock_s += random.expovariate(per_s)
        start_ns = round(clock_s * 1000) * _NS_PER_MS
        coming += _agentx_session(random, f"s{number}", start_ns)
        coming.sort(key=lambda turn: turn.arrival_ns)
        ready = sum(turn.arrival_ns < start_ns for turn in coming)
        yield from coming[:ready]
        del coming[:ready]


def _agentx_session(random: Random, name: str, start_ns: int) -> list[Turn]:
    """The turns of a session and of its subagents."""
    turns = max(2, round(exp(log(_MEDIAN_TURNS) + _SPREAD_TURNS * random.gauss(0, 1))))
    branches = set[int]()
    if random.random() < _SUBAGENTS:
        branches = {random.randrange(1, turns) for _ in range(random.choice((1, 1, 2, 3)))}
    made = _thread(random, name, start_ns, draw(_PROMPT, random), turns)
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
    made = [Turn(start_ns, shared + prompt, draw(_OUTPUT, random), _SHARED, name, 0)]
    while len(made) < turns:
        before = made[-1]
        before.hints, pause_ns = _tool_call(random)
        keep, grown = before.input_length + before.output_length, max(1, draw(_GROWTH, random))
        if keep + grown > _MOST_TOKENS:
            keep, grown = shared, _SUMMARY_TOKENS
        made.append(
            Turn(
                _end_ns(before) + pause_ns,
                keep + grown,
                draw(_OUTPUT, random),
                session=name,
                turn=len(made),
                before=before,
                keep=keep,
                think_ns=pause_ns,
            )
        )
    made[-1].hints = {"release": True}
    return made


def _tool_call(random: Random) -> tuple[dict[str, Any], int]:
    """The hints of an answer that calls a tool, and the pause in ns."""
    [name] = random.choices(list(_TOOLS), [tool.share for tool in _TOOLS.values()])
    tool = _TOOLS[name]
    hints: dict[str, Any] = {"tool": name, "pause_s": tool.pause_s, "ttl_s": tool.ttl_s}
    hints |= {"prefetch": True} if name == "wait" else {"retain": 1}
    return hints, draw(tool.pause_ms, random) * _NS_PER_MS


def _end_ns(turn: Turn) -> int:
    return turn.arrival_ns + (_FIRST_MS + _NEXT_MS * turn.output_length) * _NS_PER_MS


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of synthetic trace, with the size and the rate of the shipped one."""

    turns: Callable[[Random, float], Iterator[Turn]]
    requests: int
    rate: float
    note: str


KINDS = {
    "chat": Kind(
        lambda random, per_s: _session_turns(CHAT, random, per_s),
        requests=1200,
        rate=5.0,
        note="outputs after Mooncake conversation (FAST25), prompts near Azure conversation"
        " (2023); system prompts, turns and think times chosen",
    ),
    "api": Kind(
        _api_turns,
        requests=1500,
        rate=8.0,
        note="prompts, outputs and burstiness after Azure code (2023); the rate and what calls"
        " share chosen",
    ),
    "agents": Kind(
        lambda random, per_s: _session_turns(AGENTS, random, per_s),
        requests=600,
        rate=0.2,
        note="growth, outputs, think times and rewriting after WEKA Claude Code sessions; first"
        " prompts chosen, sessions end before 24,000 tokens",
    ),
    "agentx": Kind(
        _agentx_turns,
        requests=1500,
        rate=0.02,
        note="turns, prompts, outputs and subagents with the medians of vLLM's AgentX post; pauses"
        " with the shares of vllm-project/router #285; the rest chosen",
    ),
}
"""Name → kind."""
