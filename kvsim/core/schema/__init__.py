"""Declares every column of a result once: for memory, Parquet files and the reference.

```
StepRows ──► STEPS         RequestRows, trace ──► REQUESTS      + in files: seconds, made of the
 ledger  ──► its kernels               ledger ──► its parts       nanoseconds of the same name
```

`python -m kvsim.core.schema` prints `docs/reference/columns.md`.
"""

from kvsim.core.schema.column import FLOAT, INTEGER, TEXT, Column, Source, Table
from kvsim.core.schema.logs import (
    BLOCK_MAP,
    CAUSES,
    HANDOVERS,
    KINDS,
    LEG_LABELS,
    LEGS,
    ROUTING,
    TRANSITIONS,
)
from kvsim.core.schema.requests import REQUEST_COLUMNS, REQUESTS
from kvsim.core.schema.steps import BLOCKED, SGLANG_COLUMNS, STAGE_COLUMNS, STEP_COLUMNS, STEPS

TABLES = (REQUESTS, STEPS, TRANSITIONS, BLOCK_MAP, ROUTING, HANDOVERS)

__all__ = [
    "BLOCKED",
    "BLOCK_MAP",
    "CAUSES",
    "FLOAT",
    "HANDOVERS",
    "INTEGER",
    "KINDS",
    "LEGS",
    "LEG_LABELS",
    "REQUESTS",
    "REQUEST_COLUMNS",
    "ROUTING",
    "SGLANG_COLUMNS",
    "STAGE_COLUMNS",
    "STEPS",
    "STEP_COLUMNS",
    "TABLES",
    "TEXT",
    "TRANSITIONS",
    "Column",
    "Source",
    "Table",
]
