"""Results of load generators: a trace, and what they measured.

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
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvsim.core.sums import added
from kvsim.workload.gather import Gathered, instant, tokens
from kvsim.workload.source import NS_PER_S, Source, read_objects, shown, tables
from kvsim.workload.trace import Row, Trace


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


def _only_result(source: Source, option: str) -> dict[str, Any]:
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


def _read_lists(source: Source, result: dict[str, Any], *further: str) -> dict[str, list[Any]]:
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
    result: dict[str, Any],
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


def _options(result: dict[str, Any]) -> str:
    """The rate and the slots of a benchmark, as for a command line."""
    rate, slots = result.get("request_rate"), result.get("max_concurrency")
    found = f"--request-rate {rate:g}" if type(rate) in (int, float) else "--request-rate inf"
    return f"{found} --max-concurrency {slots}" if type(slots) is int else found


def _measured(source: Source, lists: dict[str, list[Any]], number: int) -> dict[str, Any]:
    names = {"ttfts": "ttft_s", "latencies": "e2e_s", "queue_times": "client_queue_s"}
    observed: dict[str, Any] = {}
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
        why = _failure(table, metadata)
        if why:
            gathered.drop(why)
        else:
            _aiperf_add(source, gathered, metadata, metrics, last)
    return gathered.trace()


def _failure(table: dict[str, Any], metadata: dict[str, Any]) -> str:
    if metadata.get("benchmark_phase") == "warmup":
        return "they belong to the warm-up"
    if metadata.get("was_cancelled"):
        return "they were cancelled"
    return "they failed" if table.get("error") else ""


def _aiperf_add(
    source: Source,
    gathered: Gathered,
    metadata: dict[str, Any],
    metrics: dict[str, Any],
    last: dict[str, tuple[Row, int]],
) -> None:
    """Gather a request; `last`: the last turn of each conversation, and when it ended."""
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


def _value(source: Source, metrics: dict[str, Any], key: str) -> object:
    metric = metrics.get(key)
    if not isinstance(metric, dict) or "value" not in metric:
        raise source.error("no value; give the records as AIPerf wrote them", key)
    return metric["value"]


def _aiperf_observed(source: Source, metrics: dict[str, Any]) -> dict[str, Any] | None:
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


_LEFT_OUT = {"errored": "they failed", "incomplete": "they were not complete"}


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
    for number, request in enumerate(_guidellm_list(source, requests, "successful")):
        _guidellm_add(source, gathered, request, f"successful[{number}]")
    for key, why in _LEFT_OUT.items():
        for _ in _guidellm_list(source, requests, key):
            gathered.drop(why)
    return gathered.trace()


def _guidellm_list(source: Source, requests: dict[str, Any], key: str) -> list[Any]:
    values = requests.get(key) or []
    if not isinstance(values, list):
        raise source.error("not a list; give the report as GuideLLM wrote it", f"requests.{key}", 0)
    return values


def _guidellm_add(source: Source, gathered: Gathered, request: Any, where: str) -> None:
    if not isinstance(request, dict):
        raise source.error("not an object; give the report as GuideLLM wrote it", where, 0)
    start = request.get("request_start_time")
    gathered.add(
        tokens(source, f"{where}.prompt_tokens", request.get("prompt_tokens")),
        tokens(source, f"{where}.output_tokens", request.get("output_tokens")),
        time_ns=None
        if start is None
        else instant(source, f"{where}.request_start_time", start, NS_PER_S),
        id=request.get("request_id"),
        observed=_guidellm_observed(request),
    )


def _guidellm_observed(request: dict[str, Any]) -> dict[str, Any] | None:
    factors = {"time_to_first_token_ms": ("ttft_s", 1000), "request_latency": ("e2e_s", 1)}
    observed = {
        name: request[key] / factor
        for key, (name, factor) in factors.items()
        if type(request.get(key)) in (int, float)
    }
    return observed or None
