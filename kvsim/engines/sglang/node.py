"""A node of SGLang's radix tree."""

from __future__ import annotations

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from kvsim.core.vectors import EMPTY
from kvsim.engines.sglang.text import Text

NO_TEXT: Final = Text(1, [])


class Node:
    """The pages `begin .. end - 1` of a text, which are `pages[at]` and those behind it."""

    text: Text
    begin: i64
    end: i64
    pages: vec[i64]
    at: i64
    children: dict[int, Node]
    """Children by the number of their first page."""
    parent: Node | None
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
        self.children, self.parent, self.priority = {}, parent, priority
        self.locks = self.hits = self.history = self.time = 0
        self.older = self.newer = self

    @property
    def tokens(self) -> int:
        """Tokens of its pages."""
        return (self.end - self.begin) * self.text.page_size

    @property
    def depth_tokens(self) -> int:
        """Tokens from the root to its end."""
        return self.end * self.text.page_size

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
