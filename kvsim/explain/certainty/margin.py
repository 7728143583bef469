"""Which differences matter: the one rule for every verdict between two runs."""

MARGIN = 0.01
"""Share of a value up to which a difference from it is called no difference."""


def matters(difference: float, first: float) -> bool:
    """Whether a difference from the value `first` is called one."""
    return abs(difference) > MARGIN * abs(first)
