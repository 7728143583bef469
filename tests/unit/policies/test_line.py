"""A line of blocks beside a list that looks at every block each time."""

from __future__ import annotations

from collections.abc import Container
from random import Random
from typing import Any

import pytest
from trees import BLOCK, random_case

from kvsim.explain.cache_eviction import prompts, replay
from kvsim.policies.eviction import EVICTIONS
from kvsim.policies.order import Aside, Line, Replacement
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting

LINED = ("fifo", "slru", "arc", "2q", "lirs", "s3-fifo", "w-tinylfu")


class Listed(list[int]):
    """What `Line` does, without knowledge of earlier looks."""

    def __init__(self, idle: Container[int]) -> None:
        super().__init__()
        self._idle = idle

    def renew(self, block: int) -> None:
        self.remove(block)
        self.append(block)

    def shift(self) -> int:
        return self.pop(0)

    def first(self) -> int | None:
        return next((block for block in self if block in self._idle), None)

    def take(self) -> int | None:
        block = self.first()
        if block is not None:
            self.remove(block)
        return block


def test_a_line_does_what_a_list_does() -> None:
    for seed in range(40):
        rng = Random(seed)
        idle, aside = set[int](), Aside()
        line, listed = Line(idle, aside), Listed(idle)
        passed = 0
        for _ in range(300):
            block, act = rng.randrange(30), rng.randrange(9)
            if act < 3 and block not in idle:
                idle.add(block)
                if block in aside:
                    aside.pop(block).returned(block)
                    passed += 1
            elif act < 5:
                idle.discard(block)
            elif act == 5:
                assert line.take() == listed.take(), f"seed {seed}"
            elif act == 6 and listed:
                assert line.shift() == listed.shift(), f"seed {seed}"
            elif block in listed:
                (line.remove if act == 7 else line.renew)(block)
                (listed.remove if act == 7 else listed.renew)(block)
            else:
                line.append(block)
                listed.append(block)
            assert line.first() == listed.first(), f"seed {seed}"
            assert (len(line), block in line) == (len(listed), block in listed), f"seed {seed}"
        assert passed, f"seed {seed}"


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("name", LINED)
def test_policies_decide_the_same_with_lists(
    name: str, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(seed: int) -> list[int]:
        rng = Random(seed)
        case = random_case(rng, 80, 6, wide=3)
        asked = prompts(case.trace.rows, streams(case.trace), Counting(BLOCK))
        make: Any = EVICTIONS[name]
        return replay(asked, make, rng.randint(6, 30), BLOCK, closed=closed)

    with_lines = [found(seed) for seed in range(8)]
    monkeypatch.setattr(Replacement, "line", lambda order: Listed(order._idle))
    assert [found(seed) for seed in range(8)] == with_lines
