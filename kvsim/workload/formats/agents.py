"""Sessions of coding agents.

WEKA's: one JSON object per session, or a folder of such files.

The traps (callanjfox/kv-cache-tester, `traces`):

- Ids are blocks of 64 tokens, chained, **without** the partial last one, and mean nothing outside
  their file.
- `t` counts seconds from the start of the session, and in a sub-agent (an entry with `requests` of
  its own) from the start of that. Files have no date: the sessions of a folder begin at random
  moments of one hour, the same in every reading.
- `out` may be 0, which is read as 1. `think_time` may be missing, which is read as 0.
- A prompt is not always the prompt and output before it: 7 % of the turns rewrite their history.
  Where a prompt does continue them, its ids also name the blocks that the output filled.
- Some sessions are copies of each other.

Where an answer calls a tool, policies see `tool` of its request, and `release` of the last request
of a sub-agent (`kvsim.policies.sessions`).

A request follows the one before it in its thread, `think_time` seconds after its end. A sub-agent
follows the last request of its parent; its parent does not wait for it. `Row.observed` has `ttft_s`
and `e2e_s`.

Claude Code's transcripts (`~/.claude/projects/*/SESSION.jsonl`): a line for each message.

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

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from kvsim.errors import TraceError
from kvsim.workload.chain import settle_kind
from kvsim.workload.gather import Gathered, date, instant, integer, integers, next_turn, tokens
from kvsim.workload.source import NS_PER_S, Source, read_objects, shown, tables
from kvsim.workload.trace import MAX_ID, HashContent, Row, Trace, collapse

WINDOW_S = 3600
"""The sessions of a folder begin within this time."""
_COPIES_SHARE = 3
_OBSERVED = {"ttft": "ttft_s", "api_time": "e2e_s"}


def read_weka(source: Source) -> Trace:
    """The requests of one session, from time 0. Raises `TraceError` naming the request."""
    gathered = Gathered(source, "weka")
    session = _Session(source, gathered, 0)
    return _settled(gathered.trace(), session.block_size, source.sha256)


def read_weka_folder(path: Path) -> Trace:
    """The sessions of all files in a folder, in order of their names. Raises `TraceError`."""
    random = Random("kvsim weka sessions")
    digest = hashlib.sha256()
    names: dict[str, str] = {}
    beginnings = set()
    gathered = block_size = None
    # `trace_*.json`, if there are any, else every JSON file.
    for file in sorted(path.glob("trace_*.json")) or sorted(path.glob("*.json")):
        with Source(str(file)) as source:
            gathered = gathered or Gathered(source, "weka")
            gathered.source = source
            start_ns = round(random.random() * WINDOW_S * NS_PER_S)
            session = _Session(source, gathered, start_ns)
            beginnings.add(session.beginning)
            digest.update(source.sha256.encode())
            block_size = block_size or session.block_size
            if session.block_size != block_size:
                what = (
                    f"{session.block_size}, but {block_size} in other files; keep those of one size"
                )
                raise source.error(what, "block_size", 0)
            if session.name in names:
                what = f"{shown(session.name)} is also in {names[session.name]}; keep one of them"
                raise source.error(what, "id", 0)
            names[session.name] = file.name
    if gathered is None or block_size is None:
        raise TraceError(f"{path}: a folder without WEKA session files; give one trace file")
    trace = gathered.trace(
        f"sessions begin at random moments of {WINDOW_S:,} s: files have no date"
    )
    if copies := len(names) - len(beginnings):
        trace.notes.append(
            f"{copies:,} of {len(names):,} sessions begin with the same {_COPIES_SHARE} requests as"
            " another and may be copies"
        )
    trace.source["file"] = path.name
    return _settled(replace(trace, path=str(path)), block_size, digest.hexdigest())


class _Session:
    """One file: its requests, and those of its sub-agents, are added to those gathered before."""

    def __init__(self, source: Source, gathered: Gathered, start_ns: int) -> None:
        self._source, self._gathered = source, gathered
        table = read_objects(source)[0]
        if not isinstance(table.get("id"), str):
            raise self._error("id", "not a string")
        self.name: str = table["id"]
        self.block_size = integer(source, table, "block_size", 1)
        requests = table.get("requests")
        if not isinstance(requests, list):
            raise self._error("requests", "not a list")
        self.beginning = str(requests[:_COPIES_SHARE])
        """Its first requests as text, by which copies are found."""
        self._thread(requests, self.name, "requests", start_ns, None)

    def _thread(
        self, entries: list[Any], name: str, where: str, start_ns: int, parent: Row | None
    ) -> None:
        """Add the requests of a thread; the first follows `parent`."""
        before, turn = parent, 0
        last: tuple[Row, list[int]] | None = None
        for number, entry in enumerate(entries):
            place = f"{where}[{number}]"
            if not isinstance(entry, dict):
                raise self._error(place, "not an object")
            time_ns = start_ns + instant(self._source, f"{place}.t", entry.get("t"), NS_PER_S)
            if isinstance(entry.get("requests"), list):
                inner = f"{name}/{number}"
                self._thread(entry["requests"], inner, f"{place}.requests", time_ns, before)
                continue
            ids = self._ids(entry, place)
            row = self._request(entry, place, time_ns, before, f"{name}/{number}", ids)
            row.session, row.turn = name, turn
            if last is not None:
                _name_output(*last, row, ids, self.block_size)
            before, last, turn = row, (row, ids), turn + 1
        if parent is not None and last is not None:
            last[0].extra = {**(last[0].extra or {}), "release": True}

    def _request(
        self,
        entry: dict[str, Any],
        place: str,
        time_ns: int,
        before: Row | None,
        id: str,
        ids: list[int],
    ) -> Row:
        output_length = tokens(self._source, f"{place}.out", entry.get("out"), 0)
        if not output_length:
            self._gathered.change("out 0 read as 1")
        delay_ns, think = 0, entry.get("think_time")
        if think is not None and before is not None:
            delay_ns = max(0, instant(self._source, f"{place}.think_time", think, NS_PER_S))
        elif before is not None:
            self._gathered.change("no think_time: read as 0")
        observed = {
            name: float(entry[key])
            for key, name in _OBSERVED.items()
            if type(entry.get(key)) in (int, float)
        }
        return self._gathered.add(
            tokens(self._source, f"{place}.in", entry.get("in")),
            max(1, output_length),
            time_ns=time_ns,
            id=id,
            content=HashContent(collapse(ids)),
            after=-1 if before is None else before.index,
            delay_ns=delay_ns,
            scope=self.name,
            model=entry.get("model"),
            observed=observed or None,
            extra={"tool": "any"} if entry.get("stop") == "tool_use" else None,
        )

    def _ids(self, entry: dict[str, Any], place: str) -> list[int]:
        """The ids of a prompt: one for each whole block."""
        if "hash_ids" not in entry:
            raise self._error(f"{place}.hash_ids", "missing")
        ids = integers(self._source, entry, "hash_ids", MAX_ID)
        length = tokens(self._source, f"{place}.in", entry.get("in"))
        if len(ids) != length // self.block_size:
            expected = f"{length // self.block_size} = floor({length}/{self.block_size})"
            raise self._error(f"{place}.hash_ids", f"{len(ids)} ids, expected {expected}")
        return ids

    def _error(self, where: str, what: str) -> TraceError:
        remedy = "give the session as it was published"
        return self._source.error(f"{what}; {remedy}", where, 0)


def _name_output(row: Row, ids: list[int], child: Row, child_ids: list[int], size: int) -> None:
    """Name the blocks that a row's output filled, if the next prompt of its thread contains it."""
    length = row.input_length + row.output_length
    if child.input_length >= length and child_ids[: len(ids)] == ids:
        output = child_ids[row.input_length // size : length // size]
        row.content = HashContent(collapse(ids), collapse(output))


def _settled(trace: Trace, block_size: int, digest: str) -> Trace:
    trace.sha256 = trace.source["sha256"] = digest
    trace.block_size, trace.partial_hash, trace.hash_scope = block_size, False, "session"
    settle_kind(trace)
    return trace


BLOCK_SIZE = 16
_CACHE_NOTE = "what was in the cache is taken to be of the prompt before: more may be shared"
_PROMPT = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")


@dataclass(slots=True)
class _Answer:
    """One answer of the model, gathered from its lines."""

    thread: str
    start_ns: int
    end_ns: int
    usage: dict[str, Any]
    model: object
    line: int
    tool: str | None = None
    """The last tool that it calls."""


def read_claude_code(source: Source) -> Trace:
    """The requests of a transcript. Raises `TraceError` at the first wrong line."""
    gathered = Gathered(source, "claude-code")
    threads: dict[str, tuple[Row, list[int], int]] = {}
    """Of each thread its last request, the ids of its prompt, and when it ended."""
    named = 0
    for name, answer in _answers(source, gathered).items():
        source.line = answer.line
        cached, *fresh = (_count(source, answer.usage, key) for key in _PROMPT)
        prompt, output = cached + sum(fresh), _count(source, answer.usage, "output_tokens")
        if not prompt or not output:
            gathered.drop("they have no prompt or no output")
            continue
        before, ids, end_ns = threads.get(answer.thread, (None, [], answer.start_ns))
        kept = ids[: cached // BLOCK_SIZE]
        new = prompt // BLOCK_SIZE - len(kept)
        ids = [*kept[: prompt // BLOCK_SIZE], *range(named, named + new)]
        named += new
        row = gathered.add(
            prompt,
            output,
            time_ns=answer.start_ns,
            id=name,
            content=HashContent(collapse(ids)),
            after=-1 if before is None else before.index,
            delay_ns=max(0, answer.start_ns - end_ns),
            session=answer.thread,
            turn=next_turn(before),
            model=answer.model,
            extra=None if answer.tool is None else {"tool": answer.tool},
            observed={"e2e_s": max(0, answer.end_ns - answer.start_ns) / NS_PER_S},
        )
        threads[answer.thread] = row, ids, answer.end_ns
    trace = gathered.trace(_CACHE_NOTE)
    trace.block_size, trace.partial_hash = BLOCK_SIZE, False
    settle_kind(trace)
    return trace


def _answers(source: Source, gathered: Gathered) -> dict[str, _Answer]:
    """The answers by the id of their message, in the order of their first lines."""
    found: dict[str, _Answer] = {}
    before: dict[str, int] = {}
    for table in tables(source):
        if not isinstance(written := table.get("timestamp"), str):
            continue
        time_ns = date(source, "timestamp", written)
        thread = f"{table.get('sessionId')}{'/side' if table.get('isSidechain') else ''}"
        message = table.get("message")
        # Lines are not always in order of time.
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
            # A further part of the same answer, with a later state of its usage.
            found[name].end_ns, found[name].usage = max(found[name].end_ns, time_ns), usage
        else:
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
