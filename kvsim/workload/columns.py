"""The rows of a trace as columns: those of a long trace, as objects, would fill the memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter, eq
from typing import Any, NamedTuple, overload

from kvsim.workload.trace import HashContent, Row, runs_of

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
    numbers. A `Row` is made at each access: what is changed in it is lost."""

    def __init__(self, first: int = 0) -> None:
        """`first`: index of the first row."""
        self._first = first
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
        fresh[1:] = (ids[1:] != ids[:-1] + 1) | (ids[1:] == 0)
        fresh[(ends - numbers)[numbers > 0]] = True
        counts = np.diff(np.flatnonzero(np.append(fresh, True)))
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
            return range(self._first, self._first + len(self))
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

    def sent(self, index: int) -> tuple[int, str, int]:
        """What a client sends of the row at a place >= 0: its index, its id, its length."""
        number = self._first + index
        return number, str(number), self._stored[2][index]

    def bare(self, index: int) -> Row:
        """The row at a place >= 0 without its hash ids."""
        number = self._first + index
        lines, times_ns, inputs, outputs = self._stored
        return Row(
            number, str(number), lines[index], times_ns[index], inputs[index], outputs[index]
        )

    def _part(self, places: range) -> Sequence[Row]:
        if len(places) == len(self):
            return self
        if places.start or places.step != 1:
            return [self[place] for place in places]
        part, rows = Rows(self._first), len(places)
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
