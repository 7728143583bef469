"""JSON Lines of requests with ids of their blocks or tokens, other than Mooncake's.

Qwen-Bailian traces: JSON Lines like Mooncake's, in other units.

Times are **seconds** and ids are **16-token** blocks, the partial last one included, under the keys
that Mooncake uses for milliseconds and 512 tokens (alibaba-edu/qwen-bailian-usagetraces-anon).
`chat_id` names the request and `parent_chat_id` the request that it continues, -1 for none. A turn
follows its parent; how long the user thought is not recorded, so the delay is 0 after the parent's
end in closed sessions, and the recorded time otherwise. Thinking tokens are removed between turns:
a child's prompt is what its ids say, not the parent's prompt and output.

LMCache look-up logs (`--lookup-hash-log-dir`): JSON Lines of chained chunk hashes.

The traps (LMCache 0.5.6, `subscribers/logging/lookup_hash.py`): **outputs are not in the log**, so
each is read as 1 token and decoding is not simulated; hashes are hexadecimal, of whole chunks of
`chunk_size` tokens (256 by default), and are numbered here in order of first use; times are Unix
seconds. A directory holds several files, each is read alone.

LLMServingSim traces: JSON Lines of `input_toks,output_toks`, mostly with real token ids.

`arrival_time_ns` is in nanoseconds; `input_tok_ids` and `output_tok_ids` are the tokens themselves
(casys-kaist/LLMServingSim). Its agent sessions (`sub_requests`) are refused.

`requests.jsonl` of its benchmark is what vLLM did with such a trace. The traps
(`bench/core/recorder.py`): `arrival_time` is the front end's, in seconds since 1970, and the other
times are of the engine's clock, which began at any moment. No request is taken up before it came,
so the one that was soonest sets the clocks: its way to the engine counts as nothing. Requests
without times are left out. Prompts are not in it: the trace has them.
"""

from __future__ import annotations

from typing import Any

from kvsim.workload.chain import settle_blocks
from kvsim.workload.gather import Gathered, identifier, instant, integers, tokens
from kvsim.workload.source import NS_PER_S, Source, shown, tables
from kvsim.workload.trace import (
    MAX_ID,
    MAX_TOKEN_ID,
    Content,
    HashContent,
    Row,
    TokenContent,
    Trace,
    collapse,
)

BLOCK_SIZE = 16
_NO_PARENT = "-1"
_ZERO = "output_length 0 read as 1"


def read_qwen(source: Source) -> Trace:
    """A Qwen-Bailian trace. Raises `TraceError` at the first line that is wrong."""
    gathered = Gathered(source, "qwen")
    chats: dict[str, Row] = {}
    for table in tables(source):
        _add(source, table, gathered, chats)
    trace = gathered.trace()
    settle_blocks(source, trace, BLOCK_SIZE, "make sure that this is a Qwen-Bailian file")
    return trace


def _add(source: Source, table: dict[str, Any], gathered: Gathered, chats: dict[str, Row]) -> None:
    for key in ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"):
        if key not in table:
            raise source.error("missing; give it on every row", key)
    chat = identifier(source, table, "chat_id")
    if chat in chats:
        what = f"{shown(chat)} is also on line {chats[chat].line}; make it unique"
        raise source.error(what, "chat_id")
    name = identifier(source, table, "parent_chat_id")
    parent = chats.get(name)
    if parent is None and name != _NO_PARENT:
        gathered.change("parent_chat_id is not on an earlier row: sent at its own time")
    output_length = tokens(source, "output_length", table["output_length"], 0)
    if not output_length:
        gathered.change(_ZERO)
    content = None
    if table.get("hash_ids") is not None:
        content = HashContent(collapse(integers(source, table, "hash_ids", MAX_ID)))
    chats[chat] = gathered.add(
        tokens(source, "input_length", table["input_length"]),
        max(1, output_length),
        time_ns=instant(source, "timestamp", table["timestamp"], NS_PER_S),
        id=chat,
        content=content,
        after=-1 if parent is None else parent.index,
        session=chat if parent is None else parent.session,
        turn=0 if parent is None else (parent.turn or 0) + 1,
    )


_LMCACHE_NOTE = "outputs are not in the log: each is read as 1 token, so decoding is not simulated"


def read_lmcache(source: Source) -> Trace:
    """The requests of an LMCache log. Raises `TraceError` at the first line that is wrong."""
    gathered = Gathered(source, "lmcache")
    numbers: dict[str, int] = {}
    size: int | None = None
    for table in tables(source):
        chunk = tokens(source, "chunk_size", table.get("chunk_size"))
        size = size or chunk
        if chunk != size:
            what = f"{chunk}, but {size} on earlier rows; split the file by chunk size"
            raise source.error(what, "chunk_size")
        length = tokens(source, "seq_len", table.get("seq_len"), 0)
        if not length:
            gathered.drop("seq_len is 0")
            continue
        gathered.add(
            length,
            1,
            time_ns=instant(source, "timestamp", table.get("timestamp"), NS_PER_S),
            id=table.get("request_id"),
            content=_lmcache_content(source, table, numbers),
            model=table.get("model_name"),
        )
    trace = gathered.trace(_LMCACHE_NOTE)
    settle_blocks(source, trace, size or 1, "make sure that the rows are of one log")
    return trace


def _lmcache_content(source: Source, table: dict[str, Any], numbers: dict[str, int]) -> HashContent:
    hashes = table.get("chunk_hashes")
    if not isinstance(hashes, list) or not all(isinstance(each, str) for each in hashes):
        raise source.error(f"{shown(hashes)} is not a list of hashes; fix it", "chunk_hashes")
    return HashContent(collapse(numbers.setdefault(each, len(numbers)) for each in hashes))


def read_llmservingsim(source: Source) -> Trace:
    """An LLMServingSim trace. Raises `TraceError` at the first line that is wrong."""
    gathered = Gathered(source, "llmservingsim")
    served: list[tuple[Row, list[int]]] = []
    """With the engine's times of `_ENGINE` in nanoseconds."""
    for table in tables(source):
        if "sub_requests" in table:
            raise source.error("sessions are not read; write one request a line", "sub_requests")
        input_length = tokens(source, "input_toks", table.get("input_toks"))
        output_length = tokens(source, "output_toks", table.get("output_toks"))
        if "queued_ts" in table:
            if table.get("arrival_time") is None or table["queued_ts"] is None:
                gathered.drop("they have no times")
            else:
                served.append(_served(source, table, gathered, input_length, output_length))
            continue
        time = table.get("arrival_time_ns")
        gathered.add(
            input_length,
            output_length,
            time_ns=None if time is None else instant(source, "arrival_time_ns", time, 1),
            content=_tokens_of(source, table, input_length, output_length),
        )
    _set_clocks(served)
    return gathered.trace()


_ENGINE = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


def _served(
    source: Source, table: dict[str, Any], gathered: Gathered, input_length: int, output_length: int
) -> tuple[Row, list[int]]:
    arrival_ns = instant(source, "arrival_time", table["arrival_time"], NS_PER_S)
    engine = [instant(source, key, table.get(key), NS_PER_S) for key in _ENGINE]
    for key, earlier, time_ns in zip(_ENGINE[1:], engine, engine[1:], strict=False):
        if time_ns < earlier:
            raise source.error("before the time that it follows; fix one of them", key)
    name = identifier(source, table, "request_id")
    row = gathered.add(input_length, output_length, time_ns=arrival_ns, id=name)
    return row, engine


def _set_clocks(served: list[tuple[Row, list[int]]]) -> None:
    """Count the times of the engine from when requests came."""
    gaps = [engine[0] - (row.arrival_ns or 0) for row, engine in served]
    for (row, engine), gap in zip(served, gaps, strict=True):
        late = gap - min(gaps)
        times = [(time_ns - engine[0] + late) / NS_PER_S for time_ns in engine[1:]]
        row.observed = dict(zip(("queue_s", "ttft_s", "e2e_s"), times, strict=True))


def _tokens_of(
    source: Source, table: dict[str, Any], input_length: int, output_length: int
) -> Content | None:
    found = []
    for side, length in (("input", input_length), ("output", output_length)):
        key = f"{side}_tok_ids"
        if table.get(key) is None:
            break
        ids = integers(source, table, key, MAX_TOKEN_ID)
        if len(ids) != length:
            what = f"{len(ids)} ids, but {side}_toks is {length}; fix one of them"
            raise source.error(what, key)
        found.append(tuple(ids))
    return TokenContent(*found) if found else None
