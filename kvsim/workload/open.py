"""Opens a trace file of any format, recognised by its content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set

from kvsim.errors import ConfigError, nearest
from kvsim.workload import azure, mooncake, native
from kvsim.workload.arrivals import arrival_notes
from kvsim.workload.source import Source, shown
from kvsim.workload.trace import Trace

READERS: dict[str, Callable[[Source], Trace]] = {
    "native": native.read,
    "mooncake": mooncake.read,
    "azure": azure.read,
}
"""Format → its reader."""

_HEAD_LINES = 50
_MOST_NAMES = 12
_KEY = re.compile(r'"([^"\\]+)"\s*:')
_CONVERT = "write its rows as kvsim_trace, which has a place for all of it"
_FOREIGN: tuple[tuple[str, Set[str], str], ...] = (
    (
        "a Qwen-Bailian trace",
        {"chat_id", "parent_chat_id"},
        "its times are seconds and its ids 16-token blocks: write its rows as kvsim_trace",
    ),
    ("an LLMServingSim trace", {"input_toks", "output_toks"}, _CONVERT),
    ("a WEKA Claude Code session", {"requests", "hash_id_scope"}, _CONVERT),
    ("a result of vllm bench serve", {"input_lens", "output_lens"}, _CONVERT),
    ("a result of vllm bench serve", {"request_throughput"}, "give the trace that was sent"),
    ("a Vidur trace", {"num_prefill_tokens", "num_decode_tokens"}, _CONVERT),
    ("a BurstGPT trace", {"Request tokens", "Response tokens"}, _CONVERT),
    ("a Mooncake file of texts", {"text_input"}, "give input_length and hash_ids instead"),
    ("a Mooncake file of texts", {"messages"}, "give input_length and hash_ids instead"),
    ("a Dynamo agentic_mooncake trace", {"dynamo.agentic_mooncake"}, _CONVERT),
)
"""Known formats without a reader: name, keys or columns that identify them, remedy."""


def open_trace(path: str, format: str | None = None) -> Trace:
    """Read the trace at `path`; `format` (a key of `READERS`) overrides what the content says.

    Raises `TraceError` for a file that cannot be read, `ConfigError` for an unknown format.
    """
    if format is not None and format not in READERS:
        known = ", ".join(READERS)
        raise ConfigError(
            f"trace format: no {format!r};{nearest(format, READERS)} it takes {known}"
        )
    with Source(path) as source:
        if not source.head(1):
            raise source.error("empty; a trace has one request per line", line=0)
        trace = READERS[format or _recognise(source)](source)
    trace.notes += arrival_notes(trace.rows)
    return trace


def _recognise(source: Source) -> str:
    """The format of a file, by its first line; refuses known formats without a reader by name."""
    first = source.head(1)[0]
    is_json = first.lstrip()[:1] in ("{", "[")
    names = _keys(source, first) if is_json else {cell.strip('" ') for cell in first.split(",")}
    if "kvsim_trace" in names:
        return "native"
    for name, telling, remedy in _FOREIGN:
        if names >= telling:
            raise source.error(f"{name}, which kvsim does not read; {remedy}", line=0)
    if names & {"input_length", "input_tokens"} and names & {"output_length", "output_tokens"}:
        return "mooncake"
    if names & set(azure.COLUMNS):
        return "azure"
    found = ", ".join(map(shown, sorted(names)[:_MOST_NAMES])) or "none"
    what = f"unknown format; {'keys' if is_json else 'columns'} found: {found}"
    raise source.error(f"{what}; formats known: {', '.join(READERS)}", line=0)


def _keys(source: Source, first: str) -> set[str]:
    """Keys of the object that the file begins with, even if it spans lines or is damaged."""
    try:
        table = json.loads(first)
    except (ValueError, RecursionError):
        return set(_KEY.findall("\n".join(source.head(_HEAD_LINES))))
    if not isinstance(table, dict):
        return set(_KEY.findall(first))
    schema = table.get("schema")
    return {*table, schema} if isinstance(schema, str) else set(table)
