"""Makes the requests of a run from the rows of a trace."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.request import Request, Stream
from kvsim.workload.keys import streams
from kvsim.workload.trace import Row, Trace


def make_requests(
    trace: Trace, rows: Sequence[Row], *, n: int = 1, keyed: bool = True
) -> list[Request]:
    """Fresh requests for rows of a trace; `keyed`: with block identities, `n`: samples of each."""
    identities: Sequence[Stream | None] = streams(trace) if keyed else [None] * len(trace.rows)
    return [
        Request(
            row.index,
            row.id,
            row.input_length,
            row.output_length,
            identities[row.index],
            n=n,
            priority=row.priority,
            session=row.session,
        )
        for row in rows
    ]
