"""`run`, `report` and `policies`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvsim.cli.console import note, simulate_shown, tell_written
from kvsim.cli.fleet import Fleet, FleetOptions, only
from kvsim.cli.kinds import write_replicas, write_run
from kvsim.cli.options import (
    AsJson,
    ConfigFile,
    OutDir,
    RunDir,
    TraceForm,
    TracePath,
    takes_bundles,
)
from kvsim.cli.server import ServerOptions, SettingOptions
from kvsim.core.collector import collect_after
from kvsim.errors import ConfigError
from kvsim.report.screen import make_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvsim.fleet.folder import FleetRun
    from kvsim.results.blockmap import BlockMapWatcher
    from kvsim.run.result import Result
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace


@takes_bundles
def run(
    *,
    trace: TracePath = None,
    config: ConfigFile = None,
    form: TraceForm,
    out: OutDir = None,
    csv: Annotated[bool, Option("--csv", help="Also write CSV tables.")] = False,
    page: Annotated[bool, Option("--report/--no-report", help="Write report.html.")] = True,
    step_log: Annotated[
        str | None, Option(metavar="FILE", help="Write every decision here.")
    ] = None,
    block_map: Annotated[
        bool, Option("--block-map", help="Also show which request held which block; takes longer.")
    ] = False,
    as_json: AsJson = False,
    fleet: FleetOptions,
    server: ServerOptions,
    settings: SettingOptions,
) -> None:
    """Replay a trace through an engine and see where memory and time went."""
    from kvsim.report.files import FLEET, PAGE, SUMMARY
    from kvsim.report.terminal import render, render_fleet

    word = server.word()
    fleets, configs = fleet.load(config, settings, word)
    result: FleetRun | Result
    # The trace has no name here, so that its memory is free when the run is over.
    if fleets:
        if block_map or step_log is not None:
            raise ConfigError(
                "--block-map and --step-log show one engine, of several; leave them out"
            )
        result = _run_fleet(form.requests(trace, configs[0]), configs, only(fleets))
        if out is not None:
            write_replicas(result, out, csv=csv, page=page, pages=page)
    else:
        watcher, seen = _block_map_watcher(out) if block_map else None, None
        result = _run_engine(form.requests(trace, configs[0]), configs[0], step_log, watcher)
        collect_after(result.meta["trace"]["requests"])
        if word.sources:
            result.meta["server"] = dict(word.sources)
        note(*result.meta["notes"])
        if watcher is not None:
            seen = watcher.block_map()
            result.meta["block_map"] = {"samples": len(seen.time_ns)}
        if out is not None:
            write_run(result, out, seen, csv=csv, page=page)
    if as_json:
        print(json.dumps(result.summary, indent=1))
        return
    (render_fleet if fleets else render)(result.summary, make_console())
    if out is not None:
        tell_written(out, PAGE if page else FLEET if fleets else SUMMARY)


def report(directory: RunDir) -> None:
    """Rebuild report.html from the results in a folder."""
    from kvsim.report.files import PAGE, is_fleet, read_block_map, read_results
    from kvsim.report.pages.run import build_page
    from kvsim.writing import write_text

    if is_fleet(directory):
        from kvsim.fleet.folder import read_fleet
        from kvsim.fleet.page import build_fleet

        print(write_text(Path(directory) / PAGE, build_fleet(read_fleet(directory))))
        return
    summary, requests, steps = read_results(directory)
    block_map = read_block_map(directory, summary)
    print(write_text(Path(directory) / PAGE, build_page(summary, requests, steps, block_map)))


def policies(as_json: AsJson = False) -> None:
    """List every engine, block manager and cost model, with its parameters."""
    from kvsim.cli.catalogue import catalogue

    if as_json:
        found = {}
        for table in catalogue():
            names, columns = zip(
                *((each.header, each.cells) for each in table.columns), strict=True
            )
            found[str(table.title)] = [
                dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)
            ]
        print(json.dumps(found, indent=1))
        return
    console = make_console()
    for table in catalogue():
        console.print(table)


def _block_map_watcher(out: str | None) -> BlockMapWatcher:
    from kvsim.results.blockmap import BlockMapWatcher

    if out is None:
        raise ConfigError("--block-map: needs --out DIR, the folder for the map")
    return BlockMapWatcher()


def _run_engine(
    trace: Trace, config: RunConfig, step_log: str | None, watcher: BlockMapWatcher | None
) -> Result:
    """Run one engine before the eyes of a watcher; its decisions are written to `step_log`."""
    from kvsim.run.simulation import simulate

    if step_log is None:
        return simulate_shown(simulate, trace, config, "simulating", watcher=watcher)
    from kvsim.against.conform.step_log import StepLog
    from kvsim.run.watchers import Watchers

    with StepLog(step_log) as log:
        both = Watchers([log, watcher] if watcher else [log])
        result = simulate_shown(simulate, trace, config, "simulating", watcher=both)
        log.stopped(result.meta["outcome"])
        return result


def _run_fleet(trace: Trace, configs: Sequence[RunConfig], fleet: Fleet) -> FleetRun:
    from kvsim.fleet.contender import contender, simulate_contender

    return simulate_shown(simulate_contender, trace, contender(configs, *fleet), "simulating")
