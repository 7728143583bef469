"""Results of `vllm bench serve --save-result --save-detailed`: a trace and the measured answer.

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
"""

from __future__ import annotations

from typing import Any

from kvsim.core.sums import added
from kvsim.workload.document import read_objects
from kvsim.workload.gather import Gathered, Reader
from kvsim.workload.source import NS_PER_S, Head, Source, instant, tokens
from kvsim.workload.trace import Trace

FAILED = "they failed"


def _is_vllm(head: Head) -> bool:
    """Whether this is a result of vLLM's client, with or without lists.

    The lists may begin beyond the head, so they do not tell it from SGLang's result.
    """
    is_result = bool(head.keys & {"request_throughput", "input_lens"})
    return is_result and ("tokenizer_id" in head.keys or "dataset_name" not in head.keys)


def _read_vllm(source: Source) -> Trace:
    """The requests of a benchmark, each at the time it was sent, with what was measured.

    Raises `TraceError` for a result without lists, and for several results in one file.
    """
    result = only_result(source, "--save-detailed")
    lists = read_lists(source, result, ("start_times",), ("latencies", "queue_times"))
    gathered = Gathered(source, "vllm-bench")
    model = model_of(result)
    for number, start in enumerate(lists["start_times"]):
        time_ns = instant(source, "start_times", start, NS_PER_S)
        add_measured(source, gathered, lists, number, time_ns, model)
    notes = []
    if type(slots := result.get("max_concurrency")) is int:
        notes.append(
            f"arrivals are when requests were sent, after their wait for one of {slots} slots; for"
            f" the same closed loop give --request-rate {rate_of(result)} --max-concurrency {slots}"
        )
    return gathered.trace(*notes)


def only_result(source: Source, option: str) -> dict[str, Any]:
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


def read_lists(
    source: Source, result: dict[str, Any], needed: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, list[Any]]:
    """The lists per request that are there, all of one length. Raises `TraceError`."""
    lists: dict[str, list[Any]] = {}
    for key in ("input_lens", "output_lens", *needed, *optional, "ttfts", "itls", "errors"):
        if key not in result and key not in needed:
            continue
        values = result.get(key)
        if not isinstance(values, list):
            raise source.error("not a list; give the result as it was written", key, 0)
        if len(values) != len(result["input_lens"]):
            what = f"{len(values)} entries, but input_lens has {len(result['input_lens'])}"
            raise source.error(f"{what}; give the result as it was written", key, 0)
        lists[key] = values
    return lists


def add_measured(
    source: Source,
    gathered: Gathered,
    lists: dict[str, list[Any]],
    number: int,
    time_ns: int | None,
    model: str | None,
) -> None:
    """Gather the request at place `number` of the lists, unless it failed."""
    where = f"[{number}]"
    input_length = tokens(source, f"input_lens{where}", lists["input_lens"][number], 0)
    output_length = tokens(source, f"output_lens{where}", lists["output_lens"][number], 0)
    if not (input_length and output_length) or ("errors" in lists and lists["errors"][number]):
        gathered.drop(FAILED)
        return
    observed = _measured(source, lists, number)
    gathered.add(
        input_length,
        output_length,
        time_ns=time_ns,
        id=str(number),
        model=model,
        observed=observed or None,
    )


def model_of(result: dict[str, Any]) -> str | None:
    """The model that a result names; None if it names none."""
    name = result.get("model_id")
    return name if isinstance(name, str) and name else None


def rate_of(result: dict[str, Any]) -> str:
    """The request rate of a result as text for a command line."""
    rate = result.get("request_rate")
    return f"{rate:g}" if type(rate) in (int, float) else "inf"


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


def _is_sglang(head: Head) -> bool:
    """Whether this is a result of SGLang's client, with or without lists."""
    return "dataset_name" in head.keys and bool(head.keys & {"request_throughput", "input_lens"})


def _read_sglang(source: Source) -> Trace:
    """The requests of a benchmark, without arrivals. Raises `TraceError` as for vLLM."""
    result = only_result(source, "--output-details")
    lists = read_lists(source, result, (), ())
    gathered = Gathered(source, "sglang-bench")
    for number in range(len(lists["input_lens"])):
        add_measured(source, gathered, lists, number, None, model_of(result))
    slots = result.get("max_concurrency")
    options = f"--request-rate {rate_of(result)}"
    if type(slots) is int:
        options += f" --max-concurrency {slots}"
    return gathered.trace(f"the file does not say when requests were sent; it ran with {options}")


VLLM = Reader(_is_vllm, _read_vllm)
SGLANG = Reader(_is_sglang, _read_sglang)
