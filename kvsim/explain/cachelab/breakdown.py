"""Who reuses what: by distance, by session, and by the beginning of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvsim.explain.cachelab.curve import Curve, Ramps, make_curve
from kvsim.workload.reuse import Found, Reuse
from kvsim.workload.trace import Row

SAME, OTHER, ROOT = "same session", "another session", "shared root"
WHO = (SAME, OTHER, ROOT)
"""Whose content is reused. A shared root is content that at least two sessions had used before. A
request without a session is a session of its own."""


class Group(NamedTuple):
    """Requests that belong together: those of a session, or those that begin alike."""

    name: str
    input_tokens: int
    reuse: Reuse
    """Of its requests."""

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.reuse.found)

    @property
    def curve(self) -> Curve:
        """Their hits by capacity, worked out at each access: there may be very many groups."""
        return make_curve(self.reuse.found, self.reuse.counting.block_size)


def who_reuses(rows: Sequence[Row], reuse: Reuse) -> dict[str, Ramps]:
    """Of each of `WHO`, the tokens that hit by capacity, under LRU."""
    size = reuse.counting.block_size
    ramps = {who: Ramps() for who in WHO}
    shared: list[int] = []
    """Of each request, how many leading blocks at least two sessions have used."""
    for row, (_, most_tokens, runs) in zip(rows, reuse.found, strict=True):
        reached = 0
        for user, first, last, distance in runs:
            same = row.session is not None and row.session == rows[user].session
            reached = max(reached, min(last, shared[user]) if same else last)
            cut = max(first, min(last, shared[user]))
            for who, begin, end in ((ROOT, first, cut), (SAME if same else OTHER, cut, last)):
                end = min(end, most_tokens // size)
                if begin < end:
                    since = distance + begin - first
                    ramps[who].add(since, since + end - begin, size)
        shared.append(reached)
    return ramps


def by_session(rows: Sequence[Row], reuse: Reuse) -> list[Group]:
    """The sessions of a trace, those with most prompt tokens first."""
    names = [row.session for row in rows]
    return _grouped(rows, reuse, names)


def by_prefix(rows: Sequence[Row], reuse: Reuse) -> list[Group]:
    """Requests by their first block, those with most prompt tokens first. Each group is named after
    its first request."""
    names: list[str | None] = []
    for row, (blocks, _, runs) in zip(rows, reuse.found, strict=True):
        names.append(names[runs[0].user] if runs else row.id if blocks else None)
    return _grouped(rows, reuse, names)


def _grouped(rows: Sequence[Row], reuse: Reuse, names: Sequence[str | None]) -> list[Group]:
    members: dict[str, list[tuple[Row, Found]]] = {}
    for name, row, found in zip(names, rows, reuse.found, strict=True):
        if name is not None:
            members.setdefault(name, []).append((row, found))
    groups = (
        Group(
            name,
            sum(row.input_length for row, _ in each),
            Reuse(reuse.counting, [found for _, found in each], 0),
        )
        for name, each in members.items()
    )
    return sorted(groups, key=lambda group: -group.input_tokens)


def histogram(ramps: Ramps, edges: Sequence[int]) -> Iterator[int]:
    """Tokens reused at a distance from each edge up to the next one."""
    heights = ramps.values(edges)
    for lower, upper in pairwise(heights):
        yield upper - lower
