"""What `compare` sets side by side, engines or fleets: how they run, and are explained and
written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.cli.console import command_line
from kvsim.cli.progress import progress_bar

if TYPE_CHECKING:
    from kvsim.certainty.comparison import Comparison
    from kvsim.fleet.contender import Contender
    from kvsim.fleet.folder import FleetRun
    from kvsim.report.explanation import Explanation, Run
    from kvsim.result import Result
    from kvsim.workload.trace import Trace


class Way(NamedTuple):
    """What is done with results of one kind; each has a `summary` and `requests`."""

    simulate: Callable[..., Any]
    """Runs a trace with settings."""
    once: Callable[..., Any]
    """The same with a progress bar, which gets a name."""
    explain: Callable[[tuple[str, Any], tuple[str, Any]], Explanation]
    """Says why a named result differs from another one."""
    page: Callable[[Sequence[tuple[str, Any]], Comparison | None], str]
    """Makes the page of named results."""
    write: Callable[[Any, Path], None]
    """Writes a result into a folder."""


def of_engines() -> Way:
    """One engine each."""
    from kvsim.cli.commands import simulate_shown
    from kvsim.pages.compare import build_comparison
    from kvsim.report.explanation import explain
    from kvsim.report.files import write_results
    from kvsim.run import simulate

    def run_of(named: tuple[str, Result]) -> Run:
        name, result = named
        return name, result.summary, result.requests, result.steps

    def write(result: Result, folder: Path) -> None:
        tables = result.summary, result.requests, result.steps
        write_results(folder, *tables, transitions=result.transitions)

    return Way(
        simulate,
        simulate_shown,
        lambda first, other: explain(run_of(first), run_of(other)),
        lambda results, comparison: build_comparison(list(map(run_of, results)), comparison),
        write,
    )


def of_fleets() -> Way:
    """Several replicas each, behind a router."""
    from kvsim.fleet.contender import simulate_contender
    from kvsim.fleet.difference import explain_fleets
    from kvsim.fleet.folder import write_fleet
    from kvsim.pages.fleet import build_fleet
    from kvsim.pages.fleet_compare import build_fleet_comparison
    from kvsim.report.files import write_results

    def once(trace: Trace, fleet: Contender, name: str) -> FleetRun:
        total = min(len(trace.rows), fleet.num_prompts or len(trace.rows))
        with progress_bar(total, name) as progress:
            return simulate_contender(trace, fleet, progress=progress, command=command_line())

    def write_replica(run: FleetRun, number: int, folder: str) -> None:
        replica = run.replicas[number]
        write_results(folder, *replica[:3], transitions=replica.transitions)

    def write(run: FleetRun, folder: Path) -> None:
        write_fleet(folder, run, partial(write_replica, run), build_fleet(run))

    return Way(simulate_contender, once, explain_fleets, build_fleet_comparison, write)
