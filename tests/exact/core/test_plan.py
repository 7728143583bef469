"""What is asked of a plan follows from its columns."""

import random

import pytest

from kvsim.core.plan import NOTHING_MOVED, Moved, Plan
from kvsim.core.request import Request


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_lengths_are_the_first_of_the_sorted_ones(seed: int) -> None:
    rng = random.Random(seed)
    plan = Plan(60)
    lengths = [rng.randint(1, rng.choice((3, 50, 5000))) for _ in range(rng.randint(0, 60))]
    for length in lengths:
        plan.add_decode(length)
    assert plan.lengths() == lengths
    for number in (0, 1, 2, rng.randint(0, 60), 100):
        assert plan.longest(number) == sorted(lengths, reverse=True)[:number], f"seed {seed}"


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_what_was_added_and_not_removed(seed: int) -> None:
    rng = random.Random(seed)
    plan, kept = Plan(30), list[tuple[Request, int, int]]()
    for index in range(30):
        if kept and rng.random() < 0.4:
            request, tokens, _ = kept.pop(rng.randrange(len(kept)))
            assert plan.remove(request) == tokens
            assert plan.remove(request) == 0
        else:
            entry = Request(index, f"r{index}", 1), rng.randint(1, 90), rng.randint(0, 4)
            plan.add(*entry)
            kept.append(entry)
        plan.num_continued = len(plan.requests)
        moves = [(move.request, move.tokens, move.drafts) for move in plan.moves]
        assert moves == kept, f"seed {seed}"
        assert plan.computes == bool(kept)


COUNTS = (
    *("num_continued", "num_chunks", "num_repairs", "prefill_tokens", "cached_tokens"),
    *("decode_seqs", "context_tokens", "draft_tokens", "samples", "batched_tokens", "blocked"),
    *("drafter_ns", "waiting", "running", "swapped", "used_blocks", "cached_blocks", "free_blocks"),
    *("empty_slots", "cpu_used_blocks", "stranded_blocks", "start_ns", "end_ns"),
)
LISTS = (
    *("requests", "preempted", "ghosts", "ignored", "swapped_in", "copies"),
    *("swaps_out", "swaps_in", "finished"),
)


def test_nothing_of_a_step_is_left_when_the_next_one_begins() -> None:
    plan = Plan(2)
    for name in COUNTS:
        assert getattr(plan, name) == 0, name
        setattr(plan, name, 7)
    for name in LISTS:
        getattr(plan, name).append((1, 2))
    plan.rank_tokens, plan.transfers, plan.waits, plan.gauges = 1.5, "copies", True, (3,)
    plan.moved = Moved(4)
    plan.clear()
    assert {name: getattr(plan, name) for name in COUNTS} == dict.fromkeys(COUNTS, 0)
    assert {name: getattr(plan, name) for name in LISTS} == {name: [] for name in LISTS}
    assert (plan.rank_tokens, plan.transfers, plan.waits, plan.gauges) == (None, None, False, ())
    assert plan.moved == NOTHING_MOVED


def test_a_plan_that_is_used_again_forgets_the_step_before() -> None:
    request = Request(0, "r0", 5)
    plan = Plan(2)
    plan.add(request, 5, 0)
    plan.add_chunk(0, 3, 2, 2)
    plan.add_decode(7)
    plan.add_decodes(0, 0, 2)
    plan.yields[0] = 1
    plan.preempted.append((request, "recompute"))
    plan.ignored.append(request)
    seen = plan.preempted
    assert (plan.chunks, plan.tokens, plan.prefill_tokens) == ([(3, 2)], 6, 3)
    (prefill,) = plan.prefills
    assert prefill == (request, 5, 2, 0, True, 5)
    plan.clear()
    assert plan.empty and not plan.computes
    assert (plan.chunks, plan.lengths(), plan.moves, plan.prefills) == ([], [], [], [])
    assert (plan.tokens, plan.samples, plan.context_tokens, plan.cached_tokens) == (0, 0, 0, 0)
    assert seen == [(request, "recompute")], "who looks on may have kept the list"
