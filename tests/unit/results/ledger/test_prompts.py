"""Where the cache hits of prompt tokens went: sums, what the pool saw, and cases in the head.

The engine of `worlds.config`: blocks of 4 tokens, 10 ms a step and 1 ms a prompt token.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import examples
from small_engines import engine, make_trace, rows
from worlds import config, hashed

import kvsim
from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.results.ledger import PROMPT_PARTS
from kvsim.results.ledger.prompts import Known, Rules, classify, cut_off
from kvsim.workload import HashContent, ParentContent, Row, SegmentContent, TokenContent, Trace
from kvsim.workload.keys import streams
from kvsim.workload.streams import Span

CACHING: dict[str, dict[str, Any]] = {
    "0.6.3": {"enable_prefix_caching": True},
    "v1": {"engine": "vllm-v1", "async_scheduling": False},
    "v1 async": {"engine": "vllm-v1"},
    "nano": {"engine": "nano-vllm"},
}


def tokens(result: kvsim.Result, place: int) -> dict[str, int]:
    """The parts of one prompt, without those of no token."""
    found = {
        name.removesuffix("_tokens"): int(result.requests[name][place]) for name in PROMPT_PARTS
    }
    return {name: number for name, number in found.items() if number}


def run(trace: Trace, **more: Any) -> kvsim.Result:
    return kvsim.simulate(trace, config(enable_prefix_caching=True, **more))


def test_the_first_of_its_kind_is_cold_and_the_next_one_hits() -> None:
    result = run(hashed(4, (0, 12, 1, [1, 2, 3]), (50, 14, 1, [1, 2, 9])))
    assert tokens(result, 0) == {"cold": 12}
    assert tokens(result, 1) == {"num_cached": 8, "cold": 6}


def test_the_last_block_of_a_known_prompt_is_computed_by_rule() -> None:
    result = run(hashed(4, (0, 12, 1, [1, 2, 3]), (50, 12, 1, [1, 2, 3])))
    assert tokens(result, 1) == {"num_cached": 8, "last_block": 4}


def test_the_same_prompt_in_the_same_step_is_still_being_computed() -> None:
    """vLLM 0.6.3 shares the blocks at once, but nobody skips what the same step computes."""
    result = run(hashed(4, (0, 14, 1, [1, 2, 3]), (0, 14, 1, [1, 2, 3])))
    assert tokens(result, 0) == {"cold": 14}
    assert tokens(result, 1) == {"concurrent": 12, "cold": 2}


def test_a_prefix_that_ends_within_a_block_is_lost_to_granularity() -> None:
    """r1 shares 11 tokens with r0: two blocks, and three tokens of the third."""
    rows = [
        Row(0, "r0", 2, 0, 14, 1, SegmentContent((("system", 11),))),
        Row(1, "r1", 3, 50_000_000, 14, 1, SegmentContent((("system", 11),))),
    ]
    result = run(Trace("in memory", "native", "0" * 64, rows))
    assert tokens(result, 1) == {"num_cached": 8, "partial_block": 3, "cold": 3}


def test_a_prompt_of_its_own_is_cold_as_far_as_it_was_computed() -> None:
    """Nobody shares anything: r0 is preempted in its prompt, r2 is never admitted."""
    rows = [
        Row(0, "r0", 2, 0, 10, 30),
        Row(1, "r1", 3, 1_000_000, 20, 20),
        Row(2, "r2", 4, 2_000_000, 10, 5),
    ]
    trace = Trace("in memory", "native", "0" * 64, rows)
    table = engine(
        "v1", num_gpu_blocks_override=12, max_model_len=44, max_num_seqs=3, max_num_batched_tokens=4
    )
    result = kvsim.simulate(trace, table)
    for place in range(3):
        found = tokens(result, place)
        assert found.keys() <= {"cold", "unreached"}
        assert sum(found.values()) == rows[place].input_length
    assert tokens(result, 0) == {"cold": 10}


def test_a_prefix_shorter_than_a_block_is_lost_altogether() -> None:
    rows = [
        Row(i, f"r{i}", i + 2, i * 50_000_000, 14, 1, TokenContent((7, 8, 9, *[i] * 11)))
        for i in range(2)
    ]
    result = run(Trace("in memory", "native", "0" * 64, rows))
    assert tokens(result, 1) == {"partial_block": 3, "cold": 11}


def test_what_was_pushed_out_since_was_evicted() -> None:
    """r1 needs all 5 blocks; after it nothing of r0 is left, though r2 is r0 again."""
    trace = hashed(4, (0, 12, 1, [1, 2, 3]), (50, 18, 1, [5, 6, 7, 8]), (100, 14, 1, [1, 2, 3]))
    result = run(trace, num_gpu_blocks_override=5, max_model_len=20)
    assert tokens(result, 2) == {"evicted": 12, "cold": 2}


def test_the_answer_before_is_known_but_for_its_last_token() -> None:
    """r1 continues r0: 9 prompt and 4 output tokens, the last of which was never computed."""
    rows = [
        Row(0, "r0", 2, 0, 9, 4),
        Row(1, "r1", 3, 200_000_000, 18, 1, ParentContent(0, 13)),
    ]
    result = run(Trace("in memory", "native", "0" * 64, rows))
    assert tokens(result, 1) == {"num_cached": 12, "cold": 6}


def test_other_salts_share_nothing_and_the_ledger_says_so() -> None:
    content = HashContent(((1, 3),))
    rows = [
        Row(0, "r0", 2, 0, 13, 1, content, salt="a"),
        Row(1, "r1", 3, 50_000_000, 13, 1, content, salt="b"),
        Row(2, "r2", 4, 99_000_000, 13, 1, content, salt="a"),
    ]
    trace = Trace("in memory", "native", "0" * 64, rows, block_size=4, hash_kind="prefix")
    result = run(trace)
    assert tokens(result, 1) == {"other_salt": 12, "cold": 1}
    assert tokens(result, 2) == {"num_cached": 12, "cold": 1}


def test_what_a_victim_had_not_reached_is_not_cold() -> None:
    """Steps of 8 tokens, a block of 8 unused. r1 computes 1, 7 and 7 tokens beside r0's decodes;
    then r0 needs its blocks."""
    table = config(
        engine="vllm-v1",
        scheduler_reserve_full_isl=False,
        num_gpu_blocks_override=8,
        max_model_len=20,
        max_num_batched_tokens=8,
        max_num_seqs=2,
    )
    del table["disable_async_output_proc"]
    result = kvsim.simulate(hashed(4, (0, 7, 9, []), (0, 18, 1, [])), table)
    assert result.transitions["value"][0] == 15
    assert tokens(result, 1) == {"cold": 15, "unreached": 3}


def test_of_a_prompt_that_the_end_of_the_run_cut_off_only_hits_are_known() -> None:
    """r1 is to be swapped out after a chunk of 4 tokens; there is no room for it."""
    result = run(
        hashed(4, (0, 7, 9, []), (0, 18, 1, [])),
        num_gpu_blocks_override=7,
        max_model_len=20,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        enable_chunked_prefill=True,
        preemption_mode="swap",
    )
    assert result.meta["outcome"]["kind"] == "swap-space-exhausted"
    assert tokens(result, 1) == {"unreached": 18}


def test_a_request_that_never_ran_has_no_ledger() -> None:
    result = run(hashed(4, (0, 65, 1, [])))
    assert tokens(result, 0) == {}


def test_without_a_cache_there_is_no_ledger_of_prompts() -> None:
    result = kvsim.simulate(hashed(4, (0, 12, 1, [1, 2, 3])), config())
    assert PROMPT_PARTS[1] not in result.requests
    assert "prompt_ledger_tokens" not in result.summary


def prompt_keys(blocks: Any, request: Any) -> list[int]:
    """What a block manager knows the full blocks of a prompt by."""
    number = request.input_length // 4
    if isinstance(blocks, KVCacheManager):
        return blocks.keys(request)[:number]
    blocks.numbering.extend(request, number)
    return list(request.contents)[:number]


def held(pool: Any) -> set[int]:
    """The keys of the blocks that have content."""
    if isinstance(pool, Pool):
        return {pool.content(block) for block in range(1, pool.fresh)} - {0}
    return {*pool.content} - {0}


class Seen:
    """Remembers every key that a pool ever held, and counts the tokens of missed blocks with such
    a key that a prompt computed before it lost its blocks, if it ever did."""

    def begin(self) -> None:
        self.ever: set[int] = set()
        self.missed: dict[int, list[int]] = {}
        """Request → where the missed blocks begin, in tokens."""
        self.known: dict[int, int] = {}

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        for prefill in plan.prefills:
            request = prefill.request
            if request.num_preemptions:
                continue
            if not prefill.computed_before:
                keys = prompt_keys(batch.blocks, request)
                hit = prefill.cached // 4
                self.missed[request.index] = [
                    4 * place for place, key in enumerate(keys) if place >= hit and key in self.ever
                ]
                self.ever.update(keys)
            upto = prefill.computed_before + prefill.scheduled
            missed = self.missed[request.index]
            self.known[request.index] = sum(min(4, max(0, upto - begin)) for begin in missed)
        for request in plan.decodes:
            # vLLM V1 runs the last token of a prompt as a decode where a chunk leaves it alone.
            if not request.num_preemptions:
                self.known[request.index] = 4 * len(self.missed[request.index])
        self.ever.update(held(batch.blocks.gpu))

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        self.ever.update(held(batch.blocks.gpu))


CUT_BY_THE_BUDGET = [
    (0, 1, 1, 0), (0, 1, 1, 0), (0, 1, 7, 0), (0, 1, 7, 0), (0, 40, 1, 1),
    (7, 13, 6, 2), (90, 39, 3, 0), (7, 21, 2, 3), (0, 40, 2, 2), (0, 16, 1, 1),
]  # fmt: skip
"""In vLLM V1, the last prompt loses its blocks with one token left to compute."""


LEFT_ALONE = [(0, 1, 1, 0), (0, 26, 1, 1), (0, 34, 1, 0), (0, 4, 1, 0)]
"""In vLLM V1, the last token of the last prompt is left for a step of its own."""


@pytest.mark.parametrize("name", CACHING)
@settings(max_examples=examples(30))
@given(drawn=rows, blocks=st.sampled_from((16, 20, 40)))
@example(drawn=CUT_BY_THE_BUDGET, blocks=40)
@example(drawn=LEFT_ALONE, blocks=20)
def test_the_pool_has_seen_what_was_evicted_and_nothing_that_is_cold(
    name: str, drawn: list[tuple[int, int, int, int]], blocks: int
) -> None:
    """Full blocks that were known once, as far as they were computed again."""
    seen = Seen()
    table = config(num_gpu_blocks_override=blocks, **CACHING[name])
    if name == "nano":
        del table["watermark"]
    if "engine" in CACHING[name]:
        del table["disable_async_output_proc"]
    result = kvsim.simulate(make_trace(drawn), table, watcher=seen)
    requests = result.requests
    admitted = requests["first_scheduled_ns"] >= 0
    total = sum(requests[name] for name in PROMPT_PARTS)
    assert (total == requests["input_length"] * admitted).all()
    for place in seen.known:
        found = tokens(result, place)
        whole = sum(found.get(each, 0) for each in ("evicted", "concurrent", "last_block"))
        assert whole == seen.known[place]


@settings(max_examples=examples(40))
@given(drawn=rows)
def test_one_at_a_time_and_with_room_for_all_nothing_is_lost(
    drawn: list[tuple[int, int, int, int]],
) -> None:
    table = engine("v1", max_concurrency=1, num_gpu_blocks_override=1000)
    result = kvsim.simulate(make_trace(drawn), table)
    for place in range(len(drawn)):
        assert tokens(result, place).keys() <= {"num_cached", "last_block", "partial_block", "cold"}


@given(
    length=st.integers(1, 60),
    hit=st.integers(0, 59),
    past=st.integers(0, 60),
    coming=st.integers(0, 60),
    elsewhere=st.integers(0, 60),
    withheld=st.integers(0, 1),
    reached=st.integers(0, 60),
)
def test_every_token_of_a_prompt_is_in_one_part(
    length: int, hit: int, past: int, coming: int, elsewhere: int, withheld: int, reached: int
) -> None:
    parts = classify(length, min(hit, length), past, coming, elsewhere, Rules(4, withheld))
    kept = np.array([parts, parts])
    cut_off(kept, np.array([min(reached, length), length]))
    assert tuple(kept[1]) == parts  # which were all reached
    for each in (parts, kept[0]):
        assert len(each) == len(PROMPT_PARTS)
        assert sum(each) == length
        assert min(each) >= 0
    assert kept[0, -1] == length - min(reached, length)
    assert (kept[0, :-1] <= parts[:-1]).all()


def identities(stream: Any, length: int) -> list[int]:
    """The keys of blocks of one token: the dull way to compare streams token by token."""
    return list(stream.keys(0, length, 1))


@settings(max_examples=examples(60))
@given(data=st.data())
def test_spans_find_the_same_prefixes_as_tokens_one_by_one(data: st.DataObject) -> None:
    content = st.one_of(
        st.none(),
        st.builds(
            lambda start, count, more: HashContent(((start, count), *more)),
            st.integers(0, 3),
            st.integers(1, 4),
            st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=2),
        ),
        st.builds(
            lambda names: SegmentContent(tuple(names)),
            st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 6)), max_size=3),
        ),
        st.builds(
            lambda ids: TokenContent(tuple(ids)),
            st.lists(st.integers(0, 1), min_size=30, max_size=30),
        ),
    )
    made: list[Row] = []
    for index in range(data.draw(st.integers(2, 6))):
        row = Row(index, str(index), 1, 0, 30, 5, data.draw(content))
        if index and data.draw(st.booleans()):
            parent = data.draw(st.integers(0, index - 1))
            row = replace(row, content=ParentContent(parent, data.draw(st.integers(0, 30))))
        made.append(row)
    trace = Trace("in memory", "native", "0" * 64, made, block_size=4, hash_kind="prefix")
    known, seen = Known(), set[int]()
    everybody = [set(identities(stream, 40)) for stream in streams(trace)]
    for place, stream in enumerate(streams(trace)):
        own = identities(stream, 40)[stream.shared_tokens :]
        assert all(keys.isdisjoint(own) for keys in everybody[:place] + everybody[place + 1 :])
        spans: list[Span] = stream.spans(1)
        keys = identities(stream, 32)
        assert [first for first, _, _ in spans] == [0, *(last for _, last, _ in spans[:-1])]
        dull = next((i for i, key in enumerate(keys) if key not in seen), 32)
        assert known.prefix(spans, 32) == dull
        assert known.prefix(spans, 0) == 0
        known.add(spans, 32)
        seen.update(keys)
