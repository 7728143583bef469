"""The two kinds of runs, one engine or a fleet: how each is simulated, read, explained, drawn and
written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvsim.explain.certainty.verdicts import Comparison
    from kvsim.fleet.folder import FleetRun
    from kvsim.report.explanation import Explanation, Run
    from kvsim.report.files import Results
    from kvsim.run.result import Result

Named = tuple[str, Any]
"""A run and its name."""


class Kind(NamedTuple):
    """What is done with runs of one kind; each run has a `summary` and `requests`."""

    simulate: Callable[..., Any]
    """Runs a trace with settings."""
    read: Callable[[str], Any]
    """Reads a run from its folder."""
    write: Callable[[Any, Path], None]
    """Writes a run into a folder."""
    explain: Callable[[Named, Named], Explanation]
    """Says why the second run differs from the first."""
    diff_page: Callable[[Named, Named], str]
    """Makes the page of that."""
    comparison_page: Callable[[Sequence[Named], Comparison | None], str]
    """Makes the page of several runs."""


def of_engines() -> Kind:
    """One engine each."""
    from kvsim.report.explanation import explain
    from kvsim.report.files import read_results, write_results
    from kvsim.run.simulation import simulate

    def tables(named: tuple[str, Result | Results]) -> Run:
        name, run = named
        return name, run.summary, run.requests, run.steps

    def write(result: Result, folder: Path) -> None:
        write_results(folder, *tables(("", result))[1:], transitions=result.transitions)

    def diff_page(first: Named, other: Named) -> str:
        from kvsim.report.pages.diff import build_diff

        return build_diff(tables(first), tables(other))

    def comparison_page(runs: Sequence[Named], comparison: Comparison | None) -> str:
        from kvsim.report.pages.compare import build_comparison

        return build_comparison(list(map(tables, runs)), comparison)

    return Kind(
        simulate,
        read_results,
        write,
        lambda first, other: explain(tables(first), tables(other)),
        diff_page,
        comparison_page,
    )


def of_fleets() -> Kind:
    """Several replicas each, behind a router."""
    from kvsim.fleet.contender import simulate_contender
    from kvsim.fleet.difference import explain_fleets
    from kvsim.fleet.folder import read_fleet, write_fleet
    from kvsim.fleet.page import build_fleet, build_fleet_comparison, build_fleet_diff
    from kvsim.report.files import write_results

    def write(run: FleetRun, folder: Path) -> None:
        def write_replica(number: int, inside: str) -> None:
            *tables, transitions = run.replicas[number]
            write_results(inside, *tables, transitions=transitions)

        write_fleet(folder, run, write_replica, build_fleet(run))

    return Kind(
        simulate_contender,
        read_fleet,
        write,
        explain_fleets,
        build_fleet_diff,
        build_fleet_comparison,
    )
