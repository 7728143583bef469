"""Writes the comparison of runs of several replicas: routers, numbers of replicas, or settings."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.certainty.comparison import Comparison
from kvsim.fleet.difference import NamedFleet, explain_fleets
from kvsim.pages.compare import comparison_page
from kvsim.pages.html import join, panel, table
from kvsim.report.routing import (
    HITS_HEAD,
    LEG_HEAD,
    REGRET_HEAD,
    REPLICA_HEAD,
    hit_rows,
    leg_rows,
    named_rows,
    regret_rows,
)


def build_fleet_comparison(
    fleets: Sequence[NamedFleet], comparison: Comparison | None = None
) -> str:
    """The page of two fleets or more, all compared with the first; see `build_comparison`."""
    first, *others = fleets
    hits = zip(*(hit_rows(run.summary["routing"]) for _, run in fleets), strict=False)
    shares = ([rows[0][0], *(row[-1] for row in rows)] for rows in hits)
    parts = [panel("Of the prompt tokens", table([HITS_HEAD[0], *(n for n, _ in fleets)], shares))]
    for name, run in fleets:
        regret = table(REGRET_HEAD, regret_rows(run.summary["routing"]))
        parts.append(panel(f"{name}: why the best replica was not chosen", regret))
    for name, run in fleets:
        rows = named_rows(run.summary)
        parts.append(panel(f"{name}: replicas", table(["replica", *REPLICA_HEAD], rows)))
    for name, run in fleets:
        if legs := leg_rows(run.summary):
            parts.append(panel(f"{name}: legs of a request", table(LEG_HEAD, legs)))
    return comparison_page(
        [(name, run.summary, run.requests) for name, run in fleets],
        [explain_fleets(first, other) for other in others],
        comparison,
        {"Decisions and replicas": (join(parts), ())},
    )
