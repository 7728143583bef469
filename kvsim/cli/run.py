"""The simulated engine at work: `run` replays a trace through one, or through several replicas;
`serve` is a server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvsim.cli.commands import command_line, note, simulate_shown, tell_written
from kvsim.cli.options import (
    AsJson,
    Bundle,
    ConfigFile,
    OutDir,
    TraceForm,
    TracePath,
    takes_bundles,
)
from kvsim.cli.settings import FleetOptions, Settings
from kvsim.core.collector import collect_after
from kvsim.errors import ConfigError
from kvsim.report import make_console

if TYPE_CHECKING:
    from kvsim.fleet import FleetRun
    from kvsim.results.blockmap import BlockMapWatcher
    from kvsim.run.result import Result
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace


@dataclass(frozen=True)
class Further(Bundle):
    """What is noted and written besides tables and figures."""

    csv: Annotated[bool, Option("--csv", help="Also write CSV tables.")] = False
    page: Annotated[bool, Option("--report/--no-report", help="Write report.html.")] = True
    step_log: Annotated[str | None, Option(metavar="FILE", help="Write every decision here.")] = (
        None
    )
    block_map: Annotated[
        bool, Option("--block-map", help="Also show which request held which block; takes longer.")
    ] = False


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
    from kvsim.report import PAGE, render, render_fleet
    from kvsim.report.files import FLEET, SUMMARY

    fleets, configs = fleet.load(config)
    csv, page, block_map = further.csv, further.page, further.block_map
    result: FleetRun | Result
    # The trace has no name here, so that its memory is free when the run is over.
    if fleets:
        if block_map or further.step_log is not None:
            raise ConfigError(
                "--block-map and --step-log show one engine, of several; leave them out"
            )
        from kvsim.fleet import contender, simulate_contender

        if fleets[1:]:
            raise ConfigError("--router: a run has one router; `kvsim compare` takes several")
        several = contender(configs, *fleets[0])
        result = simulate_shown(
            simulate_contender, form.requests(trace, configs[0]), several, "simulating"
        )
        if out is not None:
            from kvsim.cli.folders import write_replicas

            write_replicas(result, out, csv=csv, page=page, pages=page)
    else:
        watcher = seen = None
        if block_map:
            from kvsim.results.blockmap import BlockMapWatcher

            if out is None:
                raise ConfigError("--block-map: needs --out DIR, the folder for the map")
            watcher = BlockMapWatcher()
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
    from kvsim.against.conform.step_log import StepLog
    from kvsim.run.watchers import Watchers

    with StepLog(step_log) as log:
        both = Watchers([log, watcher] if watcher else [log])
        result = simulate_shown(simulate, trace, config, "simulating", watcher=both)
        log.stopped(result.meta["outcome"])
        return result


@dataclass(frozen=True)
class Front(Bundle):
    """Where the server is, and as what."""

    host: Annotated[
        str | None, Option(metavar="ADDRESS", help="Address to listen at. Default: 127.0.0.1.")
    ] = None
    port: Annotated[
        int | None,
        Option(min=0, max=65535, metavar="N", help="Port. Default: 8000; 0: any free one."),
    ] = None
    served_model_name: Annotated[
        str | None, Option(metavar="NAME", help="Name of the model, for clients.")
    ] = None


@dataclass(frozen=True)
class Pace(Bundle):
    """How simulated time passes."""

    speed: Annotated[
        float, Option(metavar="X", help="Simulated seconds in a second of the wall clock.")
    ] = 1.0
    as_fast_as_possible: Annotated[
        bool, Option("--as-fast-as-possible", help="Answer at once, with simulated times.")
    ] = False
    hold: Annotated[int, Option(min=0, metavar="N", help="Begin when N requests have come.")] = 0

    def check(self) -> None:
        """Raises `ConfigError` if no time could pass."""
        if not self.speed > 0:
            raise ConfigError(
                f"--speed: {self.speed} is not above 0; or give --as-fast-as-possible"
            )
        if self.hold and not self.as_fast_as_possible:
            raise ConfigError("--hold: the wall clock waits for nobody; give --as-fast-as-possible")


@dataclass(frozen=True)
class Answers(Bundle):
    """What clients and routers are told."""

    stream_interval: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Tokens from one event of a stream to the next."),
    ] = None
    lora_modules: Annotated[
        list[str] | None,
        Option(metavar="NAME=PATH", help="An adapter that clients may ask for; may be repeated."),
    ] = None
    mean_output_tokens: Annotated[
        float,
        Option(
            min=1,
            metavar="N",
            help="Mean length of answers without ignore_eos; inf: all of max_tokens.",
        ),
    ] = 256.0
    kv_events_config: Annotated[
        str | None, Option(metavar="JSON", help="As of vllm serve: publish KV events.")
    ] = None


@takes_bundles
def serve(
    *,
    config: ConfigFile = None,
    front: Front,
    pace: Pace,
    answers: Answers,
    out: OutDir = None,
    settings: Settings,
) -> None:
    """Serve vLLM's HTTP interface, metrics and KV events from the simulated engine."""
    import asyncio
    from math import inf

    try:
        from uvicorn.loops.auto import auto_loop_factory

        from kvsim.against.serve.server import Server, listen
    except ImportError as error:
        raise ConfigError(f"serve: {error}; pip install 'kvsim[serve]'") from None
    from kvsim.against.serve.kv_events import events_config
    from kvsim.against.serve.session import Options, Session, adapters_of, said_in
    from kvsim.run.blame import blaming
    from kvsim.settings.server.command import arguments

    pace.check()
    said = said_in(arguments(settings.server.vllm, settings.server.vllm_file))
    loaded = settings.load(config)
    events = answers.kv_events_config or said.kv_events_config
    options = Options(
        speed=inf if pace.as_fast_as_possible else pace.speed,
        hold=pace.hold,
        mean_output_tokens=answers.mean_output_tokens,
        stream_interval=answers.stream_interval or said.stream_interval or 1,
        adapters=adapters_of(answers.lora_modules or said.lora_modules),
        kv_events=None if events is None else events_config(events),
    )
    with blaming(loaded):
        session = Session(loaded, records=out is not None)
        model = front.served_model_name or said.name or session.parts.model.name
        note(*session.parts.notes)
        address = front.host or said.host or "127.0.0.1"
        port = (said.port or 8000) if front.port is None else front.port
        with listen(address, port) as listening:
            made = Server(session, model, options)
            where = f"http://{address}:{listening.getsockname()[1]}"
            told = f"serving {model} at {where}/v1"
            with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
                runner.run(made.run(listening, lambda: print(told, flush=True)))
        for line in made.clock.report():
            print(line)
        if out is not None:
            from kvsim.cli.folders import write_run
            from kvsim.report import PAGE

            write_run(session.result(command_line()), out, page=True)
            tell_written(out, PAGE)
