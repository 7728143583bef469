"""LLMServingSim traces: JSON Lines of `input_toks,output_toks`, mostly with real token ids.

`arrival_time_ns` is in nanoseconds; `input_tok_ids` and `output_tok_ids` are the tokens themselves
(casys-kaist/LLMServingSim). Its agent sessions (`sub_requests`) are refused.
"""

from __future__ import annotations

from typing import Any

from kvsim.workload.gather import Gathered
from kvsim.workload.source import Head, Source, instant, integers, parse, tokens
from kvsim.workload.trace import Content, TokenContent, Trace

_MAX_TOKEN_ID = (1 << 63) - 1


def recognises(head: Head) -> bool:
    """Whether the rows have LLMServingSim's names."""
    return {"input_toks", "output_toks"} <= head.keys


def read(source: Source) -> Trace:
    """An LLMServingSim trace. Raises `TraceError` at the first line that is wrong."""
    gathered = Gathered(source, "llmservingsim")
    for line in source.lines():
        table = parse(source, line)
        if "sub_requests" in table:
            raise source.error("sessions are not read; write one request a line", "sub_requests")
        input_length = tokens(source, "input_toks", table.get("input_toks"))
        output_length = tokens(source, "output_toks", table.get("output_toks"))
        time = table.get("arrival_time_ns")
        gathered.add(
            input_length,
            output_length,
            time_ns=None if time is None else instant(source, "arrival_time_ns", time, 1),
            content=_content(source, table, input_length, output_length),
        )
    return gathered.trace()


def _content(
    source: Source, table: dict[str, Any], input_length: int, output_length: int
) -> Content | None:
    if table.get("input_tok_ids") is None:
        return None
    prompt = integers(source, table, "input_tok_ids", _MAX_TOKEN_ID)
    if len(prompt) != input_length:
        what = f"{len(prompt)} ids, but input_toks is {input_length}; fix one of them"
        raise source.error(what, "input_tok_ids")
    if table.get("output_tok_ids") is None:
        return TokenContent(tuple(prompt))
    output = integers(source, table, "output_tok_ids", _MAX_TOKEN_ID)
    if len(output) != output_length:
        what = f"{len(output)} ids, but output_toks is {output_length}; fix one of them"
        raise source.error(what, "output_tok_ids")
    return TokenContent(tuple(prompt), tuple(output))
