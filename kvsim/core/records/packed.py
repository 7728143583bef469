"""Columns of integers in little memory: narrow pieces, in a file beyond a certain length.

```
rows ──add──► piece: each column apart, in the narrowest integers that hold it
                │ beyond `most` rows
                ▼
              a temporary file without a name, gone with the process
```
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import OutputError

Ints = NDArray[np.int64]


class PackedColumns(Mapping[str, Ints]):
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
