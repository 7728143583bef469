"""Requests that were served, one a record: when, how many tokens each had, and what was measured.

Results of `vllm bench serve --save-result --save-detailed`: a trace and the measured answer.

The traps (vLLM 0.33.0, `benchmarks/serve.py`):

- Lists per request exist only with `--save-detailed`; without it there is nothing to replay.
- `start_times` are of a clock without a date, and of the moment when a request was sent: after its
  wait for one of the `max_concurrency` slots, which is in `queue_times`.
- Failed requests have a text in `errors` and an output of 0; they are left out.
- `--append-result` writes several results into one file.
- Prompts are not in the file, so nothing is shared. The model is: `Row.model` is its `model_id`.

What was measured is in `Row.observed`: `ttft_s`, `itl_s` (a list), `e2e_s`, `client_queue_s`. A
row's id is its place in the lists, failed requests included.

Results of SGLang's `bench_serving --output-details`: one JSON object per run of the benchmark.

The traps (SGLang 0.5.23, `benchmark/serving.py`): every run is appended to the same file; lists per
request exist only with `--output-details`; no list says when a request was sent, so the trace has
no arrivals, and the note gives the rate and the slots of the benchmark. Failed requests have an
output of 0. `Row.observed` is as above, but `e2e_s` is the sum of TTFT and ITLs.

AIPerf's `profile_export.jsonl`: one record per request, metrics with a value and a unit.

The traps (AIPerf 0.13.0, `common/models/record_models.py`): records are in order of completion, so
they are sorted; failed and cancelled requests, and those of the warm-up, are left out; times are
Unix nanoseconds of the moment when a request was sent; prompts are in another file (`inputs.json`),
so nothing is shared. Turns of one conversation follow each other. `Row.observed` has `ttft_s` and
`e2e_s`.

GuideLLM reports (`benchmarks.json`): requests by how they ended, with tokens and times.

The traps (GuideLLM 0.8.1, `schemas/base/request_stats.py`): a sweep writes one benchmark per rate
into the same report, of which one has to be chosen; failed and incomplete requests are left out;
`request_start_time` is in Unix seconds, of the moment when a request was sent. Prompts are not
read, so nothing is shared. `Row.observed` has `ttft_s` and `e2e_s`.

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

from kvsim.core.vectors import added
from kvsim.workload.gather import Gathered, date, instant, tokens
from kvsim.workload.source import NS_PER_S, Source, read_elements, read_objects, shown, tables
from kvsim.workload.trace import Row, TokenContent, Trace

Table = dict[str, Any]
"""An object of a file."""
Keys = tuple[str, str, str]


class Record(NamedTuple):
    """An object of a log and where it stands in a line or a list, for messages."""

    table: Table
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
        objects: Iterable[Table] = tables(source)
    except (ValueError, RecursionError):  # an object may be spread over lines
        objects = read_objects(source)
    for table in objects:
        if isinstance(inner := table.get(within), list):
            yield from _listed(source, iter(inner), within)
        else:
            yield Record(table, "")


def add_served(
    gathered: Gathered, record: Record, counts: tuple[object, object], times: Keys, names: Keys
) -> None:
    """Keep a request.

    `counts`: of its prompt and output. `times`: keys of its start, first token and end, of which
    the last two may be missing; dates, or seconds since any moment. `names`: keys of its id,
    session and model.
    """
    if not counts[0] or not counts[1]:
        gathered.drop("they have no prompt or no output")
        return
    source = gathered.source
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
        metrics: Table = {**info, **(later if isinstance(later, dict) else {})}
        times = metrics.get("output_token_times")
        first = times[0] if isinstance(times, list) and times else None
        counts = (metrics.get("input_tokens"), metrics.get("output_tokens"))
        timed = Record({**table, "first_token_time": first}, where)
        add_served(gathered, timed, counts, _PERF_TIMES, _PERF_NAMES)
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
            add_served(gathered, record, _counts(record.table), _TIMES, _LANGFUSE_NAMES)
    return gathered.trace()


def _counts(table: Table) -> tuple[object, object]:
    """The tokens of prompt and output, None where they are not in the file."""
    usage = table.get("usageDetails") or table.get("usage") or table
    if not isinstance(usage, dict):
        return None, None
    for into, out in (("input", "output"), ("prompt", "completion")):
        prompt = _sum(usage, into)
        if prompt:
            return prompt, _sum(usage, out)
    return None, None


def _sum(usage: Table, word: str) -> int:
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
            add_served(gathered, record, counts, _TIMES, _LITELLM_NAMES)
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


def _spans(source: Source) -> Iterator[tuple[Table, str]]:
    for record in records(source, "resourceSpans"):
        for inner in _dicts(record.table.get("scopeSpans")):
            for number, span in enumerate(_dicts(inner.get("spans"))):
                yield span, f"{record.where}.spans[{number}]"


def _attributes(span: Table) -> Table:
    found = {}
    for each in _dicts(span.get("attributes")):
        key, value = each.get("key"), each.get("value")
        if isinstance(key, str) and isinstance(value, dict) and value:
            # `{"intValue": "7"}`: one entry, named after its type.
            found[key] = next(iter(value.values()))
    return found


def _dicts(value: Any) -> list[Table]:
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
            most, lora = tokens(source, "max_tokens", limit[1]), _LORA.search(line)
            gathered.add(
                len(prompt),
                most,
                time_ns=date(source, "time", f"{_LEAP_YEAR}-{time[1]}"),
                id=request[1],
                content=TokenContent(prompt),
                max_new_tokens=most,
                lora=lora and lora[1],
            )
    if not received:
        what = (
            "a log of vLLM without requests; for its settings give it as --startup-log, for a trace"
        )
        raise source.error(f"{what} {_HOW}", line=0)
    return gathered.trace(*_LOG_NOTES)


def _token_ids(source: Source, text: str) -> tuple[int, ...]:
    """The numbers of a list. Raises `TraceError` for one that is none, or beyond 63 bits."""
    words = [word for each in text.split(",") if (word := each.strip())]
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 19):
            raise source.error(f"{shown(word)} is not a token id; fix it", "prompt_token_ids")
    return tuple(map(int, words))


def read_vllm(source: Source) -> Trace:
    """The requests of a benchmark, each at the time it was sent, with what was measured.

    Raises `TraceError` for a result without lists, and for several results in one file.
    """
    result = _only_result(source, "--save-detailed")
    lists = _read_lists(source, result, "start_times", "latencies", "queue_times")
    times_ns = (instant(source, "start_times", each, NS_PER_S) for each in lists["start_times"])
    gathered = _gathered(source, "vllm-bench", result, lists, times_ns)
    notes = []
    if type(slots := result.get("max_concurrency")) is int:
        notes.append(
            f"arrivals are when requests were sent, after their wait for one of {slots} slots; for"
            f" the same closed loop give {_options(result)}"
        )
    return gathered.trace(*notes)


def read_sglang(source: Source) -> Trace:
    """The requests of a benchmark, without arrivals. Raises `TraceError` as for vLLM."""
    result = _only_result(source, "--output-details")
    lists = _read_lists(source, result)
    gathered = _gathered(source, "sglang-bench", result, lists, [None] * len(lists["input_lens"]))
    return gathered.trace(
        f"the file does not say when requests were sent; it ran with {_options(result)}"
    )


def _only_result(source: Source, option: str) -> Table:
    """The one result in the file; refuses several, and one without lists per request.

    `option` is the argument of the benchmark client that makes it write the lists.
    """
    results = read_objects(source)
    if len(results) > 1:
        what = f"{len(results)} results in one file; keep one of them, each is one JSON object"
        raise source.error(what, line=0)
    if not {"input_lens", "output_lens"} <= results[0].keys():
        what = f"a result without lists per request; run the benchmark again with {option}"
        raise source.error(what, line=0)
    return results[0]


def _read_lists(source: Source, result: Table, *further: str) -> dict[str, list[Any]]:
    """The lists per request that are there, all of one length. Raises `TraceError`.

    `further`: those of this client alone, of which the first has to be there.
    """
    lists: dict[str, list[Any]] = {}
    for key in ("input_lens", "output_lens", *further, "ttfts", "itls", "errors"):
        if key not in result and key not in further[:1]:
            continue
        values = result.get(key)
        if not isinstance(values, list):
            raise source.error("not a list; give the result as it was written", key, 0)
        if len(values) != len(result["input_lens"]):
            what = f"{len(values)} entries, but input_lens has {len(result['input_lens'])}"
            raise source.error(f"{what}; give the result as it was written", key, 0)
        lists[key] = values
    return lists


def _gathered(
    source: Source,
    format: str,
    result: Table,
    lists: dict[str, list[Any]],
    times_ns: Iterable[int | None],
) -> Gathered:
    """The requests of the lists that did not fail."""
    gathered = Gathered(source, format)
    for number, time_ns in enumerate(times_ns):
        lengths = [
            tokens(source, f"{key}[{number}]", lists[key][number], 0)
            for key in ("input_lens", "output_lens")
        ]
        if not all(lengths) or ("errors" in lists and lists["errors"][number]):
            gathered.drop("they failed")
            continue
        observed = _measured(source, lists, number) or None
        model = result.get("model_id") or None
        gathered.add(*lengths, time_ns=time_ns, id=str(number), model=model, observed=observed)
    return gathered


def _options(result: Table) -> str:
    """The rate and the slots of a benchmark, as for a command line."""
    rate, slots = result.get("request_rate"), result.get("max_concurrency")
    found = f"--request-rate {rate:g}" if type(rate) in (int, float) else "--request-rate inf"
    return f"{found} --max-concurrency {slots}" if type(slots) is int else found


def _measured(source: Source, lists: dict[str, list[Any]], number: int) -> Table:
    names = {"ttfts": "ttft_s", "latencies": "e2e_s", "queue_times": "client_queue_s"}
    observed: Table = {}
    for key, name in names.items():
        if key in lists:
            observed[name] = _seconds(source, key, number, lists[key][number])
    if "itls" in lists:
        gaps = lists["itls"][number]
        if not isinstance(gaps, list):
            raise source.error(
                "not a list; give the result as it was written", f"itls[{number}]", 0
            )
        observed["itl_s"] = [_seconds(source, "itls", number, gap) for gap in gaps]
    if "e2e_s" not in observed and {"ttft_s", "itl_s"} <= observed.keys():
        observed["e2e_s"] = observed["ttft_s"] + added(observed["itl_s"])
    return observed


def _seconds(source: Source, key: str, number: int, value: Any) -> float:
    if type(value) not in (int, float):
        raise source.error("not a time in seconds; fix it", f"{key}[{number}]", 0)
    return float(value)


_PER_SECOND = {"s": 1, "sec": 1, "ms": 1000, "us": 1_000_000, "ns": NS_PER_S}
_MEASURED = {"time_to_first_token": "ttft_s", "request_latency": "e2e_s"}


def read_aiperf(source: Source) -> Trace:
    """The requests of an AIPerf run. Raises `TraceError` at the first line that is wrong."""
    gathered = Gathered(source, "aiperf")
    last: dict[str, tuple[Row, int]] = {}
    for table in tables(source):
        metadata, metrics = table.get("metadata"), table.get("metrics")
        if not isinstance(metadata, dict) or not isinstance(metrics, dict):
            field = "metrics" if isinstance(metadata, dict) else "metadata"
            raise source.error("not an object; give the records as AIPerf wrote them", field)
        if metadata.get("benchmark_phase") == "warmup":
            gathered.drop("they belong to the warm-up")
        elif metadata.get("was_cancelled"):
            gathered.drop("they were cancelled")
        elif table.get("error"):
            gathered.drop("they failed")
        else:
            _aiperf_add(gathered, metadata, metrics, last)
    return gathered.trace()


def _aiperf_add(
    gathered: Gathered, metadata: Table, metrics: Table, last: dict[str, tuple[Row, int]]
) -> None:
    """Gather a request; `last`: the last turn of each conversation, and when it ended."""
    source = gathered.source
    start_ns = instant(source, "request_start_ns", metadata.get("request_start_ns"), 1)
    session = metadata.get("x_correlation_id")
    is_turn = isinstance(session, str) and type(metadata.get("turn_index")) is int
    before = last.get(str(session)) if is_turn else None
    row = gathered.add(
        tokens(source, "input_sequence_length", _value(source, metrics, "input_sequence_length")),
        tokens(source, "output_sequence_length", _value(source, metrics, "output_sequence_length")),
        time_ns=start_ns,
        id=metadata.get("x_request_id"),
        after=-1 if before is None else before[0].index,
        delay_ns=0 if before is None else max(0, start_ns - before[1]),
        session=session if is_turn else None,
        turn=tokens(source, "turn_index", max(0, metadata["turn_index"]), 0) if is_turn else None,
        observed=_aiperf_observed(source, metrics),
    )
    if is_turn:
        end_ns = instant(source, "request_end_ns", metadata.get("request_end_ns"), 1)
        last[str(session)] = row, end_ns


def _value(source: Source, metrics: Table, key: str) -> object:
    metric = metrics.get(key)
    if not isinstance(metric, dict) or "value" not in metric:
        raise source.error("no value; give the records as AIPerf wrote them", key)
    return metric["value"]


def _aiperf_observed(source: Source, metrics: Table) -> Table | None:
    observed = {}
    for key, name in _MEASURED.items():
        if key in metrics:
            value, unit = _value(source, metrics, key), metrics[key].get("unit")
            known = isinstance(unit, str) and unit in _PER_SECOND
            if type(value) not in (int, float) or not known:
                what = f"{shown(value)} {shown(unit)} is not a time; give a value and a unit"
                raise source.error(what, key)
            observed[name] = value / _PER_SECOND[unit]  # type: ignore[operator]
    return observed or None


_ENDINGS = {"successful": "", "errored": "they failed", "incomplete": "they were not complete"}
"""List of a report → why its requests are left out."""
_GUIDELLM_TIMES = {"time_to_first_token_ms": ("ttft_s", 1000), "request_latency": ("e2e_s", 1)}
"""Time of a request → its key in `Row.observed`, and how many make a second."""


def read_guidellm(source: Source) -> Trace:
    """The requests of the one benchmark of a report. Raises `TraceError`."""
    report = read_objects(source)[0]
    benchmarks = report.get("benchmarks")
    if not isinstance(benchmarks, list) or not benchmarks:
        raise source.error(
            "no benchmark in it; give the report as GuideLLM wrote it", "benchmarks", 0
        )
    if len(benchmarks) > 1:
        what = f"{len(benchmarks)} benchmarks, as of a sweep; keep one: jq '.benchmarks |= [.[0]]'"
        raise source.error(what, "benchmarks", 0)
    requests = benchmarks[0].get("requests") if isinstance(benchmarks[0], dict) else None
    if not isinstance(requests, dict):
        raise source.error("no requests; give the report as GuideLLM wrote it", "benchmarks[0]", 0)
    gathered = Gathered(source, "guidellm")
    for key, why in _ENDINGS.items():
        values = requests.get(key) or []
        if not isinstance(values, list):
            what = "not a list; give the report as GuideLLM wrote it"
            raise source.error(what, f"requests.{key}", 0)
        for number, request in enumerate(values):
            if why:
                gathered.drop(why)
            else:
                _guidellm_add(gathered, request, f"{key}[{number}]")
    return gathered.trace()


def _guidellm_add(gathered: Gathered, request: Any, where: str) -> None:
    source = gathered.source
    if not isinstance(request, dict):
        raise source.error("not an object; give the report as GuideLLM wrote it", where, 0)
    start, field = request.get("request_start_time"), f"{where}.request_start_time"
    observed = {
        name: request[key] / units
        for key, (name, units) in _GUIDELLM_TIMES.items()
        if type(request.get(key)) in (int, float)
    }
    gathered.add(
        tokens(source, f"{where}.prompt_tokens", request.get("prompt_tokens")),
        tokens(source, f"{where}.output_tokens", request.get("output_tokens")),
        time_ns=None if start is None else instant(source, field, start, NS_PER_S),
        id=request.get("request_id"),
        observed=observed or None,
    )
