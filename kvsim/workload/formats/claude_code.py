"""Claude Code's transcripts (`~/.claude/projects/*/SESSION.jsonl`): a line for each message.

The traps: one answer of the model is written as a line for each of its parts, with the same
`message.id`, and the last has the final `usage`; a prompt is what was read from the cache, written
to it and neither (`cache_read_input_tokens`, `cache_creation_input_tokens`, `input_tokens`); there
is the time when a part was written, none when the request was sent, so a request begins when the
line before its first part was written; `<synthetic>` answers called no model.

What the server found in its cache is taken as the beginning of the prompt before it in the thread:
main thread and sub-agents (`isSidechain`) of a session are one each. Requests follow each other.
Policies see as `tool` the last tool that an answer calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvsim.workload.chain import settle_kind
from kvsim.workload.gather import Gathered
from kvsim.workload.source import NS_PER_S, Head, Source, date, parse, tokens
from kvsim.workload.trace import HashContent, Trace, collapse

BLOCK_SIZE = 16
_NOTE = "what was in the cache is taken to be of the prompt before: more may be shared"
_PROMPT = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")


@dataclass(slots=True)
class _Answer:
    """One answer of the model, gathered from its lines."""

    thread: str
    start_ns: int
    end_ns: int
    usage: dict[str, Any]
    model: str | None
    line: int
    tool: str | None = None
    """The last tool that it calls."""


@dataclass(slots=True)
class _Thread:
    """What a thread has come to."""

    ids: list[int] = field(default_factory=list)
    """Ids of the blocks of its last prompt."""
    row: int = -1
    end_ns: int = 0
    turns: int = 0


def recognises(head: Head) -> bool:
    """Whether there are messages of sessions, with the tokens of a cache."""
    words = ("sessionId", "message", "cache_read_input_tokens")
    return head.is_json and all(f'"{word}"' in head.text for word in words)


def read(source: Source) -> Trace:
    """The requests of a transcript. Raises `TraceError` at the first wrong line."""
    gathered = Gathered(source, "claude-code")
    threads: dict[str, _Thread] = {}
    named = 0
    for name, answer in _answers(source, gathered).items():
        source.line = answer.line
        cached, *fresh = (_count(source, answer.usage, key) for key in _PROMPT)
        prompt, output = cached + sum(fresh), _count(source, answer.usage, "output_tokens")
        if not prompt or not output:
            gathered.drop("they have no prompt or no output")
            continue
        thread = threads.setdefault(answer.thread, _Thread())
        kept = thread.ids[: cached // BLOCK_SIZE]
        new = prompt // BLOCK_SIZE - len(kept)
        thread.ids = [*kept[: prompt // BLOCK_SIZE], *range(named, named + new)]
        named += new
        thread.row = gathered.add(
            prompt,
            output,
            time_ns=answer.start_ns,
            id=name,
            content=HashContent(collapse(thread.ids)),
            after=thread.row,
            delay_ns=max(0, answer.start_ns - thread.end_ns) if thread.row >= 0 else 0,
            session=answer.thread,
            turn=thread.turns,
            model=answer.model,
            extra=None if answer.tool is None else {"tool": answer.tool},
            observed={"e2e_s": max(0, answer.end_ns - answer.start_ns) / NS_PER_S},
        ).index
        thread.end_ns, thread.turns = answer.end_ns, thread.turns + 1
    trace = gathered.trace(_NOTE)
    trace.block_size, trace.partial_hash = BLOCK_SIZE, False
    settle_kind(trace)
    return trace


def _answers(source: Source, gathered: Gathered) -> dict[str, _Answer]:
    """The answers by the id of their message, in the order of their first lines."""
    found: dict[str, _Answer] = {}
    before: dict[str, int] = {}
    for line in source.lines():
        table = parse(source, line)
        if not isinstance(written := table.get("timestamp"), str):
            continue
        time_ns = date(source, "timestamp", written)
        thread = f"{table.get('sessionId')}{'/side' if table.get('isSidechain') else ''}"
        message = table.get("message")
        start_ns, before[thread] = min(before.get(thread, time_ns), time_ns), time_ns
        if table.get("type") != "assistant" or not isinstance(message, dict):
            continue
        name, usage, model = message.get("id"), message.get("usage"), message.get("model")
        if model == "<synthetic>":
            gathered.drop("they called no model")
            continue
        if not isinstance(name, str) or not isinstance(usage, dict):
            raise source.error("no id or no usage; give the transcript as written", "message")
        if name in found:
            found[name].end_ns, found[name].usage = max(found[name].end_ns, time_ns), usage
        else:
            model = model if isinstance(model, str) else None
            found[name] = _Answer(thread, start_ns, time_ns, usage, model, source.line)
        found[name].tool = _tool(message) or found[name].tool
    return found


def _tool(message: dict[str, Any]) -> str | None:
    """The last tool that a part of an answer calls."""
    parts = message.get("content")
    calls = [
        part.get("name")
        for part in (parts if isinstance(parts, list) else ())
        if isinstance(part, dict) and part.get("type") == "tool_use"
    ]
    return next((name for name in reversed(calls) if isinstance(name, str)), None)


def _count(source: Source, usage: dict[str, Any], key: str) -> int:
    return tokens(source, f"message.usage.{key}", usage.get(key) or 0, 0)
