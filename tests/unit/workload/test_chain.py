"""The check on runs finds what a check of every id finds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from made import make_trace, traces
from marks import examples

from kvsim.workload import HashContent, Trace
from kvsim.workload.chain import Chains
from kvsim.workload.trace import collapse


def has_conflict(trace: Trace) -> bool:
    """The twin: one predecessor and one length for every id, one by one."""
    before: dict[object, object] = {}
    lengths: dict[object, int] = {}
    size = trace.block_size or 1
    for row in trace.rows:
        if not isinstance(row.content, HashContent):
            continue
        runs = row.content.prompt + row.content.output
        ids = [start + k for start, count in runs for k in range(count)]
        partial = row.input_length % size if trace.partial_hash else 0
        previous = None
        for place, one in enumerate(ids):
            length = partial if partial and place == len(ids) - 1 else size
            if before.setdefault((row.scope, one), previous) != previous:
                return True
            if lengths.setdefault((row.scope, one), length) != length:
                return True
            previous = one
    return False


@st.composite
def any_ids(draw: st.DrawFn) -> Trace:
    """Hash rows whose ids come as they may."""
    size, partial = 3, draw(st.booleans())
    contents = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 14))
        blocks = -(-length // size) if partial else length // size
        start, slip = draw(st.integers(0, 2)), draw(st.integers(0, 5))
        ids = [start + k + (k >= slip) for k in range(blocks)]
        contents.append((length, 1, HashContent(collapse(ids))))
    return make_trace(contents, block_size=size, hash_kind="prefix", partial_hash=partial)


@settings(max_examples=examples(300), deadline=None)
@given(any_ids())
def test_a_conflict_is_found_where_there_is_one(trace: Trace) -> None:
    conflict = Chains(trace).first_conflict(trace)
    assert (conflict is not None) == has_conflict(trace)
    if conflict is not None:
        row, _ = conflict
        trace.rows = trace.rows[: row.index + 1]
        assert has_conflict(trace), "the row named is the one that contradicts"


@settings(max_examples=examples(100), deadline=None)
@given(traces(forms="h"))
def test_chained_traces_pass(trace: Trace) -> None:
    if trace.hash_kind == "prefix":
        assert Chains(trace).first_conflict(trace) is None
