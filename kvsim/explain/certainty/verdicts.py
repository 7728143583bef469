"""Judges many differences at once, so that all verdicts hold together.

Holm's procedure: the surest difference is judged at the level divided by the number of differences,
the next at the level divided by one less, and so on. After the first difference that fails its
test, all others count as failed. The chance that even one verdict of `significant` is wrong is at
most the level (S. Holm, Scandinavian Journal of Statistics, 1979).

A difference that is too small to matter is none, however sure it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvsim.explain.certainty.estimates import Estimate

Finding = Literal["same", "significant", "equal", "insignificant"]


class Verdict(NamedTuple):
    """One difference and its verdict."""

    finding: Finding
    """`same`: equal in every pair; `equal`: any difference is within the margin; `significant`: the
    sample shows a difference and its sign, and it is beyond the margin; `insignificant`: the sample
    says neither."""
    difference: float
    low: float
    """Lower end of the interval, at the level at which this difference was judged; `high` is the
    upper end."""
    high: float
    p: float
    level: float

    @property
    def settled(self) -> bool:
        """Whether more seeds would leave the verdict as it is."""
        return self.finding != "insignificant"


def judge(estimates: Sequence[Estimate], margins: Sequence[float], level: float) -> list[Verdict]:
    """A verdict for each estimate; `margins` are differences too small to matter, one each."""
    p = [estimate.p for estimate in estimates]
    order = sorted(range(len(p)), key=p.__getitem__)
    levels: dict[int, float] = {}
    share = level
    for rank, i in enumerate(order):
        share = level / (len(p) - rank)
        if p[i] > share:
            break
        levels[i] = share
    return [
        _verdict(estimate, margin, levels.get(i), share)
        for i, (estimate, margin) in enumerate(zip(estimates, margins, strict=True))
    ]


def _verdict(
    estimate: Estimate, margin: float, significant_at: float | None, share: float
) -> Verdict:
    level = share if significant_at is None else significant_at
    low, high = estimate.interval(level)
    finding: Finding = "insignificant"
    if -margin <= low and high <= margin:
        finding = "same" if low == high == 0 else "equal"
    elif significant_at is not None and abs(estimate.difference) > margin:
        finding = "significant"
    return Verdict(finding, estimate.difference, low, high, estimate.p, level)
