"""Two logs: of changes in a request's standing (preempted, swapped, loaded, admitted again), and of
speculative decoding.

A request that is never preempted needs an entry only if its first step begins later than it was
composed. So the log grows with preemptions and hardly with steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvsim.core.schema import KINDS, STEPS, TRANSITIONS, Source

if TYPE_CHECKING:
    import numpy as np

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
