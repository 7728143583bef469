"""BurstGPT traces: CSV with `Timestamp,Model,Request tokens,Response tokens` and other columns.

Two headers are in use: that of the first release, and a later one with `Session ID` and
`Elapsed time` (HPMLL/BurstGPT). Times are seconds. A request with 0 response tokens failed: it is
left out. Requests of all models are kept, where `vllm bench serve` takes those to GPT-4 alone and
ignores their times. The turns of a session have no content, so they share no prefix.
"""

from __future__ import annotations

from dataclasses import replace

from kvsim.workload.head import Head, look
from kvsim.workload.source import Source
from kvsim.workload.table import UNITS_NS, Columns, read_table
from kvsim.workload.trace import Trace

COLUMNS = Columns(
    arrival="Timestamp",
    unit_ns=UNITS_NS["s"],
    input="Request tokens",
    output="Response tokens",
    model="Model",
)
SESSION = "Session ID"


def recognises(head: Head) -> bool:
    """Whether the columns are those of BurstGPT, in either release."""
    return {COLUMNS.input, COLUMNS.output} <= set(head.columns)


def read(source: Source) -> Trace:
    """A BurstGPT trace. Raises `TraceError` at the first line that is wrong."""
    with_sessions = SESSION in look(source).columns
    columns = replace(COLUMNS, session=SESSION) if with_sessions else COLUMNS
    return read_table(source, columns, "burstgpt")
