"""Azure LLM inference traces: CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`.

The files of 2023 have dates with seven decimals, no zone and CRLF line ends; those of 2024 have
six decimals and `+00:00` (Azure/AzurePublicDataset). Rows need not be sorted. There is no content,
so no prompt hits the prefix cache.
"""

from __future__ import annotations

from kvsim.workload.head import Head
from kvsim.workload.source import Source
from kvsim.workload.table import Columns, read_table
from kvsim.workload.trace import Trace

COLUMNS = Columns(arrival="TIMESTAMP", input="ContextTokens", output="GeneratedTokens")


def recognises(head: Head) -> bool:
    """Whether the columns are those of Azure."""
    return bool({COLUMNS.input, COLUMNS.output} & set(head.columns))


def read(source: Source) -> Trace:
    """An Azure trace; arrivals count from its first row, whose time becomes `origin`.

    Raises `TraceError` at the first line that is wrong.
    """
    return read_table(source, COLUMNS, "azure")
