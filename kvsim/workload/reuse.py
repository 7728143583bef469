"""Which blocks of a prompt earlier requests used, in runs, and how many other blocks since.

```
 request 7   [0 ── 40)   used by request 6 last, after   3 other blocks
             [40 ── 52)  used by request 2 last, after 118 other blocks
             [52 ── 90)  never used before
```

A block belongs to the request that used it last. Prompts take prefixes from each other, so what a
request still owns is always the end of its chain of blocks, and one look-up finds a whole run of
blocks with one owner. Time and memory follow the runs, not the blocks.

The blocks of a request are touched from last to first. So a block is always used later than what
continues it, and its *distance*, the number of different blocks used since, grows with its depth.
A cache that evicts the least recently used block holds exactly the blocks of the least distance
(Mattson et al., "Evaluation techniques for storage hierarchies", 1970).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvsim.core.collector import collector_paused
from kvsim.settings.limits import BLOCKS, REFERENCES, check_size
from kvsim.workload.streams import Span, SpannedStream
from kvsim.workload.trace import Row


class Counting(NamedTuple):
    """What counts as a block, and as a hit. The defaults are those of vLLM's prefix cache."""

    block_size: int
    """Tokens per block."""
    partial_blocks: bool = False
    """Whether the partial last block of a prompt is kept and occupies a block, too."""
    last_token: bool = False
    """Whether the last token of a prompt may hit. Engines compute it again, and so the whole block
    that it completes."""
    outputs: bool = False
    """Whether blocks of outputs whose content the trace names are kept, too."""


class Chain(NamedTuple):
    """The blocks of a request, from the first one on."""

    spans: Sequence[Span]
    """What identifies them; the spans cover at least `blocks`."""
    blocks: int
    """Number of blocks that it leaves in the cache."""
    most_tokens: int
    """Leading tokens of its prompt that may hit."""


class Run(NamedTuple):
    """Consecutive blocks of a request that the same earlier request used last."""

    user: int
    """The place of that request."""
    first: int
    last: int
    """The block after the last one."""
    distance: int
    """Number of different blocks used since the first one was, itself left out. Each following
    block of the run has one more."""


class Found(NamedTuple):
    """What a request finds that was used before."""

    blocks: int
    """Number of its blocks, found or not."""
    most_tokens: int
    """As in `Chain`."""
    runs: list[Run]
    """Without a gap, from its first block on."""


@dataclass(slots=True, frozen=True)
class Reuse:
    """The reuse of a whole trace."""

    counting: Counting
    found: list[Found]
    """One entry per request."""
    distinct: int
    """Number of different blocks."""

    @property
    def blocks(self) -> int:
        """Number of blocks of all requests."""
        return sum(each.blocks for each in self.found)

    @property
    def ceiling_tokens(self) -> int:
        """Prompt tokens that hit in a cache without limit."""
        size = self.counting.block_size
        return sum(
            min(runs[-1].last * size, most_tokens) for _, most_tokens, runs in self.found if runs
        )


@collector_paused()
def find_reuse(rows: Sequence[Row], streams: Sequence[SpannedStream], counting: Counting) -> Reuse:
    """The reuse in one pass over the requests.

    Raises `ConfigError` if there are more different blocks than `kvsim.settings.limits` has room
    for.
    """
    walk, found = Walk(counting.block_size), list[Found]()
    for chain in chains(rows, streams, counting):
        check_size("different blocks", max(chain.blocks, walk.distinct), BLOCKS)
        found.append(walk.step(chain))
    return Reuse(counting, found, walk.distinct)


def ceiling_tokens(
    rows: Sequence[Row], streams: Sequence[SpannedStream], block_size: int, *, outputs: bool = False
) -> int:
    """Prompt tokens that hit in an unlimited cache; with `outputs`, it keeps outputs, too."""
    return find_reuse(rows, streams, Counting(block_size, outputs=outputs)).ceiling_tokens


def chains(
    rows: Iterable[Row], streams: Iterable[SpannedStream], counting: Counting
) -> Iterator[Chain]:
    """The chain of each request, made when it is asked for."""
    size, partial_blocks, last_token, outputs = counting
    for row, stream in zip(rows, streams, strict=True):
        length = row.input_length
        blocks, tail = divmod(length, size)
        spans: Sequence[Span] = stream.spans(size)
        if partial_blocks and tail:
            # A partial block is known by its last token.
            [last] = stream.keys(length - 1, length, 1)
            cut = [
                (begin, min(end, blocks), offset) for begin, end, offset in spans if begin < blocks
            ]
            spans = [*cut, (blocks, blocks + 1, last - blocks * size)]
            blocks += 1
        elif outputs:
            named = min(length + row.output_length, stream.named_tokens)
            blocks = max(blocks, named // size)
        yield Chain(spans, blocks, length if last_token else (length - 1) // size * size)


def bounded_chains(
    rows: Iterable[Row], streams: Iterable[SpannedStream], counting: Counting
) -> list[Chain]:
    """The chains of requests whose blocks are looked at one by one. Raises `ConfigError` if they
    have more blocks than `kvsim.settings.limits` has room for."""
    found = list(chains(rows, streams, counting))
    check_size("block references", sum(chain.blocks for chain in found), REFERENCES)
    return found


class _Owner:
    """A request that used some blocks last: those from `first` on."""

    __slots__ = ("blocks", "first", "place", "slot", "span", "spans")

    def __init__(self, place: int, chain: Chain, slot: int) -> None:
        self.place = place
        self.spans = chain.spans
        self.blocks = chain.blocks
        self.first = 0
        self.span = 0
        """The span that holds block `first`."""
        self.slot = slot


class Walk:
    """Takes in one request after another; remembers only owners of blocks."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._owners: dict[int, _Owner] = {}
        """Key of the first block that an owner has → the owner."""
        self._recency = _Recency()
        self._requests = 0

    @property
    def distinct(self) -> int:
        """Number of different blocks so far."""
        return self._recency.total

    def step(self, chain: Chain) -> Found:
        """What the next request finds; then it owns all its blocks."""
        taken: list[tuple[_Owner, int, int]] = []
        runs: list[Run] = []
        owners, size, recency = self._owners, self._size, self._recency
        depth, blocks = 0, chain.blocks
        for number, (_, end, offset) in enumerate(chain.spans):
            while depth < min(end, blocks):
                owner = owners.get(depth * size + offset)
                if owner is None:
                    break
                last, span = _common(owner, chain, number, depth)
                runs.append(Run(owner.place, depth, last, recency.after(owner.slot)))
                taken.append((owner, last, span))
                depth = last
            else:
                continue
            break
        # After the search: distances do not count what this request itself takes.
        for owner, last, span in taken:
            self._take(owner, last, span)
        if blocks:
            mine = _Owner(self._requests, chain, recency.slot(blocks))
            owners[chain.spans[0][2]] = recency.owners[mine.slot] = mine
        self._requests += 1
        return Found(blocks, chain.most_tokens, runs)

    def _take(self, owner: _Owner, last: int, span: int) -> None:
        """The blocks of an owner before `last` are used again."""
        owners, spans, size = self._owners, owner.spans, self._size
        del owners[owner.first * size + spans[owner.span][2]]
        self._recency.add(owner.slot, owner.first - last)
        owner.first, owner.span = last, span
        if last < owner.blocks:
            owners[last * size + spans[span][2]] = owner
        else:
            self._recency.owners[owner.slot] = None


def _common(owner: _Owner, chain: Chain, number: int, depth: int) -> tuple[int, int]:
    """Where two chains part that agree at `depth`, and the owner's span there. `number` is the
    chain's span at `depth`."""
    mine, theirs, place = chain.spans, owner.spans, owner.span
    most = min(chain.blocks, owner.blocks)
    while depth < most and mine[number][2] == theirs[place][2]:
        end, other = mine[number][1], theirs[place][1]
        depth = min(end, other, most)
        number += depth == end
        place += depth == other
    return depth, place


_LEAST_SLOTS = 1024


class _Recency:
    """How many blocks each owner has, in order of last use, with sums over all later owners
    (Fenwick, "A new data structure for cumulative frequency tables", 1994). Slots of requests that
    own nothing any more are given out again."""

    def __init__(self) -> None:
        self.owners: list[_Owner | None] = []
        """By slot; None for one that owns nothing any more."""
        self.total = 0
        """Number of blocks of all owners."""
        self._sums = [0] * (_LEAST_SLOTS + 1)

    def slot(self, blocks: int) -> int:
        """A slot after all others, for an owner of so many blocks."""
        if len(self.owners) + 1 == len(self._sums):
            self._compact()
        self.owners.append(None)
        slot = len(self.owners) - 1
        self.add(slot, blocks)
        return slot

    def add(self, slot: int, blocks: int) -> None:
        """Change the number of blocks of an owner."""
        self.total += blocks
        sums = self._sums
        slot += 1
        while slot < len(sums):
            sums[slot] += blocks
            slot += slot & -slot

    def after(self, slot: int) -> int:
        """Number of blocks of all owners after this one."""
        sums, before = self._sums, 0
        slot += 1
        while slot:
            before += sums[slot]
            slot &= slot - 1
        return self.total - before

    def _compact(self) -> None:
        owners = [owner for owner in self.owners if owner is not None]
        self.owners, self.total = list[_Owner | None](owners), 0
        self._sums = [0] * (max(_LEAST_SLOTS, 2 * len(owners)) + 1)
        for slot, owner in enumerate(owners):
            owner.slot = slot
            self.add(slot, owner.blocks - owner.first)
