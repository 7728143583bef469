"""Copies over one link: who follows whom, who shares the bandwidth, and which steps wait."""

from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.host import NEVER_NS
from kvsim.core.plan import NOTHING_MOVED
from kvsim.engines.vllm_v1.connector import NOTHING, Job, Transfers
from kvsim.engines.vllm_v1.timed import Lane, Lanes, TimedWorker


def job(number: int, blocks: int, within: bool = False) -> Job:
    return Job(number, None, [[*range(blocks)]], [[]], True, within)


def test_copies_of_one_direction_follow_each_other() -> None:
    worker = TimedWorker(lambda blocks: 10 * blocks)
    loads = Transfers([job(0, 3), job(1, 2)], [], [], [])
    assert worker.launch(loads, 100, False, NEVER_NS) == NOTHING_MOVED
    assert [done.number for done in worker.collect(130).loads] == [0]
    assert [done.number for done in worker.collect(150).loads] == [1]


def test_a_store_begins_with_the_next_step_unless_it_is_flushed() -> None:
    worker = TimedWorker(lambda blocks: 10 * blocks)
    nothing = Transfers([], [], [], [])
    assert worker.launch(Transfers([], [job(0, 3)], [], []), 100, False, NEVER_NS) == NOTHING_MOVED
    assert worker.unsent
    assert worker.launch(nothing, 200, False, NEVER_NS) == NOTHING_MOVED
    assert worker.collect(229) is NOTHING
    assert worker.collect(230).stores
    assert worker.launch(Transfers([], [job(1, 3)], [1], []), 300, False, NEVER_NS).flush_ns == 30


def test_an_idle_engine_waits_for_a_transfer_or_a_request() -> None:
    worker = TimedWorker(lambda blocks: 10 * blocks)
    assert worker.launch(Transfers([job(0, 3)], [], [], []), 100, True, 120).wait_ns == 20
    assert worker.launch(Transfers([], [], [], []), 120, True, NEVER_NS).wait_ns == 10


def test_loads_and_loads_within_a_step_share_a_direction() -> None:
    """Half the speed each, until the shorter one is over at 40; the other copies 10 more."""
    worker = TimedWorker(lambda blocks: 10 * blocks)
    both = Transfers([job(0, 3), job(1, 2, within=True)], [], [], [])
    assert worker.launch(both, 0, False, NEVER_NS).wait_ns == 40
    assert [done.number for done in worker.collect(49).loads] == [1]
    assert [done.number for done in worker.collect(50).loads] == [0]
    assert (worker.loads.busy_ns, worker.within.busy_ns) == (50, 40)


def test_both_directions_together_have_less_than_twice_the_bandwidth() -> None:
    """1,000 ns alone; at 0.834 of the speed, 1,000 / 0.834 = 1,199.04."""
    worker = TimedWorker(lambda blocks: blocks, both_ways=0.834, stores_at_once=True)
    worker.launch(Transfers([job(0, 1000)], [job(1, 1000)], [], []), 0, False, NEVER_NS)
    assert worker.collect(1199) is NOTHING
    done = worker.collect(1200)
    assert len(done.loads) == len(done.stores) == 1


def test_a_wait_for_all_transfers_is_no_wait_for_new_ones() -> None:
    worker = TimedWorker(lambda blocks: 10 * blocks, stores_at_once=True)
    worker.launch(Transfers([], [job(0, 3)], [], []), 0, False, NEVER_NS)
    flush = Transfers([], [job(1, 9)], [], [], flush_all=True)
    assert worker.launch(flush, 10, False, NEVER_NS).flush_ns == 20
    assert len(worker.stores.copies) == 1


copies = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2), st.integers(0, 40)), max_size=12)
"""(time since the one before, lane, nanoseconds alone)."""


@given(copies, st.sampled_from([1.0, 0.834, 0.5]))
def test_copies_keep_their_order_and_no_link_is_faster_than_it_can(
    drawn: list[tuple[int, int, int]], both_ways: float
) -> None:
    lanes = [Lane[int]() for _ in range(3)]
    link = Lanes([[lanes[0]], [lanes[1], lanes[2]]], both_ways)
    now, begun, alone = 0, [], []
    for number, (gap, lane, ns) in enumerate(drawn):
        now += gap
        link.advance(now)
        lanes[lane].submit(number, ns)
        begun.append(now)
        alone.append(ns)
    whole = sum(alone)
    link.advance(now + 2 * whole + len(drawn) + 1)
    for place, lane_ in enumerate(lanes):
        mine = [number for number, (_, lane, _) in enumerate(drawn) if lane == place]
        assert lane_.take(1 << 60) == mine and lane_.finished == len(mine)
        assert not lane_.copies
        assert sum(alone[number] for number in mine) <= lane_.busy_ns
    inward = sum(alone[n] for n, (_, lane, _) in enumerate(drawn) if lane)
    assert inward <= lanes[1].busy_ns + lanes[2].busy_ns


def test_the_end_of_a_copy_does_not_depend_on_how_often_one_looks() -> None:
    ends = []
    for looks in ([], [3, 7, 11, 12, 25]):
        lane, other = Lane[str](), Lane[str]()
        link = Lanes([[lane], [other]], 0.834)
        lane.submit("a", 20)
        other.submit("b", 13)
        for now in looks:
            link.advance(now)
        link.advance(100)
        ends.append(
            [
                next(t for t in range(100) if lane.take(t)),
                next(t for t in range(100) if other.take(t)),
            ]
        )
    assert ends[0] == ends[1] == [23, 16]
