"""Opens a trace file of any format, recognised by its content."""

from __future__ import annotations

from collections.abc import Set
from importlib import import_module
from pathlib import Path
from typing import Any

from kvsim.core.collector import collector_paused
from kvsim.errors import ConfigError, TraceError, check_choice, nearest
from kvsim.workload.arrivals import arrival_notes
from kvsim.workload.source import Head, Source, look, shown
from kvsim.workload.trace import Trace

READERS: dict[str, str] = {
    "native": "native",
    "qwen": "formats.lines:QWEN",
    "llmservingsim": "formats.lines:LLMSERVINGSIM",
    "lmcache": "formats.lines:LMCACHE",
    "weka": "formats.weka",
    "guidellm": "formats.bench:GUIDELLM",
    "aiperf": "formats.bench:AIPERF",
    "vllm-bench": "formats.bench:VLLM",
    "sglang-bench": "formats.bench:SGLANG",
    "openai-batch": "formats.texts:OPENAI_BATCH",
    "claude-code": "formats.claude_code",
    "otel": "formats.served:OTEL",
    "inference-perf": "formats.served:INFERENCE_PERF",
    "langfuse": "formats.served:LANGFUSE",
    "litellm": "formats.served:LITELLM",
    "sharegpt": "formats.texts:SHAREGPT",
    "custom": "formats.texts:CUSTOM",
    "mooncake": "formats.mooncake",
    "azure": "formats.columns:AZURE",
    "vidur": "formats.columns:VIDUR",
    "burstgpt": "formats.columns:BURSTGPT",
    "vllm-log": "formats.vllm_log",
    "table": "formats.columns",
}
"""Format → the module of `kvsim.workload`, or the `Reader` in one, that `recognises` and that will
`read` it. They are asked in this order, and imported when they are."""

_MOST_NAMES = 12
_REWRITE = "write its rows as kvsim_trace, which has a place for all of it"
_REFUSED: tuple[tuple[str, Set[str], str], ...] = (
    ("a Mooncake file of texts", {"text_input"}, "give input_length and hash_ids instead"),
    ("a Mooncake file of texts", {"messages"}, "give input_length and hash_ids instead"),
    ("a Dynamo agentic_mooncake trace", {"dynamo.agentic_mooncake"}, _REWRITE),
)
"""Known formats without a reader: name, keys that identify them, remedy."""

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
    trace.notes += arrival_notes(trace.rows)
    return trace


def _read(path: str, format: str | None, columns: str | None) -> Trace:
    if Path(path).is_dir() and format in (None, "weka") and columns is None:
        from kvsim.workload.formats.weka import read_folder

        return read_folder(Path(path))
    with Source(path) as source:
        head = look(source)
        if head.is_blank:
            raise source.error("empty; a trace has one request per line", line=0)
        if columns is not None:
            from kvsim.workload.table import parse_columns, read_table

            return read_table(source, parse_columns(columns))
        trace: Trace = _reader(format or _recognise(source, head)).read(source)
        return trace


def _reader(format: str) -> Any:
    module, _, name = READERS[format].partition(":")
    found = import_module(f"kvsim.workload.{module}")
    return getattr(found, name) if name else found


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
        if head.keys >= telling and "kvsim_trace" not in head.keys:
            raise source.error(f"{what}, which kvsim does not read; {remedy}", line=0)
    for name in READERS:
        if _reader(name).recognises(head):
            return name
    found = sorted(head.keys or head.columns)[:_MOST_NAMES]
    listed = ", ".join(map(shown, found)) or "none"
    what = f"unknown format; {'keys' if head.is_json else 'columns'} found: {listed}"
    raise source.error(
        f"{what}; formats known: {', '.join(READERS)}; {_CONVERT[head.is_json]}", line=0
    )


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
    native = _reader("native")
    if Path(path).is_file():
        with Source(path) as source:
            if format == "native" or (format is None and native.recognises(look(source))):
                return None, [str(each) for each in native.faults(source, MOST_FAULTS)]
    return None, [first]
