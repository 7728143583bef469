"""`run`, `report` and `policies`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvsim.cli.bundles import takes_bundles
from kvsim.cli.console import command_line, make_console, note, tell_written
from kvsim.cli.fleet import FleetOptions, only, refuse_watching
from kvsim.cli.options import AsJson, ConfigFile, OutDir, RunDir, TraceForm, TracePath
from kvsim.cli.progress import progress_bar
from kvsim.cli.server import ServerOptions, SettingOptions
from kvsim.collector import collect_after
from kvsim.config import RunConfig
from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from kvsim.blockmap.watch import BlockMapWatcher
    from kvsim.engine.loop import Watcher
    from kvsim.result import Result
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
    word = server.word()
    fleets, configs = fleet.load(config, settings, word)
    loaded = configs[0]
    if fleets:
        refuse_watching(block_map, step_log)
        write = partial(_write, watcher=None, csv=csv, page=page)
        requests = form.requests(trace, loaded)
        only(fleets).run(requests, configs, out, write, page=page, as_json=as_json)
        return
    watcher = None
    if block_map:
        from kvsim.blockmap.watch import BlockMapWatcher

        if out is None:
            raise ConfigError("--block-map: needs --out DIR, the folder for the map")
        watcher = BlockMapWatcher()
    # No name for the trace here, so that its memory is free when the run is over.
    result = simulate_shown(form.requests(trace, loaded), loaded, "simulating", step_log, watcher)
    collect_after(result.meta["trace"]["requests"])
    if word.sources:
        result.meta["server"] = dict(word.sources)
    note(*result.meta["notes"])
    if out is not None:
        _write(result, out, watcher=watcher, csv=csv, page=page)
    if as_json:
        print(json.dumps(result.summary, indent=1))
        return
    from kvsim.report.terminal import render

    render(result.summary, make_console())
    if out is not None:
        tell_written(out, "report.html" if page else "summary.json")


def report(directory: RunDir) -> None:
    """Rebuild report.html from the results in a folder."""
    from kvsim.pages.run import build_page
    from kvsim.report.files import PAGE, is_fleet, read_block_map, read_results
    from kvsim.writing import write_text

    if is_fleet(directory):
        from kvsim.fleet.folder import read_fleet
        from kvsim.pages.fleet import build_fleet

        print(write_text(Path(directory) / PAGE, build_fleet(read_fleet(directory))))
        return
    summary, requests, steps = read_results(directory)
    block_map = read_block_map(directory, summary)
    print(write_text(Path(directory) / PAGE, build_page(summary, requests, steps, block_map)))


def policies() -> None:
    """List every engine, block manager and cost model, with its parameters."""
    from kvsim.cli.catalogue import catalogue

    console = make_console()
    for table in catalogue():
        console.print(table)


def simulate_shown(
    trace: Trace,
    config: RunConfig,
    label: str,
    step_log: str | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """The result of a run, with a progress bar if the run is long enough for one."""
    from kvsim.run import simulate

    total = min(len(trace.rows), config.num_prompts or len(trace.rows))
    command = command_line()
    with progress_bar(total, label) as progress:
        if step_log is None:
            return simulate(trace, config, progress=progress, watcher=watcher, command=command)
        from kvsim.conform.step_log import StepLog
        from kvsim.watchers import Watchers

        with StepLog(step_log) as log:
            both = Watchers([log, watcher] if watcher else [log])
            result = simulate(trace, config, progress=progress, watcher=both, command=command)
            log.stopped(result.meta["outcome"])
            return result


def _write(
    result: Result, out: str, *, watcher: BlockMapWatcher | None, csv: bool, page: bool
) -> None:
    from kvsim.report.files import write_results

    block_map = html = None
    if watcher is not None:
        block_map = watcher.block_map()
        result.meta["block_map"] = {"samples": len(block_map.time_ns)}
    if page:
        from kvsim.pages.run import build_page

        html = build_page(result.summary, result.requests, result.steps, block_map)
    write_results(
        out,
        result.summary,
        result.requests,
        result.steps,
        transitions=result.transitions,
        block_map=block_map,
        csv=csv,
        page=html,
    )
