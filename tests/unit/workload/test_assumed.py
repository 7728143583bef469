"""An assumed hit rate comes out, and says nothing of traces that know better."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, long

from kvsim.errors import ConfigError
from kvsim.run.simulation import simulate
from kvsim.workload import Row, Trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import ceiling_tokens
from kvsim.workload.spec import Workload, _rate, _shared, assume_hit_rate, make_trace
from kvsim.workload.synthetic import synthesise

LOAD = make_trace(Workload("random", requests=60, input_len=400, output_len=8, range_ratio=0.5), 1)


@pytest.mark.parametrize("hit_rate", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("block_size", [16, 32])
def test_an_unlimited_pool_hits_what_was_assumed(hit_rate, block_size):
    trace = assume_hit_rate(LOAD, hit_rate, block_size, prefixes=4)
    config = {
        "enable_prefix_caching": True,
        "block_size": block_size,
        "max_concurrency": 1,
        "request_rate": float("inf"),
        "num_gpu_blocks_override": 100_000,
    }
    summary = simulate(trace, config).summary
    assert summary["prefix_cache_hit_rate"] == pytest.approx(hit_rate, abs=0.02)
    assert f"{100 * summary['prefix_cache_hit_rate']:.1f} % of the prompt tokens" in trace.notes[-1]


@settings(max_examples=examples(12))
@given(st.floats(0.05, 0.6), st.integers(1, 8), st.integers(0, 5))
@long
def test_nothing_but_the_content_changes(hit_rate, prefixes, seed):
    trace = assume_hit_rate(LOAD, hit_rate, 16, prefixes=prefixes, seed=seed)
    plain = [dataclasses.replace(row, content=None) for row in trace.rows]
    assert plain == LOAD.rows
    again = assume_hit_rate(LOAD, hit_rate, 16, prefixes=prefixes, seed=seed)
    assert (again.sha256, again.rows) == (trace.sha256, trace.rows)
    assert trace.sha256 != LOAD.sha256


@given(
    st.lists(st.tuples(st.integers(1, 90), *[st.sampled_from((None, "a", "b"))] * 3), min_size=1),
    st.lists(st.integers(0, 2), min_size=100, max_size=100),
    st.floats(0, 1),
    st.sampled_from((1, 4, 16)),
)
def test_what_a_share_reaches_is_what_a_walk_over_the_blocks_finds(drawn, chosen, share, size):
    """Also of requests that share nothing with others: other salts, adapters or scopes."""
    rows = [
        Row(i, f"r{i}", i + 2, 0, length, 1, scope=scope, lora=lora, salt=salt)
        for i, (length, scope, lora, salt) in enumerate(drawn)
    ]
    chosen = chosen[: len(rows)]
    made = Trace("made", "native", "", _shared(rows, chosen, share))
    hits = ceiling_tokens(made.rows, streams(made), size)
    assert _rate(rows, chosen, share, size) == hits / sum(row.input_length for row in rows)


def test_a_trace_that_knows_what_is_shared_is_left_alone():
    with pytest.raises(ConfigError, match="says what its requests share"):
        assume_hit_rate(synthesise("chat", requests=20), 0.4, 16)


@pytest.mark.parametrize(("rate", "word"), [(0.0, "0 and 1"), (1.0, "0 and 1"), (0.99, "at most")])
def test_what_cannot_be_is_refused(rate, word):
    with pytest.raises(ConfigError, match="--hit-rate") as caught:
        assume_hit_rate(LOAD, rate, 16)
    assert word in str(caught.value)
