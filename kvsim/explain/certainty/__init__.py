"""How sure a difference is: estimates with their error, intervals, and when to stop sampling.

The package takes figures as arrays and returns which of them differ. It does not import the
simulator.
"""

from __future__ import annotations

MARGIN = 0.01
"""Share of a value up to which a difference from it is called no difference."""


def matters(difference: float, first: float) -> bool:
    """Whether a difference from the value `first` is called one."""
    return abs(difference) > MARGIN * abs(first)
