"""Requests whose prompts are in the file, other than Mooncake's: as ids of blocks or tokens, or as
texts.

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

Tokens of plain text are counted and identified by a rule, since no tokenizer is at hand.
`CHARACTERS_PER_TOKEN` characters are one token. Lengths are estimates: English prose has about as
many, other languages and code have fewer. Equal beginnings of texts get equal ids, so that a prefix
cache finds them, and that is exact to 64 characters.

vLLM's custom data set: JSON Lines of `{"prompt": text, "output_tokens": number}`.

The traps (vLLM 0.33.0, `CustomDataset`): there are no arrivals; `output_tokens` may be missing,
where `vllm bench serve` takes `--custom-output-len`; prompts have no token counts
(the rule above); the benchmark shuffles the rows unless told otherwise.

OpenAI batch files: JSON Lines of `{"custom_id", "method", "url", "body"}`, or their results.

The traps: **outputs are not in the file**, only their limit (`max_completion_tokens`, `max_tokens`
or `max_output_tokens`), which is taken as their length; there are no arrivals; messages have no
token counts and may hold images, which are not counted. Embeddings
generate nothing and are refused. Results (`{"custom_id", "response", "error"}`) have the counts of
tokens, but neither prompts nor times, and are in any order; those that failed are left out.

ShareGPT conversations: a JSON list of `{"id", "conversations": [{"from", "value"}, ...]}`.

Every answer (`gpt`) is a request whose prompt is all that was said before it, so a conversation is
a session whose turns share their history; each turn follows the one before without a think time.
The traps: there are no arrivals; ids are often repeated, so conversations are numbered; texts have
no token counts; some conversations have no answer. `vllm bench serve
--dataset-name sharegpt` (0.33.0) sends the first exchange of each alone, drops long and very short
ones, and shuffles.
"""

from __future__ import annotations

import json
from typing import Any

from xxhash import xxh3_128_digest

from kvsim.workload.chain import settle_blocks
from kvsim.workload.gather import Gathered, identifier, instant, integers, next_turn, string, tokens
from kvsim.workload.source import NS_PER_S, Source, read_elements, shown, tables
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
"""Tokens per id of a block, in Qwen-Bailian traces and of texts."""
_NO_PARENT = "-1"


def read_qwen(source: Source) -> Trace:
    """A Qwen-Bailian trace. Raises `TraceError` at the first line that is wrong."""
    gathered = Gathered(source, "qwen")
    chats: dict[str, Row] = {}
    for table in tables(source):
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
            gathered.change("output_length 0 read as 1")
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
            turn=next_turn(parent),
        )
    trace = gathered.trace()
    settle_blocks(source, trace, BLOCK_SIZE, "make sure that this is a Qwen-Bailian file")
    return trace


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
        time_ns = instant(source, "timestamp", table.get("timestamp"), NS_PER_S)
        hashes = table.get("chunk_hashes")
        if not isinstance(hashes, list) or not all(isinstance(each, str) for each in hashes):
            raise source.error(f"{shown(hashes)} is not a list of hashes; fix it", "chunk_hashes")
        ids = (numbers.setdefault(each, len(numbers)) for each in hashes)
        gathered.add(
            length,
            1,
            time_ns=time_ns,
            id=table.get("request_id"),
            content=HashContent(collapse(ids)),
            model=table.get("model_name"),
        )
    trace = gathered.trace(_LMCACHE_NOTE)
    settle_blocks(source, trace, size or 1, "make sure that the rows are of one log")
    return trace


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
                served.append(_served(gathered, table, input_length, output_length))
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
    gathered: Gathered, table: dict[str, Any], input_length: int, output_length: int
) -> tuple[Row, list[int]]:
    source = gathered.source
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


CHARACTERS_PER_TOKEN = 4
_CHARACTERS = BLOCK_SIZE * CHARACTERS_PER_TOKEN
NOTE = (
    f"lengths are estimates, {CHARACTERS_PER_TOKEN} characters a token, without the chat template;"
    " count the file with your model's tokenizer if they matter"
)


Ids = dict[tuple[int, bytes], int]
"""Of the texts of a file: the id of a block of 64 characters, by the id of the block before it (-1:
none) and its digest. So one stands for its block and all before it."""


class Stream:
    """A text that grows, such as a conversation."""

    def __init__(self, ids: Ids) -> None:
        self.characters = 0
        self._ids = ids
        self._blocks: list[int] = []
        self._tail = ""

    @property
    def tokens(self) -> int:
        """How many tokens the text has, 0 for an empty one."""
        return max(self.characters // CHARACTERS_PER_TOKEN, min(self.characters, 1))

    def append(self, text: str) -> None:
        """Continue the text."""
        self.characters += len(text)
        tail = self._tail + text
        whole = len(tail) - len(tail) % _CHARACTERS
        for start in range(0, whole, _CHARACTERS):
            before = self._blocks[-1] if self._blocks else -1
            # JSON may hold half a surrogate pair, which is no UTF-8.
            block = tail[start : start + _CHARACTERS].encode("utf-8", "surrogatepass")
            id = self._ids.setdefault((before, xxh3_128_digest(block)), len(self._ids))
            self._blocks.append(id)
        self._tail = tail[whole:]

    def content(self, input_length: int | None = None, output_length: int = 0) -> HashContent:
        """The ids of a prompt of the first `input_length` tokens (default: all), and of an output
        that follows it in this text."""
        prompt = (self.tokens if input_length is None else input_length) // BLOCK_SIZE
        last = prompt if input_length is None else (input_length + output_length) // BLOCK_SIZE
        return HashContent(collapse(self._blocks[:prompt]), collapse(self._blocks[prompt:last]))


def identified(trace: Trace) -> Trace:
    """State in the trace that its hash ids are those of a `Stream`."""
    trace.block_size, trace.hash_kind, trace.partial_hash = BLOCK_SIZE, "prefix", False
    return trace


def read_custom(source: Source) -> Trace:
    """The prompts, without arrivals. Raises `TraceError` at the first line that is wrong."""
    gathered, known = Gathered(source, "custom"), Ids()
    for table in tables(source):
        prompt, output = table.get("prompt"), table.get("output_tokens")
        if not isinstance(prompt, str):
            raise source.error(f"{shown(prompt)} is not a text; give one", "prompt")
        if output is None:
            what = "missing, so the length of the output is unknown; add it to every row"
            raise source.error(what, "output_tokens")
        if not prompt:
            gathered.drop("the prompt is empty")
            continue
        stream = Stream(known)
        stream.append(prompt)
        output_length = tokens(source, "output_tokens", output)
        gathered.add(stream.tokens, output_length, content=stream.content())
    return identified(gathered.trace(NOTE))


_USAGE = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_BATCH_NOTE = (
    "outputs are as long as their limit (max_tokens): how long they became is not in the file"
)


def read_batch(source: Source) -> Trace:
    """The requests of a batch, without arrivals. Raises `TraceError` at the first wrong line."""
    gathered, known = Gathered(source, "openai-batch"), Ids()
    for table in tables(source):
        if "response" in table:
            _add_result(gathered, table)
            continue
        body = table.get("body")
        if not isinstance(body, dict):
            raise source.error(f"{shown(body)} is not an object; give one", "body")
        if str(table.get("url")).endswith("/embeddings"):
            raise source.error("embeddings generate nothing; keep requests that do", "url")
        stream = Stream(known)
        for part in _texts(source, body):
            stream.append(part)
        output_length = _limit(source, body)
        if not stream.tokens:
            gathered.drop("the prompt is empty")
            continue
        gathered.add(
            stream.tokens,
            output_length,
            id=string(source, table, "custom_id"),
            content=stream.content(),
            max_new_tokens=output_length,
        )
    if all(row.content is None for row in gathered.rows):
        return gathered.trace()
    return identified(gathered.trace(_BATCH_NOTE, NOTE))


def _add_result(gathered: Gathered, table: dict[str, Any]) -> None:
    response = table.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    usage = body.get("usage") if isinstance(body, dict) else None
    if table.get("error") or not isinstance(usage, dict):
        gathered.drop("they failed, or count no tokens")
        return
    counts = [
        next((usage[key] for key in keys if usage.get(key) is not None), None) for keys in _USAGE
    ]
    gathered.add(
        tokens(gathered.source, "usage.prompt_tokens", counts[0]),
        tokens(gathered.source, "usage.completion_tokens", counts[1]),
        id=string(gathered.source, table, "custom_id"),
    )


def _limit(source: Source, body: dict[str, Any]) -> int:
    for key in _LIMITS:
        if body.get(key) is not None:
            return tokens(source, f"body.{key}", body[key])
    what = "missing, so the length of the output is unknown; add it to every body"
    raise source.error(what, "body.max_tokens")


def _texts(source: Source, body: dict[str, Any]) -> list[str]:
    """The texts of a prompt in the order in which a chat template puts them."""
    found = [json.dumps(body["tools"])] if body.get("tools") else []
    if all(body.get(key) is None for key in ("prompt", "input", "messages")):
        raise source.error("no messages, prompt or input; add one", "body")
    for key in ("instructions", "prompt", "input", "messages"):
        if body.get(key) is not None:
            found += _flat(source, body[key], f"body.{key}")
    return found


def _flat(source: Source, value: Any, where: str) -> list[str]:
    """The texts in a message, a part of it or a list of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for each in value for text in _flat(source, each, where)]
    if isinstance(value, dict):
        inner = value.get("content") if value.get("content") is not None else value.get("text", "")
        return _flat(source, inner, where)
    raise source.error(f"{shown(value)} is not a text; give texts or messages", where)


_ANSWERS = "gpt", "chatgpt", "assistant", "bing", "bard", "model"
_SHAREGPT_NOTE = (
    "each conversation is a session of turns with their whole history; vllm bench serve sends the"
    " first exchange of each alone"
)


def read_sharegpt(source: Source) -> Trace:
    """The turns of all conversations, without arrivals. Raises `TraceError`."""
    gathered, known = Gathered(source, "sharegpt"), Ids()
    listed = source.beginning().lstrip().startswith("[")
    for number, entry in enumerate(read_elements(source) if listed else tables(source)):
        where = f"[{number}].conversations"
        messages = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(messages, list):
            what = "not a list of messages; give the file as it was published"
            raise source.error(what, where)
        _add_conversation(gathered, Stream(known), messages, where, str(number))
    return identified(gathered.trace(_SHAREGPT_NOTE, NOTE))


def _add_conversation(
    gathered: Gathered, stream: Stream, messages: list[Any], where: str, session: str
) -> None:
    before, turn = -1, 0
    for number, message in enumerate(messages):
        said = message.get("value") if isinstance(message, dict) else None
        if not isinstance(said, str):
            what = "no text; give the file as it was published"
            raise gathered.source.error(what, f"{where}[{number}]")
        prompt = stream.tokens
        stream.append(said)
        if message.get("from") not in _ANSWERS or not said:
            continue
        if not prompt:
            gathered.drop("an answer without a question before it")
            continue
        output = max(1, stream.tokens - prompt)
        content = stream.content(prompt, output)
        row = gathered.add(
            prompt, output, content=content, after=before, session=session, turn=turn
        )
        before, turn = row.index, turn + 1
