"""Counts how often each of many numbers occurred, in little memory.

```
add ──► two lists ──► arrays, as they came ──► sorted, each number once
            every `_PIECE` entries    whenever they outgrow what is sorted already
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_PIECE = 1 << 16
_ROUGH = 1 << 20
"""Entries that may wait to be sorted; as many as are sorted may wait in any case."""


class Tally(Mapping[int, int]):
    """Number → how often it occurred. Use it as a mapping for few numbers, `arrays` for many."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._times: list[int] = []
        self._pieces: list[tuple[Ints, Ints]] = []
        """Pairs (numbers, times); the first piece is sorted."""
        self._table: dict[int, int] | None = None

    def add(self, number: int, times: int = 1) -> None:
        """Count a number `times` times."""
        self._numbers.append(number)
        self._times.append(times)
        if len(self._times) >= _PIECE:
            self._pack()

    def add_vectors(self, numbers: Any, times: Any) -> None:
        """Count each of these 64-bit integers as often as the other buffer says."""
        import numpy as np

        self._pack()
        counts = np.frombuffer(times, np.int64)
        narrow = counts.astype(np.min_scalar_type(counts.max(initial=0)))
        self._pieces.append((np.frombuffer(numbers, np.int64), narrow))
        self._table = None
        if sum(len(piece[1]) for piece in self._pieces[1:]) > max(_ROUGH, len(self._pieces[0][0])):
            self._merge()

    def arrays(self) -> tuple[Ints, Ints]:
        """The numbers, ascending, and how often each occurred; int64."""
        self._pack()
        if len(self._pieces) > 1:
            self._merge()
        return self._pieces[0]

    def __getitem__(self, number: int) -> int:
        return self._as_dict()[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._as_dict())

    def __len__(self) -> int:
        return len(self.arrays()[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, self.arrays()

    def _as_dict(self) -> dict[int, int]:
        numbers, times = self.arrays()
        if self._table is None:
            self._table = dict(zip(numbers.tolist(), times.tolist(), strict=True))
        return self._table

    def _pack(self) -> None:
        import numpy as np

        if self._times or not self._pieces:
            times = np.array(self._times, np.int64)
            narrow = times.astype(np.min_scalar_type(times.max(initial=0)))
            self._pieces.append((np.array(self._numbers, np.int64), narrow))
            self._numbers, self._times, self._table = [], [], None
            waiting = sum(len(times) for _, times in self._pieces[1:])
            if len(self._pieces) == 1 or waiting > max(_ROUGH, len(self._pieces[0][0])):
                self._merge()

    def _merge(self) -> None:
        import numpy as np

        numbers, times = map(np.concatenate, zip(*self._pieces, strict=True))
        self._pieces = []
        order = np.argsort(numbers, kind="stable")
        numbers, times = numbers[order], times[order].astype(np.int64)
        del order
        first = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]])[: len(times)])
        self._pieces = [(numbers[first], np.add.reduceat(times, first) if len(first) else times)]


def _restored(numbers: Ints, times: Ints) -> Tally:
    tally = Tally()
    tally._pieces = [(numbers, times)]
    return tally
