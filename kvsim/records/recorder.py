"""Records each step of a run as packed integers.

One row per step, written once by the replica; its columns are declared in `kvsim.schema`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvsim import limits
from kvsim.schema import STEP_COLUMNS

if TYPE_CHECKING:
    import numpy as np

PIECE_STEPS = 1 << 15
"""Number of rows packed together."""


class Recorder:
    """Keeps the rows of one run, packed (`kvsim.records.packed`)."""

    def __init__(self, block_size: int = 1, gauged: tuple[str, ...] = ()) -> None:
        """`block_size`: tokens per block, for `decodes`. `gauged`: columns that follow those of
        every engine."""
        from kvsim.records.packed import PackedColumns

        self._block_size = block_size
        self._columns = PackedColumns(STEP_COLUMNS + gauged)
        self._number = 0
        self._full = PIECE_STEPS
        """Number of steps at which the next piece is packed."""
        self._rows = bytearray()
        """Rows that are not packed yet, in the form that `unfold` takes."""
        self._steps: list[int] = []
        self._ends_ns: list[int] = []
        self._opened: list[int] = []
        self._evicted: dict[int, Sequence[int]] = {}
        self._lasts: dict[int, Sequence[int]] = {}

    def packed(self, row: bytes) -> None:
        """Append one step, given as `kvsim.schema.step_row` returns it."""
        self._rows += row
        self._steps.append(0)
        self._number += 1
        if self._number >= self._full:
            self._seal()

    def decodes(
        self,
        row: bytes,
        ends_ns: Sequence[int],
        opened: Sequence[int],
        evicted: Sequence[int] = (),
        lasts: Sequence[int] = (),
    ) -> None:
        """Append consecutive decode steps of the same sequences, given by one row.

        `ends_ns`: when each of them ends. `opened`: how many blocks each of them takes from the
        free ones. `row` describes the first step, with three exceptions: its counts of blocks and
        empty slots are those before the step; requests that have `finished` do so with the last
        step; its `end_ns` is not read. `evicted`: how many blocks with content are lost up to each
        step; empty: those that are taken once no blank one is left. `lasts`: the values of the last
        column in the first of these steps; the others have that of `row`.
        """
        if evicted:
            self._evicted[len(self._ends_ns)] = evicted
        if lasts:
            self._lasts[len(self._ends_ns)] = lasts
        self._ends_ns += ends_ns
        self._opened += opened
        self._rows += row
        self._steps.append(len(ends_ns))
        self._number += len(ends_ns)
        if self._number >= self._full:
            self._seal()

    def __len__(self) -> int:
        return self._number

    def columns(self) -> Mapping[str, np.ndarray]:
        """Each column as an int64 array of one entry per step; a long run unpacks it at access."""
        if self._steps:
            self._seal()
        columns = self._columns
        return columns if columns.rows > PIECE_STEPS else dict(columns)

    def _seal(self) -> None:
        import numpy as np

        limits.check_size("steps", self._number, limits.STEPS)
        rows = np.frombuffer(self._rows, np.int64).reshape(-1, len(self._columns))
        folded = Folded(self._steps, self._ends_ns, self._opened, self._evicted, self._lasts)
        self._columns.add(unfold(rows, folded, self._block_size).T)
        self._rows, self._steps, self._ends_ns, self._opened = bytearray(), [], [], []
        self._evicted, self._lasts = {}, {}
        self._full = self._number + PIECE_STEPS


class Folded(NamedTuple):
    """What rows that stand for several decode steps do not say (`Recorder.decodes`)."""

    steps: list[int]
    """For each row, the number of decode steps that it stands for; 0 for the row of a single step,
    which stays as it is."""
    ends_ns: list[int]
    """When each of these decode steps ends."""
    opened: list[int]
    """Number of blocks that each takes."""
    evicted: Mapping[int, Sequence[int]]
    """Place in `ends_ns` → what `Recorder.decodes` was given for the steps from there on."""
    lasts: Mapping[int, Sequence[int]]
    """The same."""


def unfold(rows: np.ndarray, rest: Folded, block_size: int) -> np.ndarray:
    """Write out the rows that stand for several decode steps.

    `rows` has the shape (rows, columns), the result (columns, steps).
    """
    import numpy as np

    steps, ends_ns, opened, evicted, lasts = rest
    number = np.array(steps)
    columns = np.repeat(np.ascontiguousarray(rows.T), np.maximum(number, 1), axis=1)
    if not ends_ns:
        return columns
    column = dict(zip(STEP_COLUMNS, columns, strict=False))
    folded = np.repeat(number > 0, np.maximum(number, 1))
    number = number[number > 0]
    first = np.cumsum(number) - number
    place = np.arange(len(ends_ns)) - np.repeat(first, number)
    end_ns, blocks = np.array(ends_ns), np.cumsum(opened)
    blocks -= np.repeat(blocks[first] - np.array(opened)[first], number)
    start_ns = np.concatenate([end_ns[:1], end_ns[:-1]])
    start_ns[first] = column["start_ns"][folded][first]
    tokens = column["decode_seqs"][folded]
    blank = column["free_blocks"][folded]
    column["start_ns"][folded] = start_ns
    column["end_ns"][folded] = end_ns
    column["context_tokens"][folded] += place * tokens
    lost = np.maximum(blocks - blank, 0)
    for at, known in evicted.items():
        lost[at : at + len(known)] = known
    column["used_blocks"][folded] += blocks
    column["free_blocks"][folded] -= blocks - lost
    column["cached_blocks"][folded] -= lost
    column["empty_slots"][folded] += block_size * blocks - (place + 1) * tokens
    column["finished"][folded] *= place == np.repeat(number, number) - 1
    rows_folded = np.flatnonzero(folded)
    for at, values in lasts.items():
        columns[-1][rows_folded[at : at + len(values)]] = values
    return columns
