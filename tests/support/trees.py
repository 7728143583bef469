"""Small random trees of prompts, and what no policy can exceed with them."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import NamedTuple

from kvsim.workload import HashContent, Row, Trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, Reuse, find_reuse

BLOCK = 4


class Case(NamedTuple):
    """A trace, and the keys of its prompts' full blocks."""

    trace: Trace
    keys: list[list[int]]
    most: list[int]
    """Leading blocks of each prompt that may hit."""

    def reuse(self, **counting: bool) -> Reuse:
        return find_reuse(self.trace.rows, streams(self.trace), Counting(BLOCK, **counting))


def random_case(rng: Random, requests: int, depth: int, *, wide: int = 2) -> Case:
    """Paths from the root of a tree; each id stands for the way to it."""
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for index in range(requests):
        path = tuple(rng.randrange(wide) for _ in range(rng.randint(0, depth)))
        chain = [ids.setdefault(path[: end + 1], 10 * len(ids)) for end in range(len(path))]
        length = max(1, BLOCK * len(chain) + rng.choice([0, 0, 1, 3]))
        content = HashContent(tuple((each, 1) for each in chain))
        session = rng.choice([None, "a", "b"])
        rows.append(Row(index, str(index), index + 2, index, length, 1, content, session=session))
    trace = Trace("made", "native", "", rows, BLOCK, "prefix", partial_hash=False)
    keys = [
        list(stream.keys(0, row.input_length // BLOCK, BLOCK))
        for row, stream in zip(rows, streams(trace), strict=True)
    ]
    return Case(trace, keys, [(row.input_length - 1) // BLOCK for row in rows])


def most_hits(case: Case, capacity: int) -> int:
    """The most leading blocks that can hit, over everything that could be kept after each one."""
    best = {frozenset[int](): 0}
    for keys, most in zip(case.keys, case.most, strict=True):
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            here = next((n for n, key in enumerate(keys) if key not in resident), len(keys))
            choice = sorted(resident | set(keys))
            for kept in combinations(choice, min(len(choice), capacity)):
                state = frozenset(kept)
                after[state] = max(after.get(state, 0), hits + min(here, most))
        best = after
    return max(best.values())
