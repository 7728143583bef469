"""The log of changes in a request's standing: preempted, swapped, loaded, admitted again.

A request that is never preempted needs an entry only if its first step begins later than it was
composed. So the log grows with preemptions and hardly with steps.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from kvsim.core.schema import KINDS, TRANSITIONS, Source

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

pack = Struct(f"{len(TRANSITION_COLUMNS)}q").pack


class Transitions:
    """The log of one run, in the order in which steps were composed."""

    def __init__(self) -> None:
        self.rows = bytearray()
        """The entries, each packed by `pack` from the values of `TRANSITION_COLUMNS`."""

    def columns(self) -> dict[str, np.ndarray]:
        """Each column as an int64 array."""
        import numpy as np

        rows = np.frombuffer(self.rows, np.int64).reshape(-1, len(TRANSITION_COLUMNS))
        return {name: rows[:, i].copy() for i, name in enumerate(TRANSITION_COLUMNS)}
