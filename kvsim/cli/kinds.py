"""The two kinds of runs, one engine or a fleet: how each is simulated, read, explained, drawn and
written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvsim.explain.certainty import Comparison
    from kvsim.fleet import FleetRun
    from kvsim.fleet.folder import Replica
    from kvsim.report import Explanation, Run
    from kvsim.report.files import Results
    from kvsim.results.blockmap import BlockMap
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


def write_run(
    run: Result | Replica,
    out: str | Path,
    block_map: BlockMap | None = None,
    *,
    csv: bool = False,
    page: bool = False,
) -> None:
    """Write the folder of one engine."""
    from kvsim.report import write_results

    html, tables = None, (run.summary, run.requests, run.steps)
    if page:
        from kvsim.report.pages.run import build_page

        html = build_page(*tables, block_map)
    further: dict[str, Any] = {"transitions": run.transitions, "block_map": block_map}
    write_results(out, *tables, csv=csv, page=html, **further)


def write_replicas(
    run: FleetRun, out: str | Path, *, csv: bool = False, page: bool = True, pages: bool = False
) -> None:
    """Write the folder of each replica, with its page if `pages`, then what they have in common."""
    from kvsim.fleet import build_fleet
    from kvsim.fleet.folder import write_fleet

    def write(number: int, folder: str) -> None:
        write_run(run.replicas[number], folder, csv=csv, page=pages)

    write_fleet(out, run, write, build_fleet(run) if page else None)


def of_engines() -> Kind:
    """One engine each."""
    from kvsim.report import explain, read_results
    from kvsim.run.simulation import simulate

    def tables(named: tuple[str, Result | Results]) -> Run:
        name, run = named
        return name, run.summary, run.requests, run.steps

    def diff_page(first: Named, other: Named) -> str:
        from kvsim.report.pages.compare import build_diff

        return build_diff(tables(first), tables(other))

    def comparison_page(runs: Sequence[Named], comparison: Comparison | None) -> str:
        from kvsim.report.pages.compare import build_comparison

        return build_comparison(list(map(tables, runs)), comparison)

    return Kind(
        simulate,
        read_results,
        write_run,
        lambda first, other: explain(tables(first), tables(other)),
        diff_page,
        comparison_page,
    )


def of_fleets() -> Kind:
    """Several replicas each, behind a router."""
    from kvsim.fleet import explain_fleets, read_fleet, simulate_contender
    from kvsim.fleet.page import build_fleet_comparison, build_fleet_diff

    return Kind(
        simulate_contender,
        read_fleet,
        write_replicas,
        explain_fleets,
        build_fleet_diff,
        build_fleet_comparison,
    )
