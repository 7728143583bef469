"""Langfuse's observations: JSON Lines, a list, a page of its API, or a trace with `observations`.

The traps: only those of type GENERATION called a model; `usageDetails` counts tokens that were
read from a cache or written to it under keys of their own, which all have `input` in their names
and belong to the prompt; older ones have `usage` or `promptTokens`. Ids name observations, and
`traceId` what belongs together. Prompts are texts without a tokenizer, so nothing is shared.
"""

from __future__ import annotations

from typing import Any

from kvsim.workload.gather import Gathered
from kvsim.workload.head import Head
from kvsim.workload.served import add_served, records
from kvsim.workload.source import Source
from kvsim.workload.trace import Trace

_TIMES = ("startTime", "completionStartTime", "endTime")
_NAMES = ("id", "traceId", "model")
_TELLING = '"GENERATION"'


def recognises(head: Head) -> bool:
    """Whether there are observations of calls of models."""
    return head.is_json and _TELLING in head.text and '"startTime"' in head.text


def read(source: Source) -> Trace:
    """The generations of an export, each when it began. Raises `TraceError`."""
    gathered = Gathered(source, "langfuse")
    within = "observations" if '"observations"' in source.beginning() else "data"
    for record in records(source, within):
        if record.table.get("type") != "GENERATION":
            gathered.drop("they called no model")
        elif record.table.get("level") == "ERROR":
            gathered.drop("they failed")
        else:
            add_served(source, gathered, record, _counts(record.table), _TIMES, _NAMES)
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
