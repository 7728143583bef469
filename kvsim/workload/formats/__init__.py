"""Formats of trace files: which one a file is in, by its content, and what reads it.

A reader is a function of a module here. It raises `TraceError` for a file that it cannot read as
what it is, and whatever it drops or changes becomes a note of the trace. The traps of a format are
in the docstring of its module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import islice
from operator import eq
from pathlib import Path
from typing import NamedTuple

from kvsim.core.collector import collector_paused
from kvsim.errors import ConfigError, TraceError, check_choice, nearest
from kvsim.workload.source import NS_PER_S, Head, Source, look, separator_of, shown
from kvsim.workload.trace import Row, Trace, column


class Format(NamedTuple):
    """How a format is recognised and read."""

    reader: str
    """`module:function`, of a module of `kvsim.workload`, imported when it reads."""
    recognises: Callable[[Head], bool]
    """Whether a file is in this format, if it is in none of those before it."""


def _keys(*words: str) -> Callable[[Head], bool]:
    """Whether the first object has all of these keys; of `a|b`, one of the two."""
    needed = [set(word.split("|")) for word in words]
    return lambda head: all(head.keys & each for each in needed)


def _words(*words: str) -> Callable[[Head], bool]:
    """Whether a file of JSON has all of these words in quotes near its beginning."""
    return lambda head: head.is_json and all(f'"{word}"' in head.text for word in words)


def _columns(*names: str) -> Callable[[Head], bool]:
    """Whether a table has all of these columns; of `a|b`, one of the two."""
    needed = [set(name.split("|")) for name in names]
    return lambda head: all(each & set(head.columns) for each in needed)


def _is_vllm_bench(head: Head) -> bool:
    """Whether this is a result of vLLM's client, with or without lists.

    The lists may begin beyond the head, so they do not tell it from SGLang's result.
    """
    is_result = bool(head.keys & {"request_throughput", "input_lens"})
    return is_result and ("tokenizer_id" in head.keys or "dataset_name" not in head.keys)


def _is_inference_perf(head: Head) -> bool:
    words = _words("start_time", "end_time", "info", "input_tokens")
    return head.text.lstrip().startswith("[") and words(head)


def _is_vllm_log(head: Head) -> bool:
    from kvsim.workload.formats.served import LOGGED

    return not head.is_json and LOGGED.search(head.text) is not None


def _is_table(head: Head) -> bool:
    """Whether the second line has as many cells as the first, and more than 1."""
    if head.is_parquet:
        return True
    lines = [line for line in head.text.splitlines() if line.strip()]
    if head.is_json or len(head.columns) < 2 or len(lines) < 2:
        return False
    return lines[1].count(separator_of(lines[0])) == lines[0].count(separator_of(lines[0]))


READERS: dict[str, Format] = {
    "native": Format("native:read", _keys("kvsim_trace")),
    "qwen": Format("formats.prompts:read_qwen", _keys("chat_id", "parent_chat_id")),
    "llmservingsim": Format(
        "formats.prompts:read_llmservingsim", _keys("input_toks", "output_toks")
    ),
    "lmcache": Format("formats.prompts:read_lmcache", _keys("chunk_hashes", "seq_len")),
    "weka": Format("formats.agents:read_weka", _keys("requests", "hash_id_scope")),
    "guidellm": Format("formats.served:read_guidellm", _keys("benchmarks")),
    "aiperf": Format("formats.served:read_aiperf", _keys("metadata", "metrics")),
    "vllm-bench": Format("formats.served:read_vllm", _is_vllm_bench),
    "sglang-bench": Format(
        "formats.served:read_sglang", _keys("dataset_name", "request_throughput|input_lens")
    ),
    "openai-batch": Format("formats.prompts:read_batch", _keys("custom_id", "body|response")),
    "claude-code": Format(
        "formats.agents:read_claude_code", _words("sessionId", "message", "cache_read_input_tokens")
    ),
    "otel": Format("formats.served:read_otel", _keys("resourceSpans")),
    "inference-perf": Format("formats.served:read_inference_perf", _is_inference_perf),
    "langfuse": Format("formats.served:read_langfuse", _words("GENERATION", "startTime")),
    "litellm": Format("formats.served:read_litellm", _words("startTime", "prompt_tokens")),
    "sharegpt": Format("formats.prompts:read_sharegpt", _keys("conversations")),
    "custom": Format(
        "formats.prompts:read_custom",
        lambda head: "prompt" in head.keys and "body" not in head.keys,
    ),
    "mooncake": Format(
        "formats.mooncake:read", _keys("input_length|input_tokens", "output_length|output_tokens")
    ),
    "azure": Format("formats.table:AZURE", _columns("ContextTokens|GeneratedTokens")),
    "vidur": Format("formats.table:VIDUR", _columns("num_prefill_tokens", "num_decode_tokens")),
    "burstgpt": Format("formats.table:BURSTGPT", _columns("Request tokens", "Response tokens")),
    "vllm-log": Format("formats.served:read_vllm_log", _is_vllm_log),
    "table": Format("formats.table:read", _is_table),
}
"""Format → how it is recognised, in this order, and read."""

_MOST_NAMES = 12
_REWRITE = "write its rows as kvsim_trace, which has a place for all of it"
_REFUSED = (
    ("a Mooncake file of texts", "text_input", "give input_length and hash_ids instead"),
    ("a Mooncake file of texts", "messages", "give input_length and hash_ids instead"),
    ("a Dynamo agentic_mooncake trace", "dynamo.agentic_mooncake", _REWRITE),
)
"""Known formats without a reader: name, key that identifies them, remedy."""

_CONVERT = {
    False: "say which column is what: --columns arrival_s=TIME,input=PROMPT,output=OUTPUT",
    True: "make a table: (echo arrival_s,input_tokens,output_tokens; jq -r"
    " '[.TIME,.PROMPT,.OUTPUT]|@csv' FILE) >t.csv",
}
"""How a file of an unknown format becomes a trace, by whether it is JSON."""


@collector_paused()
def open_trace(path: str, format: str | None = None, columns: str | None = None) -> Trace:
    """Read the trace at `path`, or the shipped one of that name.

    `format` (a key of `READERS`) overrides what the content says. `columns` says which column of a
    CSV or Parquet file is what, as in `arrival_ms=ts,input=prompt_tokens,output=output_tokens`.

    Raises `TraceError` for a file that cannot be read, `ConfigError` for an unknown format or role.
    """
    if format is not None:
        check_choice("trace format", format, READERS)
    if format not in (None, "table") and columns is not None:
        raise ConfigError(
            f"--columns: only for tables, not for --trace-format {format}; leave one out"
        )
    trace = _read(_located(path), format, columns)
    trace.notes += _arrival_notes(trace.rows)
    return trace


def _read(path: str, format: str | None, columns: str | None) -> Trace:
    if Path(path).is_dir() and format in (None, "weka") and columns is None:
        from kvsim.workload.formats.agents import read_weka_folder

        return read_weka_folder(Path(path))
    with Source(path) as source:
        head = look(source)
        if not head.text.strip():
            raise source.error("empty; a trace has one request per line", line=0)
        if columns is not None:
            from kvsim.workload.formats.table import parse_columns, read_table

            return read_table(source, parse_columns(columns))
        module, _, name = READERS[format or _recognise(source, head)].reader.partition(":")
        trace: Trace = getattr(import_module(f"kvsim.workload.{module}"), name)(source)
        return trace


def _located(path: str) -> str:
    """The path itself, or that of the shipped trace with this name."""
    if "\0" in path or Path(path).exists():  # `Source` says what is wrong with the former
        return path
    # Here, as msgspec is absent where `kvsim.against.validate` measures.
    from kvsim.settings.library import find, names

    shipped = names("traces")
    if path in shipped:
        return str(find("traces", path))
    near = f"{nearest(path, shipped)} give the path of a trace, or one of {', '.join(shipped)}"
    raise TraceError(f"{path}: no such file;{near}")


def _recognise(source: Source, head: Head) -> str:
    """The format of a file by its head. Refuses known formats without a reader by name."""
    for what, telling, remedy in _REFUSED:
        if telling in head.keys and "kvsim_trace" not in head.keys:
            raise source.error(f"{what}, which kvsim does not read; {remedy}", line=0)
    for name, format in READERS.items():
        if format.recognises(head):
            return name
    found = sorted(head.keys or head.columns)[:_MOST_NAMES]
    listed = ", ".join(map(shown, found)) or "none"
    what = f"unknown format; {'keys' if head.is_json else 'columns'} found: {listed}"
    raise source.error(
        f"{what}; formats known: {', '.join(READERS)}; {_CONVERT[head.is_json]}", line=0
    )


_SUSPICIOUS_RATE = 1000


def _arrival_notes(rows: Sequence[Row]) -> list[str]:
    """Warnings about recorded times: a coarse grid, or a rate that suggests the wrong unit."""
    times = [time for time in column(rows, "arrival_ns") if time is not None]
    if len(times) < 2:
        return []
    notes = []
    gaps, span_ns = len(times) - 1, times[-1] - times[0]
    ties = sum(map(eq, times, islice(times, 1, None)))
    if ties * 2 > gaps:
        notes.append(
            f"{100 * ties / gaps:.1f} % of the gaps between arrivals are 0: each recorded time is"
            " an artificial batch; --spread-ties spreads it over the gap that follows"
        )
    if gaps * NS_PER_S > _SUSPICIOUS_RATE * span_ns > 0:
        rate = gaps * NS_PER_S / span_ns
        notes.append(f"{rate:,.0f} requests/s on average: is the unit of the times right?")
    return notes


MOST_FAULTS = 20


def check_trace(
    path: str, format: str | None = None, columns: str | None = None
) -> tuple[Trace | None, list[str]]:
    """The trace in a file if it is sound, else None and its faults, each `FILE:LINE: FIELD: what`.

    A native file is read to its end, up to `MOST_FAULTS` faults. Of any other format, whose rows
    may hang together in any way, the first fault is the only one. Arguments as of `open_trace`.
    """
    try:
        return open_trace(path, format, columns), []
    except TraceError as error:
        first = str(error)
    if format in (None, "native") and Path(path).is_file():
        from kvsim.workload.native import faults

        with Source(path) as source:
            if format == "native" or READERS["native"].recognises(look(source)):
                return None, [str(each) for each in faults(source, MOST_FAULTS)]
    return None, [first]


WRITTEN = ("native", "mooncake")


def convert(trace: Trace, out_path: str, to: str, block_size: int | None = None) -> list[str]:
    """Write `trace` to `out_path` as `native` or `mooncake`; returns notes for the user.

    `block_size` (tokens per id) is for `mooncake` alone. What the reader dropped or changed goes
    into the native header's `source.note`. Raises `ConfigError` or `OutputError`; a failed
    conversion leaves no file.
    """
    if to == "mooncake":
        from kvsim.workload.formats import mooncake

        return mooncake.write(trace, out_path, block_size)
    check_choice("trace format", to, WRITTEN)
    if block_size is not None:
        raise ConfigError("block_size: a native file keeps the trace's own; leave it out")
    from kvsim.workload import native

    known = [str(trace.source["note"])] if "note" in trace.source else []
    about_times = _arrival_notes(trace.rows)
    changes = [note for note in trace.notes if note not in [*about_times, *known]]
    if changes:
        trace = replace(trace, source={**trace.source, "note": "; ".join([*known, *changes])})
    native.write(trace, out_path)
    return []
