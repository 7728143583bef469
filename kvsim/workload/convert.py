"""Writes a trace in another format, and reports what that changed."""

from __future__ import annotations

from dataclasses import replace

from kvsim.errors import ConfigError, check_choice
from kvsim.workload import native
from kvsim.workload.arrivals import arrival_notes
from kvsim.workload.export import write_mooncake
from kvsim.workload.trace import Trace

FORMATS = ("native", "mooncake")


def convert(trace: Trace, out_path: str, to: str, block_size: int | None = None) -> list[str]:
    """Write `trace` to `out_path` as `native` or `mooncake`; returns notes for the user.

    `block_size` (tokens per id) is for `mooncake` alone. What the reader dropped or changed goes
    into the native header's `source.note`. Raises `ConfigError` or `OutputError`; a failed
    conversion leaves no file.
    """
    if to == "mooncake":
        return write_mooncake(trace, out_path, block_size)
    check_choice("trace format", to, FORMATS)
    if block_size is not None:
        raise ConfigError("block_size: a native file keeps the trace's own; leave it out")
    native.write(_with_notes(trace), out_path)
    return []


def _with_notes(trace: Trace) -> Trace:
    """The trace with its reader's changes in `source.note`, for readers of the new file."""
    known = [str(trace.source["note"])] if "note" in trace.source else []
    about_times = arrival_notes(trace.rows)
    changes = [note for note in trace.notes if note not in [*about_times, *known]]
    if not changes:
        return trace
    return replace(trace, source={**trace.source, "note": "; ".join([*known, *changes])})
