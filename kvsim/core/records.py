"""What a run notes, in little memory: two logs, columns of integers, and a tally of numbers.

One log is of changes in a request's standing (preempted, swapped, loaded, admitted again), the
other of speculative decoding. A request that is never preempted needs an entry only if its first
step begins later than it was composed. So the first log grows with preemptions and hardly with
steps.

```
PackedColumns   rows ──► piece: each column apart, in the narrowest integers that hold it
                           │ beyond `most` rows
                           ▼
                         a temporary file without a name, gone with the process

Tally           numbers ──► arrays, as they came ──► sorted, each number once
                              whenever they outgrow what is sorted already
```
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from kvsim.core.schema import KINDS, STEPS, TRANSITIONS, Source
from kvsim.errors import OutputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

(
    SCHEDULED,
    PREEMPTED,
    SWAPPED_OUT,
    SWAPPED_IN,
    READMITTED,
    CAUGHT_UP,
    RECOVERED,
    RESUMED,
    HELD,
    LOOKED_UP,
    LOADING,
    LOADED,
    RELOADING,
    RELOADED,
    PASSED_OVER,
    CONTINUED,
) = range(len(KINDS))

TRANSITION_COLUMNS = TRANSITIONS.names(Source.TRANSITION)


def transitions(noted: Any) -> dict[str, np.ndarray]:
    """The log of one run, in the order in which steps were composed: each of `TRANSITION_COLUMNS`
    as an int64 array, from the vector of their values, entry by entry."""
    import numpy as np

    rows = np.frombuffer(noted, np.int64).reshape(-1, len(TRANSITION_COLUMNS))
    return {name: rows[:, i].copy() for i, name in enumerate(TRANSITION_COLUMNS)}


DRAFT_COLUMNS = STEPS.names(Source.DRAFTS)


class DraftLog:
    """The log of one run, in the order in which steps ended."""

    def __init__(self) -> None:
        self._rows = array("q")
        """The entries: the end of the step, the time of the drafter, and `DRAFT_COLUMNS`."""

    def end_step(
        self, end_ns: int, drafter_ns: int, sequences: int, drafts: int, accepted: int
    ) -> None:
        """A step is over whose end the drafter delayed by `drafter_ns`. Of the `drafts` drafts that
        it verified in so many sequences, `accepted` were accepted."""
        if sequences or drafter_ns:
            self._rows.extend((end_ns, drafter_ns, sequences, drafts, accepted))

    def added_to(self, steps: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Columns of steps with `drafter_ns` and `DRAFT_COLUMNS`; packed ones are widened in
        place."""
        import numpy as np

        names, ends_ns = ("drafter_ns", *DRAFT_COLUMNS), steps["end_ns"]
        rows = np.array(self._rows, np.int64).reshape(-1, 1 + len(names))
        places = np.searchsorted(ends_ns, rows[:, 0])
        found = np.zeros((len(names), len(ends_ns)), dtype=np.int64)
        for column, values in zip(found, rows.T[1:], strict=True):
            np.add.at(column, places, values)
        if isinstance(steps, PackedColumns):
            steps.widen(names, [found.T])
            return steps
        return {**steps, **dict(zip(names, found, strict=True))}


class PackedColumns(Mapping[str, "Ints"]):
    """Named columns of equal length, added as blocks of rows; each access unpacks a column.

    Keep a reference to a column that is needed twice. At most about `most` rows are in memory.
    """

    def __init__(self, names: tuple[str, ...], most: int = 1 << 20) -> None:
        self.rows = 0
        self._columns: dict[str, list[_Piece]] = {name: [] for name in names}
        self._most = most
        self._file: IO[bytes] | None = None

    def __getitem__(self, name: str) -> Ints:
        return self.part(name, 0, self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self._columns  # without unpacking it

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets plain columns: the file stays here.
        return dict, (dict(self),)

    def add(self, block: Ints) -> None:
        """Append an array of shape (rows, columns)."""
        self._pack(list(self._columns.values()), block, self.rows)
        self.rows += len(block)

    def widen(self, names: tuple[str, ...], blocks: Iterable[Ints]) -> None:
        """Add columns to the existing rows: arrays of shape (rows, names), in order."""
        new: dict[str, list[_Piece]] = {name: [] for name in names}
        rows = 0
        for block in blocks:
            self._pack(list(new.values()), block, rows)
            rows += len(block)
        assert rows == self.rows, "the new columns are of another length"
        self._columns |= new

    def part(self, name: str, first: int, last: int) -> Ints:
        """Rows `first .. last - 1` of a column."""
        import numpy as np

        last = min(last, self.rows)
        column = np.empty(max(last - first, 0), dtype=np.int64)
        start = 0
        for piece in self._columns[name]:
            low, high = max(first, start), min(last, start + piece.rows)
            if low < high:
                self._unpack(piece, low - start, column[low - first : high - first])
            start += piece.rows
        return column

    def _pack(self, columns: list[list[_Piece]], block: Ints, before: int) -> None:
        """Append a block after `before` rows, each of its columns to one of `columns`."""
        import numpy as np

        values = np.ascontiguousarray(block.T)
        lows, highs = values.min(axis=1).tolist(), values.max(axis=1).tolist()
        spill = before + len(block) > self._most
        for pieces, column, low, high in zip(columns, values, lows, highs, strict=True):
            narrow = (column - low).astype(np.min_scalar_type(high - low)) if high > low else None
            place = -1
            if spill and narrow is not None:
                # A slice would keep the array in memory.
                place, narrow = self._spill(narrow), np.empty(0, narrow.dtype)
            pieces.append(_Piece(len(block), low, narrow, place))

    def _unpack(self, piece: _Piece, first: int, column: Ints) -> None:
        """Fill a column with the rows of a piece from `first` on."""
        import numpy as np

        column[:] = piece.low
        narrow = piece.narrow
        if narrow is None:
            return
        if piece.place >= 0:
            assert self._file is not None
            self._file.seek(piece.place + first * narrow.itemsize)
            narrow, first = np.fromfile(self._file, narrow.dtype, len(column)), 0
        # Unsigned integers of 64 bits wrap around, so that every sum is right all the same.
        shown = narrow[first : first + len(column)]
        np.add(column, shown, out=column, dtype=np.int64, casting="unsafe")

    def _spill(self, narrow: NDArray[Any]) -> int:
        """Append to the file; returns the offset of the data in it."""
        import tempfile

        try:
            if self._file is None:
                # The file lives as long as the columns do.
                self._file = tempfile.TemporaryFile(prefix="kvsim-")  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            place = self._file.seek(0, 2)
            self._file.write(narrow.tobytes())
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"{tempfile.gettempdir()}: cannot keep the steps of a long run: {error.strerror};"
                " free some space or set TMPDIR"
            ) from None
        return place


def rows_in(columns: Mapping[str, Any]) -> int:
    """Rows of the columns of a run's steps, packed or not."""
    return columns.rows if isinstance(columns, PackedColumns) else len(columns["start_ns"])


def part_of(columns: Mapping[str, Any], name: str, first: int, last: int) -> Ints:
    """Rows `first .. last - 1` of a column, of which no more is unpacked."""
    if isinstance(columns, PackedColumns):
        return columns.part(name, first, last)
    column: Ints = columns[name][first:last]
    return column


class _Piece(NamedTuple):
    """Consecutive rows of one column."""

    rows: int
    low: int
    """The smallest value; `narrow` holds the distances from it."""
    narrow: NDArray[Any] | None
    """None if all values are `low`; empty if the values are in the file."""
    place: int
    """Offset in the file; -1 in memory."""


_ROUGH = 1 << 20
"""Entries that may wait to be sorted; as many as are sorted may wait in any case."""


class Tally(Mapping[int, int]):
    """Number → how often it occurred. Use it as a mapping for few numbers, `arrays` for many."""

    def __init__(self, *known: tuple[Ints, Ints]) -> None:
        """`known`: at most one pair (numbers, times) of another tally."""
        self._pieces = list(known)
        """Such pairs, as they were added; the first one is sorted, each number once."""

    def add(self, numbers: Any, times: Any) -> None:
        """Count each of these 64-bit integers as often as the other buffer says."""
        import numpy as np

        counts = np.frombuffer(times, np.int64)
        narrow = counts.astype(np.min_scalar_type(counts.max(initial=0)))
        self._pieces.append((np.frombuffer(numbers, np.int64), narrow))
        known, *waiting = [len(piece[0]) for piece in self._pieces]
        if not waiting or sum(waiting) > max(_ROUGH, known):
            self._merge()

    def arrays(self) -> tuple[Ints, Ints]:
        """The numbers, ascending, and how often each occurred; int64."""
        if len(self._pieces) != 1:
            self._merge()
        return self._pieces[0]

    def __getitem__(self, number: int) -> int:
        numbers, times = self.arrays()
        place = int(numbers.searchsorted(number))
        if numbers[place : place + 1].tolist() != [number]:
            raise KeyError(number)
        return int(times[place])

    def __iter__(self) -> Iterator[int]:
        return iter(self.arrays()[0].tolist())

    def __len__(self) -> int:
        return len(self.arrays()[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return Tally, (self.arrays(),)

    def _merge(self) -> None:
        import numpy as np

        nothing = np.empty(0, np.int64), np.empty(0, np.uint8)
        numbers, times = map(np.concatenate, zip(nothing, *self._pieces, strict=True))
        self._pieces = []
        order = np.argsort(numbers, kind="stable")
        numbers, times = numbers[order], times[order].astype(np.int64)
        del order
        # Where the sorted numbers change; cut to their length, as there may be none.
        first = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]])[: len(times)])
        self._pieces = [(numbers[first], np.add.reduceat(times, first) if len(first) else times)]
