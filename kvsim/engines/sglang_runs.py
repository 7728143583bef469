"""SGLang's pages without names: a radix tree of runs, and counts of all other pages.

Which page holds what decides nothing. What does is how many pages are free, and which content is
in which node of the tree. In most prompts the key of a page follows from the one before
(`SpannedStream`), so a node needs no list of keys: it is a part of the spans of the sequence that
brought it.

```
 spans of a sequence    0 ────── offset a ────── 512 ─── offset b ─── 700 ── its own ─►
 nodes                  [0 ─────── 300)[300 ────────────── 650)[650 ──────── 720)
```
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import cast, overload

from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Request, Span
from kvsim.engine.request import Sequence as Tokens
from kvsim.engines.sglang_blocks import PagePool, SglangRadixTables, SglangTables
from kvsim.engines.sglang_radix import Keys, Node, Pages, RadixTree, Rank

FEW_SPANS = 8
"""Number of spans up to which going through them is faster than a binary search."""


class SpanKeys(Sequence[int]):
    """The keys of the pages `first .. last - 1` of a sequence."""

    __slots__ = ("first", "last", "size", "spans")

    def __init__(self, spans: list[Span], first: int, last: int, size: int) -> None:
        self.spans, self.first, self.last, self.size = spans, first, last, size

    def __len__(self) -> int:
        return self.last - self.first

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> SpanKeys: ...
    def __getitem__(self, place: int | slice) -> int | SpanKeys:
        first, spans, size = self.first, self.spans, self.size
        if isinstance(place, slice):
            start, stop, _ = place.indices(self.last - first)
            return SpanKeys(spans, first + start, first + stop, size)
        depth = first + place
        if depth >= self.last:
            raise IndexError(place)
        return depth * size + spans[_span_at(spans, depth)][2]


def agreement(one: SpanKeys, other: SpanKeys, start: int) -> int:
    """Returns how many leading keys of `one` equal those of `other` from `start` on. Both count
    pages from the beginning of their sequences."""
    first, end = one.first, one.last
    if other.last < end:
        end = other.last
    mine, theirs = one.spans, other.spans
    if mine is theirs:
        return end - first
    my, their, depth = _span_at(mine, first), _span_at(theirs, first), first
    while depth < end:
        _, last, offset = mine[my]
        _, other_last, other_offset = theirs[their]
        if offset != other_offset:
            return depth - first
        depth = last if last < other_last else other_last
        my += last == depth
        their += other_last == depth
    return end - first


def _span_at(spans: list[Span], depth: int) -> int:
    """Returns the place of the span that holds a page."""
    if len(spans) > FEW_SPANS:
        return bisect_left(spans, (depth + 1,)) - 1
    place = 0
    while spans[place][1] <= depth:
        place += 1
    return place


class CountedPages(PagePool):
    """A pool that counts its free pages."""

    def __init__(self, size: int, page_size: int, tree: RadixTree) -> None:
        self.size, self.first = size, 1
        self.tree = tree
        self._free = size
        self._coming = 0
        self._collects = False

    @property
    def blank(self) -> int:
        return self._free

    @property
    def idle(self) -> int:
        return self._free + self.tree.pages - self.tree.locked_pages

    @property
    def free(self) -> int:
        return self.idle

    @property
    def used(self) -> int:
        return self.size - self.free

    def lend(self, number: int) -> None:
        """Takes free pages."""
        self._free -= number
        assert self._free >= 0, "no free page left"

    def let_go(self, pages: Iterable[int]) -> None:
        """They stay in the tree."""

    def give_back(self, pages: Pages) -> None:
        self._return(pages)

    def collect(self) -> None:
        self._collects = True

    def apply(self) -> None:
        self._free += self._coming
        self._coming, self._collects = 0, False

    def _return(self, pages: Pages) -> None:
        if self._collects:
            self._coming += len(pages)
        else:
            self._free += len(pages)

    def audit(self) -> None:
        assert 0 <= self._free + self.tree.pages <= self.size, "pages were lost or invented"
        self.tree.audit()


class SglangCounts(SglangTables):
    """`SglangTables` with counted pages. A table is a range of the right length."""

    gpu: CountedPages

    def make_pool(self, size: int, first: int) -> BlockPool:
        if first:
            return super().make_pool(size, first)
        return CountedPages(size, self.block_size, RadixTree(self.block_size, self._rank))

    def extend(self, sequence: Tokens, upto: int) -> bool:
        size, held = self.block_size, -(-sequence.filled // self.block_size)
        missing = -(-upto // size) - held
        if missing > 0:
            if missing > self.gpu.free:
                return False
            self.gpu.lend(missing)
            sequence.table = self.counted(held + missing)
            self.empty_slots += missing * size
        if upto > sequence.filled:
            self.empty_slots -= upto - sequence.filled
            sequence.filled = upto
        return True

    def recount(self, sequence: Tokens, known: int) -> None:
        sequence.table = self.counted(-(-sequence.filled // self.block_size))

    def free(self, sequence: Tokens) -> None:
        self.recount(sequence, 0)  # Steps that are taken at once count slots alone.
        super().free(sequence)

    def counted(self, pages: int) -> list[int]:
        """Returns a table of so many pages."""
        return cast("list[int]", range(1, pages + 1))

    def audit(self, requests: Iterable[Request]) -> None:
        self.gpu.audit()
        private = empty = 0
        for request in requests:
            for sequence in request.sequences:
                pages = -(-sequence.filled // self.block_size)
                private += pages - sequence.published
                empty += pages * self.block_size - sequence.filled
        held = private + self.gpu.tree.locked_pages
        assert self.gpu.used == held, "pages in use and tables disagree"
        assert empty == self.empty_slots, "empty slots were miscounted"


class SglangRuns(SglangCounts, SglangRadixTables):
    """`SglangRadixTables` with counted pages."""

    def make_tree(self, rank: Rank) -> RadixTree:
        return RadixTree(self.block_size, rank, agreement)

    def keys(self, sequence: Tokens, pages: int) -> Keys:
        return SpanKeys(sequence.block_spans(self.block_size), 0, pages, self.block_size)

    def taken(self, node: Node) -> list[int]:
        return self.counted(node.depth_tokens // self.block_size)

    def checkpoint(self, sequence: Tokens, upto: int, priority: int) -> None:
        self.recount(sequence, 0)
        super().checkpoint(sequence, upto, priority)

    def exchange(self, sequence: Tokens, node: Node, number: int) -> None:
        """The table is as long as before."""
