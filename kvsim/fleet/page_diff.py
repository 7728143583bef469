"""Writes why two runs of several replicas differ."""

from __future__ import annotations

from kvsim.fleet.difference import (
    REPLICA_DIFF_HEAD,
    NamedFleet,
    explain_fleets,
    replica_differences,
)
from kvsim.report.pages.diff import diff_page
from kvsim.report.pages.html import join, panel, table
from kvsim.report.routing import HITS, REGRETS, routing_tables


def build_fleet_diff(first: NamedFleet, other: NamedFleet) -> str:
    """The page that says why the second run differs from the first."""
    rows = replica_differences(first[1], other[1])
    routing = (
        panel(f"{name}: {title}", table(*tables[title]))
        for title in (REGRETS, HITS)
        for name, run in (first, other)
        if title in (tables := routing_tables(run.summary))
    )
    return diff_page(
        explain_fleets(first, other),
        [(name, run.summary) for name, run in (first, other)],
        {"Replicas": panel(None, table(REPLICA_DIFF_HEAD, rows)), "Decisions": join(routing)},
    )
