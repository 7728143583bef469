"""Logs in which a record is a request that was served: when, and how many tokens it had.

inference-perf's `per_request_lifecycle_metrics.json`: a list of requests and their times.

The traps: times are of a clock without a date; counts and times of tokens are in `info`, and in its
`response_metrics` from later versions on; requests with an `error` are left out. `request` is what
was sent, as a text, so nothing is shared. `Row.observed` has `ttft_s` and `e2e_s`.

Langfuse's observations: JSON Lines, a list, a page of its API, or a trace with `observations`.

The traps: only those of type GENERATION called a model; `usageDetails` counts tokens that were
read from a cache or written to it under keys of their own, which all have `input` in their names
and belong to the prompt; older ones have `usage` or `promptTokens`. Ids name observations, and
`traceId` what belongs together. Prompts are texts without a tokenizer, so nothing is shared.

LiteLLM's spend logs and standard logging payloads: JSON Lines, a list, or a page of its API.

The traps (LiteLLM, `proxy/schema.prisma`, `LiteLLM_SpendLogs`): dates of the database, seconds
since 1970 in payloads; rows that failed, or that LiteLLM's own cache answered, reached no engine;
a row may be an embedding. Prompts are not told from each other, so nothing is shared.

OpenTelemetry's spans of calls of models, as OTLP in JSON: a document, or one on each line.

The traps (semantic conventions of `gen_ai`): spans of agents and tools stand around those of
models and have no output of their own, or sums; numbers of 64 bits are texts; prompts that were
read from a cache are within `gen_ai.usage.input_tokens`. Times are nanoseconds since 1970. A
conversation (`gen_ai.conversation.id`), or a trace, is a session. Nothing is shared.

vLLM's own log of its requests (`--enable-log-requests`, log level DEBUG).

The traps (vLLM 0.33.0, `entrypoints/serve/utils/request_logger.py`, and 0.6.3): at level INFO a
line has the limits of a request but not its prompt, so there is nothing to replay; at DEBUG the
token ids are there, cut to `--max-log-len` if that was given, which cannot be seen here. **Outputs
are not in the log**: `max_tokens` is taken as their length. Times have whole seconds and no year.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvsim.workload.gather import Gathered, date, instant, tokens
from kvsim.workload.source import NS_PER_S, Source, read_elements, read_objects, shown, tables
from kvsim.workload.trace import TokenContent, Trace


class Record(NamedTuple):
    """An object of a log and where it stands in a line or a list, for messages."""

    table: dict[str, Any]
    where: str

    def field(self, key: str) -> str:
        """The name of a key in messages."""
        return f"{self.where}.{key}" if self.where else key


def records(source: Source, within: str = "data") -> Iterator[Record]:
    """The records of a file of JSON Lines, of a JSON list, or in the list that objects have under
    `within`. Raises `TraceError`."""
    if source.beginning().lstrip().startswith("["):
        yield from _listed(source, read_elements(source), "")
        return
    first = next((line for line in source.beginning().splitlines() if line.strip()), "")
    try:
        json.loads(first)
        objects: Iterable[dict[str, Any]] = tables(source)
    except (ValueError, RecursionError):  # an object may be spread over lines
        objects = read_objects(source)
    for table in objects:
        if isinstance(inner := table.get(within), list):
            yield from _listed(source, iter(inner), within)
        else:
            yield Record(table, "")


def add_served(
    source: Source,
    gathered: Gathered,
    record: Record,
    counts: tuple[object, object],
    times: tuple[str, str, str],
    names: tuple[str, str, str],
) -> None:
    """Keep a request.

    `counts`: of its prompt and output. `times`: keys of its start, first token and end, of which
    the last two may be missing; dates, or seconds since any moment. `names`: keys of its id,
    session and model.
    """
    if not counts[0] or not counts[1]:
        gathered.drop("they have no prompt or no output")
        return
    start_ns = _moment(source, record, times[0])
    observed = {}
    for key, name in zip(times[1:], ("ttft_s", "e2e_s"), strict=True):
        if record.table.get(key):
            observed[name] = max(0, _moment(source, record, key) - start_ns) / NS_PER_S
    id, session, model = (record.table.get(key) or None for key in names)
    gathered.add(
        tokens(source, record.field("prompt tokens"), counts[0]),
        tokens(source, record.field("output tokens"), counts[1]),
        time_ns=start_ns,
        id=id,
        session=session,
        model=model,
        observed=observed or None,
    )


def _moment(source: Source, record: Record, key: str) -> int:
    value = record.table.get(key)
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        return date(source, record.field(key), value)
    return instant(source, record.field(key), value, NS_PER_S)


def _listed(source: Source, values: Iterator[Any], of: str) -> Iterator[Record]:
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise source.error(f"{shown(value)} is not an object; give one", f"{of}[{number}]", 0)
        yield Record(value, f"{of}[{number}]")


_PERF_TIMES = ("start_time", "first_token_time", "end_time")
_PERF_NAMES = ("id", "session_id", "model")


def read_inference_perf(source: Source) -> Trace:
    """The requests of a benchmark, each when it was sent. Raises `TraceError`."""
    gathered = Gathered(source, "inference-perf")
    for table, where in records(source):
        info = table.get("info")
        if table.get("error") or not isinstance(info, dict):
            gathered.drop("they failed")
            continue
        later = info.get("response_metrics")
        metrics: dict[str, Any] = {**info, **(later if isinstance(later, dict) else {})}
        times = metrics.get("output_token_times")
        first = times[0] if isinstance(times, list) and times else None
        counts = (metrics.get("input_tokens"), metrics.get("output_tokens"))
        timed = Record({**table, "first_token_time": first}, where)
        add_served(source, gathered, timed, counts, _PERF_TIMES, _PERF_NAMES)
    return gathered.trace()


_TIMES = ("startTime", "completionStartTime", "endTime")
_LANGFUSE_NAMES = ("id", "traceId", "model")


def read_langfuse(source: Source) -> Trace:
    """The generations of an export, each when it began. Raises `TraceError`."""
    gathered = Gathered(source, "langfuse")
    within = "observations" if '"observations"' in source.beginning() else "data"
    for record in records(source, within):
        if record.table.get("type") != "GENERATION":
            gathered.drop("they called no model")
        elif record.table.get("level") == "ERROR":
            gathered.drop("they failed")
        else:
            add_served(source, gathered, record, _counts(record.table), _TIMES, _LANGFUSE_NAMES)
    return gathered.trace()


def _counts(table: dict[str, Any]) -> tuple[object, object]:
    """The tokens of prompt and output, None where they are not in the file."""
    usage = table.get("usageDetails") or table.get("usage") or table
    if not isinstance(usage, dict):
        return None, None
    for into, out in (("input", "output"), ("prompt", "completion")):
        prompt = _sum(usage, into)
        if prompt:
            return prompt, _sum(usage, out)
    return None, None


def _sum(usage: dict[str, Any], word: str) -> int:
    return sum(value for key, value in usage.items() if word in key.lower() and type(value) is int)


_LITELLM_NAMES = ("request_id", "session_id", "model")


def read_litellm(source: Source) -> Trace:
    """The requests of a log, each when it came. Raises `TraceError` at the first wrong record."""
    gathered = Gathered(source, "litellm")
    for record in records(source):
        table = record.table
        if table.get("status", "success") != "success" or table.get("error_str"):
            gathered.drop("they failed")
        elif str(table.get("cache_hit")).lower() == "true":
            gathered.drop("LiteLLM's own cache answered them")
        elif "embedding" in str(table.get("call_type")):
            gathered.drop("they are embeddings")
        else:
            counts = (table.get("prompt_tokens"), table.get("completion_tokens"))
            add_served(source, gathered, record, counts, _TIMES, _LITELLM_NAMES)
    return gathered.trace()


_INPUT, _OUTPUT = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
_AROUND = ("invoke_agent", "create_agent", "invoke_workflow", "execute_tool", "embeddings")
"""`gen_ai.operation.name` of spans that call no model to generate."""


def read_otel(source: Source) -> Trace:
    """The calls of models, each when its span began. Raises `TraceError`."""
    gathered = Gathered(source, "otel")
    for span, where in _spans(source):
        facts = _attributes(span)
        if not facts.get(_OUTPUT) or facts.get("gen_ai.operation.name") in _AROUND:
            gathered.drop("they are spans around calls of models, or count no output")
            continue
        start_ns = instant(source, f"{where}.startTimeUnixNano", span.get("startTimeUnixNano"), 1)
        end_ns = instant(
            source, f"{where}.endTimeUnixNano", span.get("endTimeUnixNano", start_ns), 1
        )
        gathered.add(
            tokens(source, f"{where}.{_INPUT}", facts.get(_INPUT)),
            tokens(source, f"{where}.{_OUTPUT}", facts[_OUTPUT]),
            time_ns=start_ns,
            id=span.get("spanId"),
            session=facts.get("gen_ai.conversation.id") or span.get("traceId"),
            model=facts.get("gen_ai.request.model"),
            observed={"e2e_s": max(0, end_ns - start_ns) / NS_PER_S},
        )
    return gathered.trace()


def _spans(source: Source) -> Iterator[tuple[dict[str, Any], str]]:
    for record in records(source, "resourceSpans"):
        for inner in _dicts(record.table.get("scopeSpans")):
            for number, span in enumerate(_dicts(inner.get("spans"))):
                yield span, f"{record.where}.spans[{number}]"


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for each in _dicts(span.get("attributes")):
        key, value = each.get("key"), each.get("value")
        if isinstance(key, str) and isinstance(value, dict) and value:
            found[key] = next(iter(value.values()))
    return found


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


LOGGED = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d)\b")
_DETAILS = re.compile(r"Request (\S+) details: ")
_RECEIVED = re.compile(r"Received request ([^\s:]+): ")
_PROMPT_IDS = re.compile(r"prompt_token_ids: \[([\d, ]*)\]")
_LORA = re.compile(r"\bLoRARequest\(lora_name='([^']+)'")
_LIMIT = re.compile(r"\bmax_tokens=(\d+|None)")
_LEAP_YEAR = "2000"
"""Stands in for the year that the log does not have."""
_HOW = "start the server with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG"
_LOG_NOTES = (
    "outputs are as long as their limit (max_tokens): how long they became is not in the log",
    "arrivals have whole seconds: --spread-ties spreads those of one second",
    "prompts are taken whole: with --max-log-len the server would have cut them",
)


def read_vllm_log(source: Source) -> Trace:
    """The requests of a log, at the time they were received, with their tokens."""
    gathered = Gathered(source, "vllm-log")
    prompts: dict[str, tuple[int, ...]] = {}
    received = 0
    for line in source.lines():
        ids = _PROMPT_IDS.search(line)
        details = _DETAILS.search(line)
        if details and ids:
            prompts[details[1]] = _token_ids(source, ids[1])
        request = _RECEIVED.search(line)
        time, limit = LOGGED.search(line), _LIMIT.search(line)
        if not (request and time and limit):
            continue
        received += 1
        prompt = _token_ids(source, ids[1]) if ids else prompts.pop(request[1], ())
        if limit[1] == "None":
            gathered.drop("no max_tokens, so the length of the output is unknown")
        elif not prompt:
            gathered.drop(f"no prompt token ids; {_HOW}")
        else:
            lora = _LORA.search(line)
            adapter = None if lora is None else lora[1]
            _add_logged(source, gathered, request[1], time[1], prompt, limit[1], adapter)
    if not received:
        what = (
            "a log of vLLM without requests; for its settings give it as --startup-log, for a trace"
        )
        raise source.error(f"{what} {_HOW}", line=0)
    return gathered.trace(*_LOG_NOTES)


def _add_logged(
    source: Source,
    gathered: Gathered,
    name: str,
    time: str,
    prompt: tuple[int, ...],
    limit: str,
    lora: str | None,
) -> None:
    most = tokens(source, "max_tokens", limit)
    gathered.add(
        len(prompt),
        most,
        time_ns=date(source, "time", f"{_LEAP_YEAR}-{time}"),
        id=name,
        content=TokenContent(prompt),
        max_new_tokens=most,
        lora=lora,
    )


def _token_ids(source: Source, text: str) -> tuple[int, ...]:
    """The numbers of a list. Raises `TraceError` for one that is none, or beyond 63 bits."""
    words = [word for each in text.split(",") if (word := each.strip())]
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 19):
            raise source.error(f"{shown(word)} is not a token id; fix it", "prompt_token_ids")
    return tuple(map(int, words))
