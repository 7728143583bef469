"""AIPerf's `profile_export.jsonl`: one record per request, metrics with a value and a unit.

The traps (AIPerf 0.13.0, `common/models/record_models.py`): records are in order of completion, so
they are sorted; failed and cancelled requests, and those of the warm-up, are left out; times are
Unix nanoseconds of the moment when a request was sent; prompts are in another file (`inputs.json`),
so nothing is shared. Turns of one conversation follow each other. `Row.observed` has `ttft_s` and
`e2e_s`.
"""

from __future__ import annotations

from typing import Any

from kvsim.workload.gather import Gathered
from kvsim.workload.source import NS_PER_S, Head, Source, instant, parse, shown, tokens
from kvsim.workload.trace import Row, Trace

_PER_SECOND = {"s": 1, "sec": 1, "ms": 1000, "us": 1_000_000, "ns": NS_PER_S}
_MEASURED = {"time_to_first_token": "ttft_s", "request_latency": "e2e_s"}


def recognises(head: Head) -> bool:
    """Whether the rows have metadata and metrics."""
    return {"metadata", "metrics"} <= head.keys and "benchmarks" not in head.keys


def read(source: Source) -> Trace:
    """The requests of an AIPerf run. Raises `TraceError` at the first line that is wrong."""
    gathered = Gathered(source, "aiperf")
    last: dict[str, tuple[Row, int]] = {}
    for line in source.lines():
        table = parse(source, line)
        metadata, metrics = table.get("metadata"), table.get("metrics")
        if not isinstance(metadata, dict) or not isinstance(metrics, dict):
            field = "metrics" if isinstance(metadata, dict) else "metadata"
            raise source.error("not an object; give the records as AIPerf wrote them", field)
        why = _failure(table, metadata)
        if why:
            gathered.drop(why)
        else:
            _add(source, gathered, metadata, metrics, last)
    return gathered.trace()


def _failure(table: dict[str, Any], metadata: dict[str, Any]) -> str:
    if metadata.get("benchmark_phase") == "warmup":
        return "they belong to the warm-up"
    if metadata.get("was_cancelled"):
        return "they were cancelled"
    return "they failed" if table.get("error") else ""


def _add(
    source: Source,
    gathered: Gathered,
    metadata: dict[str, Any],
    metrics: dict[str, Any],
    last: dict[str, tuple[Row, int]],
) -> None:
    """Gather a request; `last`: the last turn of each conversation, and when it ended."""
    start_ns = instant(source, "request_start_ns", metadata.get("request_start_ns"), 1)
    name, session = metadata.get("x_request_id"), metadata.get("x_correlation_id")
    is_turn = isinstance(session, str) and type(metadata.get("turn_index")) is int
    before = last.get(str(session)) if is_turn else None
    row = gathered.add(
        tokens(source, "input_sequence_length", _value(source, metrics, "input_sequence_length")),
        tokens(source, "output_sequence_length", _value(source, metrics, "output_sequence_length")),
        time_ns=start_ns,
        id=name if isinstance(name, str) else None,
        after=-1 if before is None else before[0].index,
        delay_ns=0 if before is None else max(0, start_ns - before[1]),
        session=str(session) if is_turn else None,
        turn=tokens(source, "turn_index", max(0, metadata["turn_index"]), 0) if is_turn else None,
        observed=_observed(source, metrics),
    )
    if is_turn:
        end_ns = instant(source, "request_end_ns", metadata.get("request_end_ns"), 1)
        last[str(session)] = row, end_ns


def _value(source: Source, metrics: dict[str, Any], key: str) -> object:
    metric = metrics.get(key)
    if not isinstance(metric, dict) or "value" not in metric:
        raise source.error("no value; give the records as AIPerf wrote them", key)
    return metric["value"]


def _observed(source: Source, metrics: dict[str, Any]) -> dict[str, Any] | None:
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
