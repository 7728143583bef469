"""Checks a trace file: all its faults instead of the first."""

from __future__ import annotations

from pathlib import Path

from kvsim.errors import TraceError
from kvsim.workload import native
from kvsim.workload.head import look
from kvsim.workload.open import open_trace
from kvsim.workload.source import Source
from kvsim.workload.trace import Trace

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
    if Path(path).is_file():
        with Source(path) as source:
            if format == "native" or (format is None and native.recognises(look(source))):
                return None, [str(each) for each in native.faults(source, MOST_FAULTS)]
    return None, [first]
