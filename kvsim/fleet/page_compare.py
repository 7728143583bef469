"""Writes the comparison of runs of several replicas: routers, numbers of replicas, or settings."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.explain.certainty.verdicts import Comparison
from kvsim.fleet.difference import NamedFleet, explain_fleets
from kvsim.report.pages.compare import comparison_page
from kvsim.report.pages.html import join, panel, table
from kvsim.report.routing import HITS, REGRETS, REPLICAS, TRIP, routing_tables


def build_fleet_comparison(
    fleets: Sequence[NamedFleet], comparison: Comparison | None = None
) -> str:
    """The page of two fleets or more, all compared with the first; see `build_comparison`."""
    first, *others = fleets
    tables = [(name, routing_tables(run.summary)) for name, run in fleets]
    parts = []
    if hits := [each[HITS][1] for _, each in tables if HITS in each]:
        shares = ([rows[0][0], *(row[-1] for row in rows)] for rows in zip(*hits, strict=False))
        head = ["prompt tokens", *(name for name, each in tables if HITS in each)]
        parts.append(panel("Of the prompt tokens", table(head, shares)))
    parts += [
        panel(f"{name}: {title}", table(*each[title]))
        for title in (REGRETS, REPLICAS, TRIP)
        for name, each in tables
        if title in each
    ]
    return comparison_page(
        [(name, run.summary, run.requests) for name, run in fleets],
        [explain_fleets(first, other) for other in others],
        comparison,
        {"Decisions and replicas": join(parts)},
    )
