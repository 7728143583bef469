"""Equal keys exactly where salt and all tokens up to the end of the block are equal."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import make_trace, traces
from marks import examples

from kvsim.workload import HashContent, ParentContent, Row, SegmentContent, TokenContent, Trace
from kvsim.workload.keys import keyed, streams
from kvsim.workload.streams import TokenStream
from kvsim.workload.trace import collapse


def spelled_out(trace: Trace) -> list[list[object]]:
    """The twin: every row's stream as virtual tokens, equal where the trace says so."""
    known: list[list[object]] = []
    for row in trace.rows:
        tokens: list[object] = list(_said(trace, row, known))
        length = row.input_length + row.output_length
        tokens += [("own", row.index, p) for p in range(len(tokens), length)]
        known.append(tokens)
    return known


def _said(trace: Trace, row: Row, known: list[list[object]]) -> Sequence[object]:
    match row.content:
        case HashContent(prompt, output):
            ids = [start + k for start, count in prompt + output for k in range(count)]
            size = trace.block_size or 1
            tokens = [("id", row.scope, one, k) for one in ids for k in range(size)]
            return tokens if output else tokens[: row.input_length]
        case TokenContent(prompt, output):
            return [("token", one) for one in (*prompt, *(output or ()))]
        case SegmentContent(segments):
            return [("name", row.scope, name, k) for name, count in segments for k in range(count)]
        case ParentContent(parent, keep):
            return known[parent][:keep]
    return []


def same(keys: list[int], twins: list[object]) -> bool:
    """Whether two lists are equal in the same places."""
    return len(set(zip(keys, twins, strict=True))) == len(set(keys)) == len(set(twins))


@pytest.mark.parametrize("forms", ["uhstp", "h", "s", "hp", "tp"])
@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.integers(1, 9))
def test_keys_are_equal_where_salt_and_tokens_so_far_are(
    forms: str, data: st.DataObject, block_size: int
) -> None:
    trace = data.draw(traces(forms))
    keys: list[int] = []
    prefixes: list[object] = []
    for row, stream, tokens in zip(trace.rows, streams(trace), spelled_out(trace), strict=True):
        blocks = len(tokens) // block_size
        found = stream.keys(0, blocks, block_size)
        assert len(found) == blocks
        keys += found
        for block in range(blocks):
            prefixes.append((row.salt, tuple(tokens[: (block + 1) * block_size])))
    assert same(keys, prefixes)


@settings(max_examples=examples(60), deadline=None)
@given(traces(), st.integers(1, 9), st.data())
def test_keys_do_not_depend_on_how_they_are_asked_for(
    trace: Trace, block_size: int, data: st.DataObject
) -> None:
    whole, parts = streams(trace), streams(trace)
    for row, one, other in zip(trace.rows, whole, parts, strict=True):
        blocks = (row.input_length + row.output_length) // block_size
        first = data.draw(st.integers(0, blocks))
        last = data.draw(st.integers(first, blocks))
        assert list(other.keys(first, last, block_size)) == list(
            one.keys(0, blocks, block_size)[first:last]
        )


@settings(max_examples=examples(60), deadline=None)
@given(traces(), st.integers(1, 9))
def test_streams_are_the_same_in_another_process(trace: Trace, block_size: int) -> None:
    known = keyed(trace)
    made = streams(known)
    sent = streams(pickle.loads(pickle.dumps(known)))
    for row, stream, other in zip(trace.rows, made, sent, strict=True):
        blocks = (row.input_length + 40) // block_size
        assert stream.keys(0, blocks, block_size) == other.keys(0, blocks, block_size)
        assert stream.spans(block_size) == other.spans(block_size)
        assert (stream.shared_tokens, stream.salt) == (other.shared_tokens, other.salt)


@settings(max_examples=examples(60), deadline=None)
@given(traces(), st.integers(1, 9))
def test_samples_share_the_prompt_and_nothing_else(trace: Trace, block_size: int) -> None:
    identities = streams(trace)
    everything: set[int] = set()
    for row, stream in zip(trace.rows, identities, strict=True):
        everything.update(stream.keys(0, (row.input_length + row.output_length), block_size))
    for row, stream in zip(trace.rows, identities, strict=True):
        prompt = row.input_length // block_size
        blocks = (row.input_length + row.output_length) // block_size
        for index in (1, 2):
            sample = stream.sample(index).keys(0, blocks, block_size)
            assert sample[:prompt] == stream.keys(0, prompt, block_size)
            assert not everything & set(sample[prompt:])
            everything.update(sample[prompt:])


@pytest.mark.parametrize("kind", ["prefix", "content"])
@pytest.mark.parametrize("prompt_first", [True, False])
def test_an_output_is_hit_by_the_prompt_that_repeats_it(kind: str, prompt_first: bool) -> None:
    turn = (9, 4, HashContent(((0, 2),), ((2, 1),)))
    next_turn = (13, 4, HashContent(((0, 3),)))
    rows = [next_turn, turn] if prompt_first else [turn, next_turn]
    trace = make_trace(rows, block_size=4, hash_kind=kind, partial_hash=False)
    one, other = streams(trace)
    assert one.keys(0, 3, 4) == other.keys(0, 3, 4)


def test_an_id_of_64_bits_makes_an_ordinary_key() -> None:
    content = HashContent(((2**64 - 2, 2),))
    trace = make_trace(
        [(32, 1, content), (32, 1, content)],
        block_size=16,
        hash_kind="prefix",
        partial_hash=True,
    )
    first, second = streams(trace)
    assert first.keys(0, 2, 16) == second.keys(0, 2, 16) == [15, 31]


def test_a_deep_chain_of_parents_needs_no_deep_recursion() -> None:
    turns = [(10 * (i + 1), 5, ParentContent(i - 1, 10 * i) if i else None) for i in range(3000)]
    *_, last = streams(make_trace(turns))
    keys = last.keys(0, 3000, 10)
    assert len(set(keys)) == 3000


def test_digests_are_those_of_nano_vllm() -> None:
    """Written out after nano-vllm `engine/block_manager.py`, `compute_hash`."""
    numpy, xxhash = pytest.importorskip("numpy"), pytest.importorskip("xxhash")
    prompt, output = list(range(100, 137)), [7, 8, 9]
    digest, expected = -1, []
    tokens = prompt + output
    for start in range(0, len(tokens) - 7, 8):
        hasher = xxhash.xxh64()
        if digest != -1:
            hasher.update(digest.to_bytes(8, "little"))
        hasher.update(numpy.array(tokens[start : start + 8]).tobytes())
        digest = hasher.intdigest()
        expected.append(2**64 + digest)
    assert TokenStream(prompt, output).keys(0, 5, 8) == expected


def test_tokens_may_be_generated_on_the_fly() -> None:
    asked: list[int] = []

    def generate(k: int) -> int:
        asked.append(k)
        return 50 + k

    prompt = [1, 2, 3]
    stream = TokenStream(prompt, generate)
    whole = TokenStream(prompt, [50 + k for k in range(9)])
    assert stream.keys(0, 1, 4) == whole.keys(0, 1, 4)
    assert asked == [0]
    assert stream.keys(1, 3, 4) == whole.keys(1, 3, 4)
    assert asked == list(range(9))


def test_an_unknown_output_belongs_to_its_row() -> None:
    one, other = (TokenStream([1, 2, 3], row=row, rows=2) for row in (0, 1))
    assert one.keys(0, 1, 3) == other.keys(0, 1, 3)
    assert not set(one.keys(1, 9, 3)) & set(other.keys(1, 9, 3))


def test_contents_are_the_tokens_of_a_block_whatever_precedes_them() -> None:
    """Blocks of 2: the second blocks hold the same tokens behind other first blocks."""
    one, other = TokenStream([1, 2, 7, 8, 5]), TokenStream([3, 4, 7, 8, 5], row=1, rows=2)
    assert one.keys(1, 2, 2) != other.keys(1, 2, 2)
    assert one.contents(1, 2, 2) == other.contents(1, 2, 2)
    assert one.contents(0, 1, 2) != other.contents(0, 1, 2)
    assert one.contents(2, 3, 2) != other.contents(2, 3, 2)  # their last tokens are unknown
    assert one.contents(0, 1, 2) == one.keys(0, 1, 2)  # the first block has nothing before it


def test_a_stream_of_ones_own_is_the_same_at_each_access() -> None:
    shared = [SegmentContent((("system", 20),)), None, ParentContent(1, 16), None]
    trace = Trace("x", "native", "", [])
    trace.rows = [Row(i, str(i), i, 0, 40, 5, content) for i, content in enumerate(shared)]
    found = streams(trace)
    assert len(found) == len(list(found)) == 4
    for place, stream in enumerate(found):
        assert stream.keys(0, 4, 16) == found[place].keys(0, 4, 16)
        assert stream.shared_tokens == found[place].shared_tokens
    assert [stream.shared_tokens for stream in found] == [20, 16, 16, 0]
    assert found[-1].keys(0, 2, 16) == found[3].keys(0, 2, 16) != found[1].keys(0, 2, 16)
    assert found[2].keys(0, 1, 16) == found[1].keys(0, 1, 16)
    assert len(found._made) == 3, "a stream that nobody shares is kept in memory"


def test_streams_of_hash_ids_are_kept_as_numbers() -> None:
    contents = [HashContent(((0, 2),)), HashContent(((0, 1), (7, 1))), ParentContent(1, 8), None]
    rows = [Row(i, str(i), i, 0, 40, 5, content) for i, content in enumerate(contents)]
    found = streams(Trace("x", "native", "", rows, block_size=16, hash_kind="prefix"))
    assert sorted(found._made) == [1, 2], "more than an inherited stream and its heir is kept"
    for stream, again in zip(found, found, strict=True):
        assert stream.keys(0, 5, 8) == again.keys(0, 5, 8)
    assert found[0].keys(0, 1, 16) == found[1].keys(0, 1, 16)
    assert found.alone(4) == [False, False, False, True]
    assert found.alone(1) == [True]
    assert not found.salted
    rows.append(replace(rows[0], index=4, id="4", salt="pepper"))
    assert streams(Trace("x", "native", "", rows, block_size=16, hash_kind="prefix")).salted


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=6))
def test_hash_ids_are_shared_exactly_as_far_as_another_row_has_them(
    prompts: list[list[int]],
) -> None:
    contents = [HashContent(collapse(ids)) for ids in prompts]
    rows = [
        Row(i, str(i), i, 0, 4 * len(ids), 5, content)
        for i, (ids, content) in enumerate(zip(prompts, contents, strict=True))
    ]
    found = streams(Trace("x", "native", "", rows, block_size=4, hash_kind="prefix"))
    keys = [stream.keys(0, 24, 1) for stream in found]
    for place, stream in enumerate(found):
        others = {key for other in keys[:place] + keys[place + 1 :] for key in other}
        assert stream.shared_tokens == sum(key in others for key in keys[place])
        assert stream.named_tokens == rows[place].input_length


def test_an_inherited_stream_is_shared_as_far_as_it_has_ids() -> None:
    """Its row has ids that a row behind its heir has, too."""
    ids = HashContent(((0, 3),))
    contents = [ids, ParentContent(0, 4), ids]
    rows = [Row(i, str(i), i, 0, 12, 5, content) for i, content in enumerate(contents)]
    found = streams(Trace("x", "native", "", rows, block_size=4, hash_kind="prefix"))
    assert [stream.shared_tokens for stream in found] == [12, 4, 12]
