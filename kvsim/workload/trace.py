"""A request trace in memory: every reader produces it, and everything else consumes it.

```
Trace ── header facts, notes of the reader, sha256
  └─ rows: in file order, sorted by arrival
        └─ content: None | HashContent | TokenContent | SegmentContent | ParentContent
```
The field names are those of the native format (`kvsim_trace` version 1); times are integer
nanoseconds from the start of the trace. Records are dataclasses here, as traces are read on GPU
machines that lack msgspec (`kvsim validate`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from operator import attrgetter, eq, itemgetter
from typing import Any, Literal, NamedTuple, overload

MAX_ID = (1 << 64) - 1
"""Greatest hash id."""
MAX_TOKEN_ID = (1 << 63) - 1
Runs = tuple[tuple[int, int], ...]
"""Ids as runs `(start, count)`: `start, start + 1, ...`, concatenated."""


@dataclass(slots=True)
class HashContent:
    """Anonymised block ids of the prompt, and of the blocks that fill during decode. Do not change
    it; as every row of a long trace has one, it is not frozen (`Row`).

    `output[j]` is block `input_length // block_size + j` of the stream (prompt, then output).
    """

    prompt: Runs
    output: Runs = ()


@dataclass(slots=True, frozen=True)
class TokenContent:
    """Real token ids: exactly `input_length` and, if known, `output_length` of them."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] | None = None


@dataclass(slots=True, frozen=True)
class SegmentContent:
    """Named shared segments `(name, length)` at the start of the prompt; the rest is unique."""

    segments: tuple[tuple[str, int], ...]


@dataclass(slots=True, frozen=True)
class ParentContent:
    """The first `keep` tokens of the stream of row `parent` (an index); the rest is unique."""

    parent: int
    keep: int


Content = HashContent | TokenContent | SegmentContent | ParentContent


@dataclass(slots=True)
class Row:
    """One request of a trace. Do not change it; a frozen one takes four times as long to make."""

    index: int
    """Position in the file, from 0; it breaks ties everywhere."""
    id: str
    line: int
    """Line in the uncompressed file, for messages."""
    arrival_ns: int | None
    """Recorded arrival, from the start of the trace; None if the trace has no times."""
    input_length: int
    output_length: int
    content: Content | None = None
    """None: unique content, which shares nothing with other rows, except rows that name it as
    `parent`."""
    after: int = -1
    """Index of the row whose completion releases this one in session replay, or -1."""
    delay_ns: int = 0
    """Think time between that completion and this release."""
    session: str | None = None
    turn: int | None = None
    scope: str | None = None
    """Namespace of hash ids or segment names; None: the common namespace."""
    salt: str | None = None
    """Part of every block key: nothing is shared across salts."""
    model: str | None = None
    priority: int = 0
    """Lower numbers are served first, as in vLLM."""
    deadline_ns: int | None = None
    max_new_tokens: int | None = None
    """Tokens that its client allows it to generate, as it says when it sends it; None: unsaid."""
    ignore_eos: bool = False
    """Whether it generates as many, whatever the model says."""
    lora: str | None = None
    """Name of its adapter; None: the model itself."""
    abort_after_ns: int | None = None
    """Its client gives it up so long after it was sent; None: it waits for the end."""
    accepted_drafts: tuple[int, ...] = ()
    """With speculative decoding: how many drafts the model accepts in each of its steps."""
    tags: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None
    """What its own keys or columns say (`x_NAME`), by NAME."""
    observed: dict[str, Any] | None = None
    """Measurements of a real system; no policy sees them."""


@dataclass(slots=True)
class Trace:
    """A whole trace and its origin."""

    path: str
    format: str
    """The reader's name (`kvsim.workload.READERS`)."""
    sha256: str
    """Digest of the uncompressed bytes."""
    rows: Sequence[Row]
    """Those of a long trace are `Rows`."""
    block_size: int | None = None
    """Tokens per hash id; None if rows have no hash ids."""
    hash_kind: Literal["prefix", "content"] | None = None
    partial_hash: bool | None = None
    """True: a prompt has `ceil(L / block_size)` ids; False: `floor`."""
    hash_scope: Literal["global", "session"] = "global"
    origin: str | None = None
    """Absolute time of arrival 0, ISO 8601, if the source has one."""
    source: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the reader dropped or changed, and other notes for the user, one line each."""


_count = itemgetter(1)


def collapse(ids: Iterable[int]) -> Runs:
    """The longest runs that spell out `ids`."""
    runs: list[tuple[int, int]] = []
    start = end = -1
    for one in ids:
        if one == end:
            end += 1
        else:
            if end > start:
                runs.append((start, end - start))
            start, end = one, one + 1
    if end > start:
        runs.append((start, end - start))
    return tuple(runs)


def merge(runs: Iterable[tuple[int, int]]) -> Runs:
    """Join adjacent runs into the longest runs of the same ids."""
    merged: list[tuple[int, int]] = []
    for start, count in runs:
        if merged and start == merged[-1][0] + merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((start, count))
    return tuple(merged)


def runs_of(content: HashContent) -> Runs:
    """The ids of a prompt and its output, in the longest runs."""
    alone = len(content.prompt) == 1 and not content.output
    return content.prompt if alone else merge(content.prompt + content.output)


def total(runs: Runs) -> int:
    """Number of ids in all runs."""
    return sum(map(_count, runs))


def beginning(trace: Trace, number: int | None) -> Trace:
    """The first so many requests of a trace; None: all."""
    if number is None or number >= len(trace.rows):
        return trace
    digest = hashlib.sha256(f"{trace.sha256} first {number}".encode()).hexdigest()
    return replace(trace, rows=trace.rows[:number], sha256=digest)


def repeated(trace: Trace, times: int) -> Trace:
    """The trace and `times - 1` copies of it, each sent as soon as the one before has been.

    Copies share nothing with each other: each has a cache salt of its own, so a cache finds in a
    copy what it would find in the trace, no more. Ids and sessions get the number of the copy.
    """
    rows = trace.rows
    arrivals = [row.arrival_ns for row in rows if row.arrival_ns is not None]
    # From the last request of a copy to the first of the next: the mean gap.
    span_ns = arrivals[-1] - arrivals[0] if arrivals else 0
    length_ns = span_ns + span_ns // max(len(rows) - 1, 1)
    copies = [
        _copied(row, number, number * len(rows), number * length_ns)
        for number in range(times)
        for row in rows
    ]
    digest = hashlib.sha256(f"{trace.sha256} {times} times".encode()).hexdigest()
    notes = [*trace.notes, f"sent {times} times over, each time with a cache salt of its own"]
    return replace(trace, rows=copies, sha256=digest, notes=notes)


def _copied(row: Row, number: int, places: int, later_ns: int) -> Row:
    """A row of copy `number`, moved by `places` rows and `later_ns`; copy 0 is the trace itself."""
    if number == 0:
        return row
    content = row.content
    if isinstance(content, ParentContent):
        content = replace(content, parent=content.parent + places)
    return replace(
        row,
        index=row.index + places,
        id=f"{row.id}#{number}",
        arrival_ns=None if row.arrival_ns is None else row.arrival_ns + later_ns,
        content=content,
        after=row.after if row.after < 0 else row.after + places,
        session=None if row.session is None else f"{row.session}#{number}",
        salt=f"{row.salt or ''}#{number}",
    )


_STORED = ("line", "arrival_ns", "input_length", "output_length")
_DEFAULTS = {each.name: each.default for each in fields(Row)}


class HashRuns(NamedTuple):
    """The hash ids of some rows as the longest runs, row after row."""

    rows: Sequence[int]
    """Places of the rows that have a `HashContent`."""
    starts: array[int]
    """First id of each run."""
    counts: array[int]
    """Ids of each run."""
    ends: array[int]
    """Where the runs of each row end."""
    open: Sequence[int] = ()
    """Places of the rows whose ids go on with the output."""


class Rows(Sequence[Row]):
    """Rows that say no more than lines, times, lengths and the hash ids of prompts, as columns of
    numbers: those of a long trace, as objects, would fill the memory. A `Row` is made at each
    access: what is changed in it is lost."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        """Index of the first row."""
        self._stored = tuple(array("q") for _ in _STORED)
        self._starts, self._counts, self._ends = array("Q"), array("q"), array("q")

    def add(self, columns: Sequence[Sequence[int]], hash_ids: Sequence[Sequence[int]]) -> None:
        """Add rows: their `_STORED` columns, and the ids of each.

        Raises `OverflowError` for a number of more than 64 bits.
        """
        import numpy as np

        ids = np.array([*chain.from_iterable(hash_ids)], np.uint64)
        numbers = np.array([*map(len, hash_ids)], np.int64)
        ends = np.cumsum(numbers)
        fresh = np.ones(len(ids), bool)
        # The id after 2**64 - 1 wraps to 0, which begins a run in any case.
        fresh[1:] = (ids[1:] != ids[:-1] + 1) | (ids[1:] == 0)
        # So does the first id of each row.
        fresh[(ends - numbers)[numbers > 0]] = True
        counts = np.diff(np.flatnonzero(np.append(fresh, True)))
        # From numbers of ids to numbers of runs.
        ends = np.append(0, np.cumsum(fresh))[ends]
        runs = (each.tobytes() for each in (ids[fresh], counts, ends))
        self._extend([array("q", each) for each in columns], *map(array, "Qqq", runs))

    def extend(self, rows: Rows) -> None:
        """Add rows."""
        self._extend(rows._stored, rows._starts, rows._counts, rows._ends)

    def _extend(
        self,
        columns: Sequence[array[int]],
        starts: array[int],
        counts: array[int],
        ends: array[int],
    ) -> None:
        for stored, column in zip(self._stored, columns, strict=True):
            stored += column
        before = len(self._starts)
        self._ends += array("q", [end + before for end in ends]) if before else ends
        self._starts += starts
        self._counts += counts

    @property
    def runs(self) -> HashRuns:
        """The hash ids of all rows."""
        return HashRuns(range(len(self)), self._starts, self._counts, self._ends)

    def column(self, name: str) -> Sequence[Any]:
        """The attribute `name` of every row. Do not change it."""
        if name in _STORED:
            return self._stored[_STORED.index(name)]
        if name == "id":
            return [*map(str, self.column("index"))]
        if name == "index":
            return range(self.first, self.first + len(self))
        if name == "content":
            return [*map(self._content, range(len(self)))]
        return [_DEFAULTS[name]] * len(self)

    def __len__(self) -> int:
        return len(self._ends)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Row]:
        names = ("index", "id", *_STORED, "content")
        return map(Row, *map(self.column, names))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return self._part(range(*index.indices(len(self))))
        index = range(len(self))[index]
        row = self.bare(index)
        row.content = self._content(index)
        return row

    def bare(self, index: int) -> Row:
        """The row at a place >= 0 without its hash ids."""
        number = self.first + index
        lines, times_ns, inputs, outputs = self._stored
        return Row(
            number, str(number), lines[index], times_ns[index], inputs[index], outputs[index]
        )

    def _part(self, places: range) -> Sequence[Row]:
        if len(places) == len(self):
            return self
        if places.start or places.step != 1:
            return [self[place] for place in places]
        part, rows = Rows(self.first), len(places)
        runs = self._ends[rows - 1] if rows else 0
        columns = [column[:rows] for column in self._stored]
        part._extend(columns, self._starts[:runs], self._counts[:runs], self._ends[:rows])
        return part

    def _content(self, index: int) -> HashContent:
        runs = slice(self._ends[index - 1] if index else 0, self._ends[index])
        return HashContent(tuple(zip(self._starts[runs], self._counts[runs], strict=True)))


def bare(rows: Sequence[Row]) -> Callable[[int], Row]:
    """What looks up the row at a place; it may leave out the content."""
    return rows.bare if isinstance(rows, Rows) else rows.__getitem__


def column(rows: Sequence[Row], name: str) -> Sequence[Any]:
    """The attribute `name` of every row. Do not change it."""
    return rows.column(name) if isinstance(rows, Rows) else [*map(attrgetter(name), rows)]


def hash_runs(rows: Sequence[Row]) -> HashRuns:
    """The hash ids of all rows that have some, prompts and outputs."""
    if isinstance(rows, Rows):
        return rows.runs
    places, going_on = array("q"), array("q")
    found = HashRuns(places, array("Q"), array("q"), array("q"), going_on)
    for place, row in enumerate(rows):
        if isinstance(row.content, HashContent):
            for start, count in runs_of(row.content):
                found.starts.append(start)
                found.counts.append(count)
            found.ends.append(len(found.starts))
            places.append(place)
            if row.content.output:
                going_on.append(place)
    return found
