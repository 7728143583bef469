"""OpenTelemetry's spans of calls of models, as OTLP in JSON: a document, or one on each line.

The traps (semantic conventions of `gen_ai`): spans of agents and tools stand around those of
models and have no output of their own, or sums; numbers of 64 bits are texts; prompts that were
read from a cache are within `gen_ai.usage.input_tokens`. Times are nanoseconds since 1970. A
conversation (`gen_ai.conversation.id`), or a trace, is a session. Nothing is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvsim.workload.formats.served import records
from kvsim.workload.gather import Gathered
from kvsim.workload.source import NS_PER_S, Head, Source, instant, tokens
from kvsim.workload.trace import Trace

_INPUT, _OUTPUT = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
_AROUND = ("invoke_agent", "create_agent", "invoke_workflow", "execute_tool", "embeddings")
"""`gen_ai.operation.name` of spans that call no model to generate."""


def recognises(head: Head) -> bool:
    """Whether these are spans."""
    return "resourceSpans" in head.keys


def read(source: Source) -> Trace:
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
        session = facts.get("gen_ai.conversation.id") or span.get("traceId")
        model = facts.get("gen_ai.request.model")
        gathered.add(
            tokens(source, f"{where}.{_INPUT}", facts.get(_INPUT)),
            tokens(source, f"{where}.{_OUTPUT}", facts[_OUTPUT]),
            time_ns=start_ns,
            id=name if isinstance(name := span.get("spanId"), str) else None,
            session=session if isinstance(session, str) else None,
            model=model if isinstance(model, str) else None,
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
