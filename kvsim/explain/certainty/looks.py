"""When to look at a growing sample, and how much of the chance of error each look may spend.

Looking again and again, and stopping at the first difference, finds differences that do not exist.
So the chance of error is divided among the looks beforehand. Each look before the last may spend a
small part, so that only clear results end a comparison early. The last look gets nearly all
(Haybittle 1971, Peto 1976). The parts are added up as if looks were independent, which errs on the
safe side.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

FEWEST = 4
"""Number of seeds before the first look, if at least that many are planned."""
EARLY_SHARE = 0.02
"""Part of the chance of error that each look before the last may spend."""
_SHARES = (0.5, 0.75, 1.0)


class Look(NamedTuple):
    """One time at which the sample is judged."""

    seeds: int
    """Seeds that have been run by then."""
    level: float
    """Chance of error that this look may spend."""


def plan_looks(seeds: int, level: float) -> list[Look]:
    """Looks at half, three quarters and all of the planned seeds; their levels add up to `level`.

    There is no look before `FEWEST` seeds, except a last one.
    """
    *early, last = sorted({min(seeds, max(FEWEST, ceil(share * seeds))) for share in _SHARES})
    spent = EARLY_SHARE * level
    return [*(Look(size, spent) for size in early), Look(last, level - spent * len(early))]
