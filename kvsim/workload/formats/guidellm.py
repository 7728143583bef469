"""GuideLLM reports (`benchmarks.json`): requests by how they ended, with tokens and times.

The traps (GuideLLM 0.8.1, `schemas/base/request_stats.py`): a sweep writes one benchmark per rate
into the same report, of which one has to be chosen; failed and incomplete requests are left out;
`request_start_time` is in Unix seconds, of the moment when a request was sent. Prompts are not
read, so nothing is shared. `Row.observed` has `ttft_s` and `e2e_s`.
"""

from __future__ import annotations

from typing import Any

from kvsim.workload.document import read_objects
from kvsim.workload.gather import Gathered
from kvsim.workload.source import NS_PER_S, Head, Source, instant, tokens
from kvsim.workload.trace import Trace

_LEFT_OUT = {"errored": "they failed", "incomplete": "they were not complete"}


def recognises(head: Head) -> bool:
    """Whether this is a report with benchmarks."""
    return "benchmarks" in head.keys


def read(source: Source) -> Trace:
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
    for number, request in enumerate(_list(source, requests, "successful")):
        _add(source, gathered, request, f"successful[{number}]")
    for key, why in _LEFT_OUT.items():
        for _ in _list(source, requests, key):
            gathered.drop(why)
    return gathered.trace()


def _list(source: Source, requests: dict[str, Any], key: str) -> list[Any]:
    values = requests.get(key) or []
    if not isinstance(values, list):
        raise source.error("not a list; give the report as GuideLLM wrote it", f"requests.{key}", 0)
    return values


def _add(source: Source, gathered: Gathered, request: Any, where: str) -> None:
    if not isinstance(request, dict):
        raise source.error("not an object; give the report as GuideLLM wrote it", where, 0)
    start, name = request.get("request_start_time"), request.get("request_id")
    gathered.add(
        tokens(source, f"{where}.prompt_tokens", request.get("prompt_tokens")),
        tokens(source, f"{where}.output_tokens", request.get("output_tokens")),
        time_ns=None
        if start is None
        else instant(source, f"{where}.request_start_time", start, NS_PER_S),
        id=name if isinstance(name, str) else None,
        observed=_observed(request),
    )


def _observed(request: dict[str, Any]) -> dict[str, Any] | None:
    factors = {"time_to_first_token_ms": ("ttft_s", 1000), "request_latency": ("e2e_s", 1)}
    observed = {
        name: request[key] / factor
        for key, (name, factor) in factors.items()
        if type(request.get(key)) in (int, float)
    }
    return observed or None
