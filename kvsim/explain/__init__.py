"""Why a run is as it is: stories of requests, differences between runs, caches, and certainty.

In go the tables and figures of one run, or of two. Out come parts that add up to what they
explain, or sentences; `kvsim.report` lays them out and draws them.
"""

MARGIN = 0.01
"""Share of a value up to which a difference from it is called no difference."""


def matters(difference: float, first: float) -> bool:
    """Whether a difference from the value `first` is called one."""
    return abs(difference) > MARGIN * abs(first)
