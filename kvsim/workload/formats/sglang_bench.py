"""Results of SGLang's `bench_serving --output-details`: one JSON object per run of the benchmark.

The traps (SGLang 0.5.23, `benchmark/serving.py`): every run is appended to the same file; lists per
request exist only with `--output-details`; no list says when a request was sent, so the trace has
no arrivals, and the note gives the rate and the slots of the benchmark. Failed requests have an
output of 0. `Row.observed` is as in `vllm_bench`, but `e2e_s` is the sum of TTFT and ITLs.
"""

from __future__ import annotations

from kvsim.workload.formats.vllm_bench import (
    add_measured,
    model_of,
    only_result,
    rate_of,
    read_lists,
)
from kvsim.workload.gather import Gathered
from kvsim.workload.head import Head
from kvsim.workload.source import Source
from kvsim.workload.trace import Trace


def recognises(head: Head) -> bool:
    """Whether this is a result of SGLang's client, with or without lists."""
    return "dataset_name" in head.keys and bool(head.keys & {"request_throughput", "input_lens"})


def read(source: Source) -> Trace:
    """The requests of a benchmark, without arrivals. Raises `TraceError` as `vllm_bench` does."""
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
