"""`sweep`: many configurations, each run once, as one table and one page."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.console import make_console
from kvsim.cli.flags import settings, with_run_flags
from kvsim.cli.options import (
    Assignments,
    Jobs,
    StartupLog,
    TraceColumns,
    TraceFormat,
    TracePath,
    VllmCommand,
    VllmFile,
    note_arrivals,
    requests_of,
)
from kvsim.cli.progress import progress_bar
from kvsim.cli.server import load_over, server_word
from kvsim.config import nearest, to_table
from kvsim.errors import ConfigError
from kvsim.report.rich_tables import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from kvsim.config import RunConfig
    from kvsim.sweep.backends import Backend
    from kvsim.sweep.choose import Chosen
    from kvsim.sweep.sweep import Plan
    from kvsim.workload.trace import Trace

BACKENDS = ("local", "ray")
MOST_LISTED, MOST_FIGURES = 5, 3
"""Most configurations and figures on the terminal."""

Slo = Annotated[
    str | None,
    typer.Option("--slo", metavar="BOUNDS", help="Objectives, as in p99_ttft<2s,p99_tpot<60ms."),
]
BackendName = Annotated[
    str, typer.Option("--backend", metavar="NAME", help="local, or ray: on a Ray cluster.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Address of the cluster; default: start Ray here."),
]
Base = Annotated[
    str | None,
    typer.Option("--base", metavar="FILE", help="Settings: a TOML, or a name in configs/runs."),
]


Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Results, table and page.")]
Folders = Annotated[
    list[str] | None, typer.Argument(metavar="[DIR...]", help="With --merge: sweeps to join.")
]
Grid = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUES", help="1,2,3 or lin(0,1,5) or log(1,64,7); any number."),
]
Rows = Annotated[
    list[str] | None,
    typer.Option("--list", metavar="KEY=VALUES|FILE", help="Values taken row by row."),
]
Laws = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=LAW", help="uniform(A,B), loguniform(A,B) or choice(X,Y)."),
]
Samples = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Number of points to draw; default: 32.")
]
SampleSeed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the drawn points.")]
Seeds = Annotated[int | None, typer.Option(min=1, metavar="N", help="Run every point on N seeds.")]
Shard = Annotated[
    str | None, typer.Option(metavar="K/N", help="Run only this part; --merge joins them.")
]
Merge = Annotated[bool, typer.Option("--merge", help="Join the runs of DIR...")]


@with_run_flags
def sweep(
    out: Out,
    folders: Folders = None,
    trace: TracePath = None,
    base: Base = None,
    grid: Grid = None,
    rows: Rows = None,
    random: Laws = None,
    samples: Samples = None,
    sample_seed: SampleSeed = 0,
    seeds: Seeds = None,
    slo: Slo = None,
    jobs: Jobs = None,
    backend: BackendName = "local",
    ray_address: RayAddress = None,
    shard: Shard = None,
    merge: Merge = False,
    trace_format: TraceFormat = None,
    columns: TraceColumns = None,
    startup_log: StartupLog = None,
    vllm: VllmCommand = None,
    vllm_file: VllmFile = None,
    assignments: Assignments = None,
    **flags: Any,
) -> None:
    """Run every combination of settings once, and show which are best.

    A sweep may be stopped at any moment; the same command continues it.
    """
    from kvsim.pages.sweep import PAGE
    from kvsim.sweep.grid import expand, parse_space
    from kvsim.sweep.slo import parse_slo
    from kvsim.sweep.sweep import make_plan, read_plan, shard_of, write_plan
    from kvsim.sweep.table import TABLE

    if merge:
        _merge(out, folders, trace, grid, rows, random)
        return
    if folders:
        raise ConfigError(f"{folders[0]}: folders are for --merge; add it or leave them out")
    tried = grid or (), rows or (), random or ()
    space = parse_space(*tried, samples=samples, sample_seed=sample_seed, seeds=seeds)
    if slo is not None:
        parse_slo(slo)
    word = server_word(startup_log, vllm, vllm_file)
    config = load_over(word, base, settings(flags), assignments or ())
    table = to_table(config)
    points = expand(space, table)
    mine = shard_of(len(points), shard)
    runner = backend_of(backend, ray_address)
    opened = requests_of(config, trace, trace_format, columns)
    write_plan(out, make_plan(opened, table, points, slo), TABLE, PAGE)
    plan = read_plan(out)
    note_arrivals(opened, (points[i].config for i in mine))
    _run(out, opened, {plan.points[i].key: points[i].config for i in mine}, runner, jobs)
    if shard is None:
        _finish(out, plan)
    else:
        print(f"shard {shard}: {len(mine)} of {len(points)} points are in {out}; join with --merge")


def backend_of(name: str, address: str | None) -> Backend:
    """The backend with this name. Raises `ConfigError`."""
    from kvsim.sweep.backends import run_local, run_on_ray

    if name not in BACKENDS:
        near = nearest(name, BACKENDS)
        raise ConfigError(f"--backend: no {name!r};{near} choose from {', '.join(BACKENDS)}")
    if name == "ray":
        return partial(run_on_ray, address)
    if address is not None:
        raise ConfigError("--ray-address: needs --backend ray")
    return run_local


def _run(
    out: str,
    trace: Trace,
    configs: Mapping[str, RunConfig],
    backend: Backend,
    jobs: int | None,
) -> None:
    """Run what is missing, and report how much that was."""
    from kvsim.sweep.store import Store
    from kvsim.sweep.sweep import run_missing

    with progress_bar(len(configs), "sweeping", quiet_below=2) as progress:
        done = progress or _nothing
        made = run_missing(Store(out), trace, configs, backend=backend, jobs=jobs, done=done)
    print(f"note: {made} runs made, {len(configs) - made} were there", file=sys.stderr)


def _merge(out: str, folders: list[str] | None, *others: object) -> None:
    from kvsim.sweep.sweep import merge

    if not folders:
        raise ConfigError("--merge: no folders; give kvsim sweep --merge DIR... --out DIR")
    if any(others):
        raise ConfigError(
            "--merge: joins finished runs; leave out --trace, --grid, --list and --random"
        )
    _finish(out, merge(folders, out))


def _finish(out: str, plan: Plan) -> None:
    """Table, page and the verdict on the terminal."""
    from kvsim.pages.sweep import PAGE, build_page
    from kvsim.sweep.choose import choose
    from kvsim.sweep.store import Store
    from kvsim.sweep.sweep import MANIFEST, gather, manifest
    from kvsim.sweep.table import TABLE, table_bytes
    from kvsim.writing import write_together

    outcomes = gather(Store(out), plan, out)
    chosen = choose(plan, outcomes)
    table, page = table_bytes(plan, outcomes), build_page(plan, chosen)
    write_together(out, {MANIFEST: manifest(plan), TABLE: table, PAGE: page})
    console = make_console()
    for text, _ in chosen.verdict:
        console.print(text, highlight=False)
    if chosen.best:
        console.print(_best(chosen))
    console.print(f"written to {Path(out) / TABLE}: open {Path(out) / PAGE}", highlight=False)


def _best(chosen: Chosen) -> Table:
    """The first few of the best configurations."""
    from kvsim.report.numerals import show

    listed, metrics = chosen.best[:MOST_LISTED], chosen.metrics[:MOST_FIGURES]
    keys, labels = list(listed[0].first.settings), (metric.label for metric in metrics)
    table = make_table(*keys, *labels, title=chosen.rule, texts=len(keys))
    for place in listed:
        figures = (show(place.first.figures.get(metric.key), metric.unit) for metric in metrics)
        table.add_row(*place.settings.values(), *figures)
    return table


def _nothing(number: int) -> None:
    """A progress function that shows nothing."""
