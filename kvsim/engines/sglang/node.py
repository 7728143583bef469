"""A node of SGLang's radix tree, and what its pages hold: runs of numbers, equal for equal tokens
after equal tokens."""

from __future__ import annotations

from typing import Any, Final

from librt.vecs import append, vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core.contents import Numbering
from kvsim.core.vectors import EMPTY, zeros


@mypyc_attr(free_list_len=1)
class Text:
    """The pages of a stream in runs of consecutive numbers."""

    page_size: i64
    runs: vec[i64]
    """Of each run, the number of a page less its place, and where the run ends."""
    request: Any
    """Of which it is, for an outsider's rank of nodes; None: of nobody."""
    _stream: Any

    def __init__(
        self,
        page_size: i64,
        runs: list[tuple[int, int]],
        stream: Any = None,
        request: Any = None,
    ) -> None:
        """`runs`: pairs as in the attribute of this name."""
        self.page_size, self._stream, self.request = page_size, stream, request
        pairs: vec[i64] = zeros(2 * len(runs))
        at: i64 = 0
        for base, end in runs:
            pairs[at], pairs[at + 1] = base, end
            at += 2
        self.runs = pairs

    def reach(self, pages: i64, numbering: Numbering) -> None:
        """Sees to it that the first `pages` pages have numbers. Their tokens must be known."""
        place: i64 = 0
        if len(self.runs):
            place = self.runs[len(self.runs) - 1]
        if place >= pages:
            return
        for key in self._stream.keys(place, pages, self.page_size):
            self.runs = append(append(self.runs, numbering.number(key) - place), place + 1)
            place += 1

    def run_at(self, page: i64) -> i64:
        """Where the run that holds a page is in `runs`."""
        runs: vec[i64] = self.runs
        low: i64 = 0
        high: i64 = len(runs) // 2 - 1
        while low < high:
            middle: i64 = (low + high) >> 1
            if runs[2 * middle + 1] > page:
                high = middle
            else:
                low = middle + 1
        return 2 * low

    def number(self, page: i64) -> i64:
        """The number of a page."""
        return self.runs[self.run_at(page)] + page

    def agrees(self, other: Text, first: i64, last: i64) -> i64:
        """Of the pages `first .. last - 1`, how many leading ones are the same in another text."""
        if self is other:
            return last - first
        page: i64 = first
        own: i64 = self.run_at(first)
        its: i64 = other.run_at(first)
        while page < last and self.runs[own] == other.runs[its]:
            page = min(self.runs[own + 1], other.runs[its + 1])
            own += 2 if self.runs[own + 1] == page else 0
            its += 2 if other.runs[its + 1] == page else 0
        return min(page, last) - first

    def keys(self, first: i64, last: i64) -> list[int]:
        """The keys of the pages `first .. last - 1`, for those who look on."""
        keys: list[int] = list(self._stream.keys(first, last, self.page_size))
        return keys


NO_TEXT: Final = Text(1, [])


@mypyc_attr(free_list_len=1)
class Node:
    """The pages `begin .. end - 1` of a text, which are `pages[at]` and those behind it."""

    text: Text
    begin: i64
    end: i64
    key: object
    """The number of its first page, which tells it from all others."""
    pages: vec[i64]
    at: i64
    parent: Node | None
    branches: i64
    """Number of its children."""
    locks: i64
    """Number of requests that hold this node or one below it."""
    hits: i64
    """Number of requests that passed through it."""
    priority: i64
    """The best priority among the requests that inserted it."""
    history: i64
    """Pages from the root to the deepest end that was ever at or below it."""
    time: i64
    """Its place in the order of last use, where an outsider's rank asks for it."""
    older: Node
    newer: Node
    """Its neighbours in the ring; the root is between the newest and the oldest."""

    def __init__(
        self,
        text: Text,
        begin: i64,
        end: i64,
        pages: vec[i64],
        at: i64,
        parent: Node | None,
        priority: i64,
    ) -> None:
        self.text, self.begin, self.end, self.pages, self.at = text, begin, end, pages, at
        self.key = None
        self.parent, self.priority = parent, priority
        self.branches = self.locks = self.hits = self.history = self.time = 0
        self.older = self.newer = self

    @property
    def tokens(self) -> int:
        """Tokens of its pages."""
        return (self.end - self.begin) * self.text.page_size

    @property
    def history_tokens(self) -> int:
        """Tokens from the root to the deepest end that was ever at or below it."""
        return self.history * self.text.page_size

    def list_pages(self) -> list[int]:
        """Its pages."""
        return [self.pages[k] for k in range(self.at, self.at + self.end - self.begin)]

    def list_keys(self) -> list[int]:
        """The keys of its pages, for those who look on."""
        return self.text.keys(self.begin, self.end)


NOWHERE: Final = Node(NO_TEXT, 0, 0, EMPTY, 0, None, 0)
"""The node of a request that was never looked up."""
