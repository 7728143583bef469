"""The log of speculative decoding: what each step verified, and how long drafting took."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvsim.core.schema import STEPS, Source

if TYPE_CHECKING:
    import numpy as np

DRAFT_COLUMNS = STEPS.names(Source.DRAFTS)


class DraftLog:
    """The log of one run, in the order in which steps ended."""

    def __init__(self) -> None:
        self._rows = array("q")
        """The entries: the end of the step, the time of the drafter, and `DRAFT_COLUMNS`."""
        self._sequences = self._drafts = self._accepted = 0

    def verified(self, drafts: int, accepted: int) -> None:
        """Of `drafts` drafts of a sequence, `accepted` were accepted."""
        self._sequences += 1
        self._drafts += drafts
        self._accepted += accepted

    def end_step(self, end_ns: int, drafter_ns: int) -> None:
        """A step is over whose end the drafter delayed by `drafter_ns`."""
        if self._sequences or drafter_ns:
            self._rows.extend((end_ns, drafter_ns, self._sequences, self._drafts, self._accepted))
            self._sequences = self._drafts = self._accepted = 0

    def added_to(self, steps: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Columns of steps with `drafter_ns` and `DRAFT_COLUMNS`; packed ones are widened in
        place."""
        import numpy as np

        from kvsim.core.records.packed import PackedColumns

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
