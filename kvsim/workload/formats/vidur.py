"""Vidur traces: CSV with `num_prefill_tokens,num_decode_tokens` and mostly `arrived_at` in seconds.

Files without `arrived_at` are lengths alone (microsoft/vidur, `data/processed_traces`). Vidur
raises lengths of 0 to 1 and cuts prompts to fit its model; here requests of 0 tokens are left out
and nothing is cut.
"""

from __future__ import annotations

from dataclasses import replace

from kvsim.workload.head import Head, look
from kvsim.workload.source import Source
from kvsim.workload.table import UNITS_NS, Columns, read_table
from kvsim.workload.trace import Trace

LENGTHS = Columns(input="num_prefill_tokens", output="num_decode_tokens")
ARRIVAL = "arrived_at"


def recognises(head: Head) -> bool:
    """Whether the columns are those of Vidur."""
    return {LENGTHS.input, LENGTHS.output} <= set(head.columns)


def read(source: Source) -> Trace:
    """A Vidur trace. Raises `TraceError` at the first line that is wrong."""
    timed = replace(LENGTHS, arrival=ARRIVAL, unit_ns=UNITS_NS["s"])
    has_times = ARRIVAL in look(source).columns
    return read_table(source, timed if has_times else LENGTHS, "vidur")
