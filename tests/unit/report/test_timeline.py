import numpy as np
from runs import real_run
from tiny import MS, no_run, tiny_run

from kvsim.core.records import PackedColumns
from kvsim.core.schema import STEP_COLUMNS
from kvsim.results import timeline


def rows_of(run):
    steps, requests, _, meta = run
    end_ns = timeline.run_end_ns(steps, requests)
    rows = timeline.States(steps, end_ns, meta)
    return rows, timeline.durations_ns(rows, end_ns), end_ns


def test_a_run_whose_requests_are_never_sent_ends_at_its_start():
    """As that of a replica that is listed with requests that no router sent."""
    steps, requests, *_ = no_run()
    never = {**requests, "arrival_ns": np.array([-1]), "finish_ns": np.array([-1])}
    assert timeline.run_end_ns(steps, never) == 0


def test_idle_time_before_and_between_steps_holds_nothing():
    rows, held, _ = rows_of(tiny_run())
    shown = [
        (start // MS, ms // MS, used, running, tokens)
        for start, ms, used, running, tokens in zip(
            rows["start_ns"],
            held,
            rows["used_blocks"],
            rows["running"],
            rows["prefill_tokens"],
            strict=True,
        )
    ]
    assert shown == [
        (0, 0, 0, 0, 0),
        (0, 10, 0, 0, 0),
        (10, 20, 2, 1, 8),
        (30, 10, 3, 1, 0),
        (40, 20, 3, 1, 0),
        (60, 40, 2, 1, 2),
        (100, 100, 0, 0, 0),
        (200, 10, 2, 1, 5),
        (210, 10, 0, 0, 0),
        (220, 30, 2, 1, 1),
    ]


def test_blocks_of_ended_requests_are_cached_with_prefix_caching_and_free_without():
    steps, requests, gaps, meta = tiny_run()
    with_cache, *_ = rows_of((steps, requests, gaps, meta))
    without, *_ = rows_of((steps, requests, gaps, meta | {"prefix_caching": False}))
    idle = int(np.flatnonzero(with_cache["start_ns"] == 100 * MS)[0])
    assert (with_cache["cached_blocks"][idle], with_cache["free_blocks"][idle]) == (4, 6)
    assert (without["cached_blocks"][idle], without["free_blocks"][idle]) == (2, 8)


def test_a_gap_in_which_requests_are_still_running_keeps_their_blocks():
    steps, requests, gaps, meta = tiny_run()
    steps["end_ns"][0] = 25 * MS
    rows, *_ = rows_of((steps, requests, gaps, meta))
    waiting = int(np.flatnonzero(rows["start_ns"] == 25 * MS)[0])
    assert (rows["used_blocks"][waiting], rows["prefill_tokens"][waiting]) == (2, 0)


def test_rows_cover_the_whole_run_and_the_pool_stays_whole():
    for run in (real_run(), real_run(rate=8, swap=True), real_run(caching=False)):
        rows, held, end_ns = rows_of(run)
        assert held.min() >= 0
        assert held.sum() == end_ns
        pool = rows["used_blocks"] + rows["cached_blocks"] + rows["free_blocks"]
        assert set(pool) == {run[3]["num_gpu_blocks"]}


def test_a_run_without_steps_is_one_empty_state():
    steps, requests, gaps, meta = no_run()
    requests = tiny_run()[1]
    rows, held, end_ns = rows_of((steps, requests, gaps, meta))
    assert end_ns == 250 * MS
    assert list(held) == [0, end_ns]
    assert list(rows["free_blocks"]) == [10, 10]


def test_a_part_of_a_column_is_a_slice_of_the_whole():
    steps, requests, _, meta = tiny_run()
    packed = PackedColumns(STEP_COLUMNS)
    packed.add(np.stack([steps[name] for name in STEP_COLUMNS], axis=1))
    end_ns = timeline.run_end_ns(steps, requests)
    whole = timeline.States(steps, end_ns, meta | {"prefix_caching": True})
    pieces = timeline.States(packed, end_ns, meta | {"prefix_caching": True})
    number = len(whole["start_ns"])
    for name in whole:
        for first in range(number):
            for last in range(first, number + 1):
                found = pieces.part(name, first, last)
                assert found.tolist() == whole[name][first:last].tolist(), (name, first, last)
                assert found.dtype == np.int64
