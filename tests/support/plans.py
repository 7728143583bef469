"""Plans for cost tests, with only the aggregates that a cost model reads."""

from collections.abc import Sequence

from hypothesis import strategies as st

from kvsim.core.plan import Plan


def plan(
    chunks: Sequence[tuple[int, int]] = (),
    decode_seqs: int = 0,
    context_tokens: int = 0,
    samples: int = 0,
    copied_blocks: int = 0,
) -> Plan:
    made = Plan(len(chunks) + 4)
    for place, (new, context) in enumerate(chunks):
        made.add_chunk(place, new, context, 0)
    made.decode_seqs = decode_seqs
    made.context_tokens = context_tokens
    made.samples = samples
    made.copies = [(0, 1)] * copied_blocks
    return made


def lengths_plan(chunks: Sequence[tuple[int, int]], lengths: Sequence[int]) -> Plan:
    """Chunks that yield a token each, and decodes of these lengths."""
    made = Plan(len(chunks) + len(lengths))
    for place, (new, context) in enumerate(chunks):
        made.add_chunk(place, new, context, 0)
    for length in lengths:
        made.add_decode(length)
    made.samples += len(chunks)
    return made


def decode(seqs: int, context: int) -> Plan:
    """`seqs` sequences of length `context`, no logits."""
    return plan(decode_seqs=seqs, context_tokens=seqs * context)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Steps of any make: prompts, decodes, both, neither."""
    chunks = draw(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 16384)), max_size=4))
    seqs = draw(st.integers(0, 300))
    lengths = draw(st.integers(1, 8192))
    return plan(
        chunks=chunks,
        decode_seqs=seqs,
        context_tokens=seqs * lengths,
        samples=draw(st.integers(0, seqs + len(chunks))),
        copied_blocks=draw(st.integers(0, 8)),
    )
