"""What clients and metrics see of an engine: tokens and ends of requests, step by step.

Tokens are words of a stand-in for a tokenizer: plain, the same everywhere, and none of a real
model. A token is a word of at most six letters with the space before it, up to three digits, white
space, or any other character: about as many as real tokenizers make of English. Its id is a hash of
its text. Outputs are words of four letters, each of them one token, so that an answer that comes
back in the next turn is known by the tokens that were generated.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from xxhash import xxh32_intdigest

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import ABORTED, Request

VOCABULARY = 1 << 17
"""Ids are below."""
_PIECE = re.compile(r"\s?[A-Za-z]{1,6}|\s?\d{1,3}|\s+|.", re.DOTALL)
_SYLLABLES = [first + second for first in "bdfgklmnprstvwyz" for second in "aeio"]


@lru_cache(1 << 16)
def _id_of(piece: str) -> int:
    return xxh32_intdigest(piece.encode(errors="surrogatepass")) % VOCABULARY


def tokens_of(text: str) -> list[int]:
    """The tokens of a text."""
    return [*map(_id_of, _PIECE.findall(text))]


def tokens_of_chat(messages: Iterable[tuple[str, str]], *, opens: bool = True) -> list[int]:
    """The tokens of a conversation, as (role, text): each turn begins with a token for its role and
    ends with one. `opens`: it ends where the answer begins."""
    found: list[int] = []
    for role, text in messages:
        found += [_id_of(f"<|{role}|>"), *tokens_of(text), _id_of("<|end|>")]
    return [*found, _id_of("<|assistant|>")] if opens else found


_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_FILLER = [f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES]
_FILLER_TEXTS = np.array(_FILLER, "S")
_FILLER_IDS = np.array([*map(_id_of, _FILLER)], np.int64)
WORD_BYTES = _FILLER_TEXTS.itemsize
"""Of the text of each token of an output."""


def filler(request: int, length: int) -> tuple[bytes, array[int]]:
    """The output of a request: its text, and the ids of its tokens. No two requests begin alike, as
    far as chance goes."""
    # splitmix64, whose numbers no version of a library changes.
    mixed = (np.arange(1, length + 1, dtype=np.uint64) + np.uint64(request << 24)) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
    places = (mixed >> np.uint64(52)).astype(np.int64)
    return _FILLER_TEXTS[places].tobytes(), array("q", _FILLER_IDS[places].tobytes())


def nobody() -> None:
    """Hears nothing."""


@dataclass(eq=False, slots=True)
class Entry:
    """A request on its way, as its client sees it."""

    request: Request
    output: bytes = b""
    """The text of all its tokens, those to come included (`filler`)."""
    client: Callable[[], None] = nobody
    """Called when anything has changed of it, or of its `family`."""
    family: Sequence[Entry] = ()
    """The samples of its client's request; empty: it is the only one."""
    tokens: int = 0
    """Tokens generated so far."""
    reason: str = ""
    """How it ended: `stop`, `length`, `abort` or `error`."""
    error: str = ""
    """The reason of an error."""
    admitted: bool = False
    preemptions: int = 0
    """Those up to its last token."""
    last_ns: int = -1
    """When its last token came; -1: not yet."""

    def text(self, first: int = 0) -> bytes:
        """Its tokens so far from `first` on."""
        return self.output[first * WORD_BYTES : self.tokens * WORD_BYTES]


@dataclass(slots=True)
class Step:
    """What came of a step of the engine, or of what happened between two."""

    now_ns: int
    admitted: list[Entry] = field(default_factory=list)
    """Requests that took part in a step for the first time since the last one."""
    tokens: list[tuple[Entry, int]] = field(default_factory=list)
    """Requests that got tokens, and how many, with `Entry.last_ns` still of the token before."""
    ended: list[Entry] = field(default_factory=list)


class Steps:
    """A watcher of a loop that tells its listeners of every step."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Batch, Step], None]] = []
        self.entries: dict[int, Entry] = {}
        """Requests in progress, by index."""
        self._clients: dict[Callable[[], None], None] = {}
        """Those whom something concerns that they have not been told yet, in order."""
        self._admitted: list[Entry] = []
        self._flights: deque[tuple[Plan, list[tuple[Request, Entry]]]] = deque()

    def begin(self) -> None:
        """A loop begins."""

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """A step was composed."""
        if not plan.computes:
            return
        entries, requests = self.entries, plan.requests
        for request in requests[plan.num_continued :]:
            if request.finish_ns < 0 and not (entry := self._entry(request)).admitted:
                entry.admitted = True
                self._admitted.append(entry)
        flight = [(each, found) for each in requests if (found := entries.get(each.index))]
        self._flights.append((plan, flight))

    def settled(self, batch: Batch, ended: Iterable[Request]) -> None:
        """A step is over, or nothing but a request."""
        step, landed = Step(batch.now_ns), False
        # Several steps may be under way; they end in order.
        while self._flights and not self._flights[0][0].flying:
            landed = True
            plan, flight = self._flights.popleft()
            step.now_ns = plan.end_ns
            for request, entry in flight:
                new = request.output_tokens - entry.tokens
                if new > 0 and not entry.reason:
                    entry.tokens += new
                    step.tokens.append((entry, new))
        for request in ended:
            entry = self._entry(request)
            entry.reason = _reason(request)
            entry.error = "" if request.reason in ("", ABORTED) else request.reason
            step.ended.append(entry)
        if landed or step.ended:
            step.admitted, self._admitted = self._admitted, []
            self.tell(batch, step)

    def tell(self, batch: Batch, step: Step) -> None:
        """Tells the listeners what came of a step, and notes which clients it concerns."""
        for listener in self.listeners:
            listener(batch, step)
        for entry in step.ended:
            del self.entries[entry.request.index]
            self._clients[entry.client] = None
        for entry, _ in step.tokens:
            entry.last_ns = step.now_ns
            self._clients[entry.client] = None

    def tell_clients(self) -> None:
        """Tells the clients that something has changed since the last call."""
        clients, self._clients = self._clients, {}
        for client in clients:
            client()

    def _entry(self, request: Request) -> Entry:
        """That of a request; of a trace, nobody has told of it before."""
        entry = self.entries.get(request.index)
        if entry is None:
            entry = self.entries[request.index] = Entry(request)
        return entry


def _reason(request: Request) -> str:
    """How a request ended, in vLLM's words."""
    if request.reason:
        return "abort" if request.reason == ABORTED else "error"
    return "length" if request.output_tokens == request.max_new_tokens else "stop"
