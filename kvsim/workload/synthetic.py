"""Makes traces of four kinds of load, reproducibly, after public traces.

| kind | what | after |
|---|---|---|
| `chat` | short conversations over shared system prompts | Azure prompts, Mooncake outputs |
| `api` | bursts of completion calls, most of them on files seen before | Azure code |
| `agents` | sessions that append to a growing context until it is full | WEKA Claude Code |
| `agentx` | long sessions of tool calls, with subagents and hints | vLLM's AgentX post |

Lengths and times have the quantiles of `synthetic.toml`. Other figures have no public source (what
is shared, how many turns a chat has). They are chosen, and the trace's `source.note` says so.

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
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, pairwise
from math import exp, log
from pathlib import Path
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


_FILE = tomllib.loads(Path(__file__).with_name("synthetic.toml").read_text("utf-8"))


def _drawn(table: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the file, with points in place of texts."""
    return {key: quantiles(x) if isinstance(x, str) else x for key, x in table.items()}


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


def _sessions(kind: str) -> Sessions:
    said = _drawn(_FILE[kind]["sessions"])
    systems = (tuple((name, tokens) for name, tokens in each) for each in said.pop("systems"))
    return Sessions(tuple(systems), **said)


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


def _session_turns(kind: str, random: Random, per_s: float) -> Iterator[Turn]:
    """Turns of all sessions, in order of arrival, for ever; sessions begin at random (Poisson)."""
    load = SESSIONS[kind]
    waiting: list[tuple[int, int, Turn]] = []
    # Orders turns of one moment, which cannot be compared themselves.
    serial = count()
    clock_s = 0.0
    for number in count():
        clock_s += random.expovariate(per_s)
        start_ns = round(clock_s * 1000) * _NS_PER_MS
        # No session that begins later has a turn before these.
        while waiting and waiting[0][0] <= start_ns:
            turn = heapq.heappop(waiting)[2]
            yield turn
            following = _next_turn(load, turn, random)
            if following is not None:
                heapq.heappush(waiting, (following.arrival_ns, next(serial), following))
        first = _first_turn(load, start_ns, f"s{number}", random)
        heapq.heappush(waiting, (start_ns, next(serial), first))


SESSIONS = {"chat": _sessions("chat"), "agents": _sessions("agents")}


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
    # What is drawn, and in which order, makes the traces that ship: neither may change.
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


CALLS = _drawn(_FILE["api"]["calls"])
"""Tokens of prompts and outputs, and microseconds from one call to the next."""
_INSTRUCTIONS = 48
"""Tokens of the instructions that begin every call long enough for them."""
_OPEN_FILES = 24
"""Files that calls are about, at any time."""
_SAME_FILE = 0.7
"""Chance that a call is about an open file; otherwise it opens a new one."""


def _api_turns(random: Random, per_s: float) -> Iterator[Turn]:
    """Completion calls: instructions, then a part of a file, then tokens unique to the call."""
    clock_us = 0
    scale = 1e6 / mean(CALLS["gap_us"]) / per_s
    files = [f"file-{number}" for number in range(_OPEN_FILES)]
    for number in count(_OPEN_FILES):
        length = draw(CALLS["input"], random)
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
            output_length=draw(CALLS["output"], random),
            segments=segments,
        )
        clock_us += round(draw(CALLS["gap_us"], random) * scale)


# Of `agentx`, up to the kinds.
_FIRST_MS, _NEXT_MS = 500, 12
"""Milliseconds until the first token of an answer, and to each further one."""


class _Tool(NamedTuple):
    share: float
    pause_ms: Quantiles
    pause_s: float
    """Median."""
    ttl_s: float


_TOOLS = {name: _Tool(**_drawn(each)) for name, each in _FILE["agentx"]["tools"].items()}
_THREADS = _drawn(_FILE["agentx"]["threads"])
_MEDIAN_TURNS, _SPREAD_TURNS = 43, 0.7
_SUBAGENTS = 0.44
"""Share of sessions that have any."""
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
    made = _thread(random, name, start_ns, draw(_THREADS["prompt"], random), turns)
    found: list[Turn] = []
    late_ns = 0
    for number, turn in enumerate(made):
        turn.arrival_ns += late_ns
        if number in branches:
            before = made[number - 1]
            begin_ns = _end_ns(before) + 50 * _NS_PER_MS
            length = draw(_THREADS["sub_turns"], random)
            inner = _thread(
                random, f"{name}/{number}", begin_ns, draw(_THREADS["sub_prompt"], random), length
            )
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
    made = [Turn(start_ns, shared + prompt, draw(_THREADS["output"], random), _SHARED, name, 0)]
    while len(made) < turns:
        before = made[-1]
        before.hints, pause_ns = _tool_call(random)
        keep = before.input_length + before.output_length
        grown = max(1, draw(_THREADS["growth"], random))
        if keep + grown > _MOST_TOKENS:
            keep, grown = shared, _SUMMARY_TOKENS
        made.append(
            Turn(
                _end_ns(before) + pause_ns,
                keep + grown,
                draw(_THREADS["output"], random),
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


_TURNS: dict[str, Callable[[Random, float], Iterator[Turn]]] = {
    "chat": partial(_session_turns, "chat"),
    "api": _api_turns,
    "agents": partial(_session_turns, "agents"),
    "agentx": _agentx_turns,
}
KINDS = {
    name: Kind(turns, *(_FILE[name][key] for key in ("requests", "rate", "note")))
    for name, turns in _TURNS.items()
}
"""Name → kind."""
