"""From a file of requests to requests that arrive: formats, block identities, arrivals, clients.

In go a file, or a few figures (`spec`). Out come a `Trace` of `Row`s, the identity of every block
(`keys`), and the requests in the order in which clients send them (`clients`).
"""

from kvsim.workload.formats import READERS, check_trace, convert, open_trace
from kvsim.workload.trace import (
    HashContent,
    ParentContent,
    Row,
    SegmentContent,
    TokenContent,
    Trace,
    column,
)

__all__ = [
    "READERS",
    "HashContent",
    "ParentContent",
    "Row",
    "SegmentContent",
    "TokenContent",
    "Trace",
    "check_trace",
    "column",
    "convert",
    "open_trace",
]
