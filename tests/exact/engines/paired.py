"""Requests for block tables that are compared: with names, and without."""

from kvsim.engine.request import Request, Sequence
from kvsim.engine.runs import RunPool
from kvsim.workload.keys import streams
from kvsim.workload.requests import make_requests
from kvsim.workload.trace import HashContent, Row, Trace

Pair = tuple[Sequence, Sequence]
"""A sequence of the tables block by block, and the same of those in runs."""


def paired(trace: Trace) -> list[Pair]:
    """Two sequences of each request."""
    pairs = []
    for one, other in zip(make_requests(trace, trace.rows), streams(trace), strict=True):
        twin = Request(one.index, one.id, one.input_length, other)
        pairs.append((one.sequences[0], twin.sequences[0]))
    return pairs


def hashed(*prompts: tuple[int, ...]) -> Trace:
    """Requests whose prompts are these hash ids, one block each."""
    trace = Trace("made", "native", "", [], block_size=1, hash_kind="prefix", partial_hash=False)
    for index, ids in enumerate(prompts):
        content = HashContent(tuple((each, 1) for each in ids))
        trace.rows.append(Row(index, str(index), index, 0, len(ids), 1, content))
    return trace


def plant(pool: RunPool, fault: str) -> None:
    """Make the books of a pool with idle content wrong."""
    run = next(pool.idle_runs())
    if fault == "refs":
        run.refs += 1
    elif fault == "end":
        run.end += 1
    elif fault == "cached":
        pool._cached += 1
    elif fault == "left":
        pool.free -= 1
    else:
        pool._at.clear()
