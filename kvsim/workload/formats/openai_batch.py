"""OpenAI batch files: JSON Lines of `{"custom_id", "method", "url", "body"}`, or their results.

The traps: **outputs are not in the file**, only their limit (`max_completion_tokens`, `max_tokens`
or `max_output_tokens`), which is taken as their length; there are no arrivals; messages have no
token counts (`kvsim.workload.texts`) and may hold images, which are not counted. Embeddings
generate nothing and are refused. Results (`{"custom_id", "response", "error"}`) have the counts of
tokens, but neither prompts nor times, and are in any order; those that failed are left out.
"""

from __future__ import annotations

import json
from typing import Any

from kvsim.workload import texts
from kvsim.workload.gather import Gathered
from kvsim.workload.head import Head
from kvsim.workload.source import Source, parse, shown, string
from kvsim.workload.trace import Trace
from kvsim.workload.values import tokens

_USAGE = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_NOTE = "outputs are as long as their limit (max_tokens): how long they became is not in the file"


def recognises(head: Head) -> bool:
    """Whether the rows are requests with a body, or responses to them."""
    return "custom_id" in head.keys and bool(head.keys & {"body", "response"})


def read(source: Source) -> Trace:
    """The requests of a batch, without arrivals. Raises `TraceError` at the first wrong line."""
    gathered, known = Gathered(source, "openai-batch"), texts.TextIds()
    for line in source.lines():
        table = parse(source, line)
        if "response" in table:
            _add_result(source, gathered, table)
            continue
        body = table.get("body")
        if not isinstance(body, dict):
            raise source.error(f"{shown(body)} is not an object; give one", "body")
        if str(table.get("url")).endswith("/embeddings"):
            raise source.error("embeddings generate nothing; keep requests that do", "url")
        stream = texts.Stream(known)
        for part in _texts(source, body):
            stream.append(part)
        output_length = _limit(source, body)
        if not stream.tokens:
            gathered.drop("the prompt is empty")
            continue
        gathered.add(
            stream.tokens,
            output_length,
            id=string(source, table, "custom_id"),
            content=stream.content(),
            max_new_tokens=output_length,
        )
    if all(row.content is None for row in gathered.rows):
        return gathered.trace()
    return texts.identified(gathered.trace(_NOTE, texts.NOTE))


def _add_result(source: Source, gathered: Gathered, table: dict[str, Any]) -> None:
    response = table.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    usage = body.get("usage") if isinstance(body, dict) else None
    if table.get("error") or not isinstance(usage, dict):
        gathered.drop("they failed, or count no tokens")
        return
    counts = [
        next((usage[key] for key in keys if usage.get(key) is not None), None) for keys in _USAGE
    ]
    gathered.add(
        tokens(source, "usage.prompt_tokens", counts[0]),
        tokens(source, "usage.completion_tokens", counts[1]),
        id=string(source, table, "custom_id"),
    )


def _limit(source: Source, body: dict[str, Any]) -> int:
    for key in _LIMITS:
        if body.get(key) is not None:
            return tokens(source, f"body.{key}", body[key])
    what = "missing, so the length of the output is unknown; add it to every body"
    raise source.error(what, "body.max_tokens")


def _texts(source: Source, body: dict[str, Any]) -> list[str]:
    """The texts of a prompt in the order in which a chat template puts them."""
    found = [json.dumps(body["tools"])] if body.get("tools") else []
    if all(body.get(key) is None for key in ("prompt", "input", "messages")):
        raise source.error("no messages, prompt or input; add one", "body")
    for key in ("instructions", "prompt", "input", "messages"):
        if body.get(key) is not None:
            found += _flat(source, body[key], f"body.{key}")
    return found


def _flat(source: Source, value: Any, where: str) -> list[str]:
    """The texts in a message, a part of it or a list of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for each in value for text in _flat(source, each, where)]
    if isinstance(value, dict):
        inner = value.get("content") if value.get("content") is not None else value.get("text", "")
        return _flat(source, inner, where)
    raise source.error(f"{shown(value)} is not a text; give texts or messages", where)
