"""Requests are scheduled where there is a place, and know when, in every engine."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from small_engines import ENGINES, engine, make_trace
from worlds import config, trace

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.run.simulation import simulate

CROWD = trace(*((0, 9 + place, 20) for place in range(6)))
for _row in CROWD.rows:
    _row.max_new_tokens = 20
SGLANG = config(
    engine="sglang",
    block_size=1,
    num_gpu_blocks_override=70,
    scheduler_args={"schedule_conservativeness": 0.01},
)
for _key in ("watermark", "swap_space", "disable_async_output_proc"):
    del SGLANG[_key]


class Diary:
    """When each request was in a step for the first time, how often one lost its place, and how
    many sequences were in a step at most."""

    def __init__(self) -> None:
        self.first_ns: dict[int, int] = {}
        self.preempted = self.most = 0

    def begin(self) -> None:
        self.first_ns.clear()

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        self.preempted += len(plan.preempted)
        assert plan.num_chunks + plan.decode_seqs >= len(plan.requests)
        repairs = [plan.chunk_tokens[k] for k in range(plan.num_chunks) if plan.chunk_places[k] < 0]
        assert all(tokens > 0 for tokens in repairs)
        self.most = max(self.most, sum(request.width() for request in plan.requests))
        for request in plan.requests:
            assert request.first_scheduled_ns == self.first_ns.setdefault(request.index, now_ns)
            assert max(each.access_ns for each in request.sequences) == now_ns

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        pass


@pytest.mark.parametrize("name", [*ENGINES, "sglang"])
def test_requests_know_when_they_were_scheduled_first_and_last(name: str) -> None:
    """All come at once, and too many for the memory."""
    settings: dict[str, Any] = SGLANG if name == "sglang" else engine(name)
    diary = Diary()
    simulate(CROWD, settings, watcher=diary)
    assert diary.preempted > 0
    assert set(diary.first_ns) == set(range(6))


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_has_as_many_sequences_as_it_may(name: str) -> None:
    """In a pool of one long request, so that some lose their places and come back."""
    diary = Diary()
    for seed in range(4):
        rng = Random(seed)
        crowd = make_trace([(rng.choice((0, 7)), rng.randint(1, 40), 20, seed) for _ in range(14)])
        settings = engine(name, max_num_seqs=2, num_gpu_blocks_override=17)
        simulate(crowd, settings, watcher=diary)
    assert diary.preempted > 0
    assert diary.most == 2
