"""Divides the time of a pipeline, whose steps overlap, among them.

```
step 0   ├────────────────┤
step 1         ├────────────────────┤
step 2                   ├────────────────────┤
slices   │  0  │    0    │ │   1     │    2     │
```
Whenever a step begins or ends, another slice of time begins. A slice belongs to the step that has
been under way for longest, and gives it a part of each of its kinds of time, in proportion. What
rounding leaves is host time. Those who wait, wait for the reason of the step that began last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.results.ledger.time import StepTimes

Ints = NDArray[np.int64]


class Slices(NamedTuple):
    """Slices of time between the first step and the end of a run, without a gap."""

    times: StepTimes
    step: Ints
    """The step to which each belongs, in order; where none is under way, the next one."""
    share: NDArray[np.float64]
    """The part of that step's time, from 0 to 1."""

    def within(self, first: int, last: int) -> tuple[int, int]:
        """The slices `low .. high - 1` that belong to the steps `first .. last - 1`."""
        low, high = np.searchsorted(self.step, (first, last))
        return int(low), int(high)

    def of(self, table: Ints, first: int, low: int, high: int) -> Ints:
        """The kinds of time of the slices `low .. high - 1`, from those of the steps from `first`
        on."""
        whole, share = table[self.step[low:high] - first], self.share[low:high, None]
        part = np.floor(whole * share).astype(np.int64) - 1  # A product may be rounded up.
        cut: Ints = np.where(share < 1, np.maximum(part, 0), whole)
        return cut


def slices(times: StepTimes, ends: Ints, run_end_ns: int) -> Slices:
    """The slices of a run whose steps start at `times.starts` and end at `ends`, both in order."""
    starts = times.starts
    instants = np.unique(np.concatenate((starts, ends, [run_end_ns])))
    begin, until = instants[:-1], instants[1:]
    last = len(starts) - 1
    oldest = np.minimum(np.searchsorted(ends, begin, side="right"), last)
    newest = np.searchsorted(starts, begin, side="right") - 1
    under_way = (starts[oldest] <= begin) & (begin < ends[oldest])
    length = np.where(under_way, until - begin, 0)
    share = length / np.maximum(ends[oldest] - starts[oldest], 1)
    return Slices(StepTimes(begin, until, times.why[newest]), oldest, share)
