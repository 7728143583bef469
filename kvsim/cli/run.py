"""Replays a trace through one engine, or through several replicas behind a router."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typer import Option

from kvsim.cli.commands import note, simulate_shown, tell_written
from kvsim.cli.options import (
    AsJson,
    Bundle,
    ConfigFile,
    OutDir,
    TraceForm,
    TracePath,
    takes_bundles,
)
from kvsim.cli.settings import FleetOptions
from kvsim.core.collector import collect_after
from kvsim.errors import ConfigError
from kvsim.report import make_console

if TYPE_CHECKING:
    from kvsim.fleet import FleetRun
    from kvsim.results.blockmap import BlockMapWatcher
    from kvsim.run.result import Result
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace


class Further(Bundle):
    """What is noted and written besides tables and figures."""

    csv: bool = Option(False, "--csv", help="Also write CSV tables.")
    page: bool = Option(True, "--report/--no-report", help="Write report.html.")
    step_log: str | None = Option(None, metavar="FILE", help="Write every decision here.")
    block_map: bool = Option(
        False, "--block-map", help="Also show which request held which block; takes longer."
    )

    def check(self, routers: Sequence[object], out: str | None) -> None:
        """Raises `ConfigError` for what several replicas do not show, and what needs a folder."""
        if routers and (self.block_map or self.step_log is not None):
            raise ConfigError(
                "--block-map and --step-log show one engine, of several; leave them out"
            )
        if routers[1:]:
            raise ConfigError("--router: a run has one router; `kvsim compare` takes several")
        if self.block_map and out is None:
            raise ConfigError("--block-map: needs --out DIR, the folder for the map")


@takes_bundles
def run(
    *,
    trace: TracePath = None,
    config: ConfigFile = None,
    form: TraceForm,
    out: OutDir = None,
    further: Further,
    as_json: AsJson = False,
    fleet: FleetOptions,
) -> None:
    """Replay a trace through an engine and see where memory and time went."""
    # First, not from deep within other imports, where Python 3.11 may ask the kernel for the next
    # piece of its stack, and give it back, at every call.
    import numpy  # noqa: F401

    from kvsim.report import PAGE, render, render_fleet
    from kvsim.report.files import FLEET, SUMMARY
    from kvsim.results.blockmap import BlockMapWatcher

    fleets, configs = fleet.load(config)
    further.check(fleets, out)
    csv, page = further.csv, further.page
    result: FleetRun | Result
    # The trace has no name here, so that its memory is free when the run is over.
    if fleets:
        from kvsim.fleet import contender, simulate_contender

        several = contender(configs, *fleets[0])
        result = simulate_shown(
            simulate_contender, form.requests(trace, configs[0]), several, "simulating"
        )
        if out is not None:
            from kvsim.cli.folders import write_replicas

            write_replicas(result, out, csv=csv, page=page, pages=page)
    else:
        watcher = BlockMapWatcher() if further.block_map else None
        seen = None
        result = _run_engine(
            form.requests(trace, configs[0]), configs[0], further.step_log, watcher
        )
        collect_after(result.meta["trace"]["requests"])
        if sources := fleet.settings.word.sources:
            result.meta["server"] = dict(sources)
        note(*result.meta["notes"])
        if watcher is not None:
            seen = watcher.block_map()
            result.meta["block_map"] = {"samples": len(seen.time_ns)}
        if out is not None:
            from kvsim.cli.folders import write_run

            write_run(result, out, seen, csv=csv, page=page)
    if as_json:
        print(json.dumps(result.summary, indent=1))
        return
    (render_fleet if fleets else render)(result.summary, make_console())
    if out is not None:
        tell_written(out, PAGE if page else FLEET if fleets else SUMMARY)


def _run_engine(
    trace: Trace, config: RunConfig, step_log: str | None, watcher: BlockMapWatcher | None
) -> Result:
    """Run one engine before the eyes of a watcher; its decisions are written to `step_log`."""
    from kvsim.run.simulation import simulate

    if step_log is None:
        return simulate_shown(simulate, trace, config, "simulating", watcher=watcher)
    from kvsim.against.conform.step_log import open_step_log
    from kvsim.run.watchers import Watchers

    with open_step_log(step_log) as log:
        both = Watchers([log, watcher] if watcher else [log])
        result = simulate_shown(simulate, trace, config, "simulating", watcher=both)
        log.stopped(result.meta["outcome"])
        return result
