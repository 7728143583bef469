"""`sweep`: many configurations, each run once, as one table and one page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from kvsim.cli.console import note, progress_bar, tell_written
from kvsim.cli.fleet import FleetOptions
from kvsim.cli.options import (
    AsJson,
    ConfigFile,
    TraceForm,
    TracePath,
    Workers,
    note_arrivals,
    takes_bundles,
)
from kvsim.cli.server import ServerOptions, SettingOptions
from kvsim.errors import ConfigError
from kvsim.report.screen import make_console, make_table
from kvsim.settings.config import to_table

if TYPE_CHECKING:
    from rich.table import Table

    from kvsim.search.runner import Backend
    from kvsim.search.sweep import Chosen, Plan
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace

MOST_LISTED, MOST_FIGURES = 5, 3
"""Most configurations and figures on the terminal."""

Slo = Annotated[
    str | None,
    Option("--slo", metavar="BOUNDS", help="Objectives, as in p99_ttft<2s,p99_tpot<60ms."),
]
Out = Annotated[str, Option("--out", metavar="DIR", help="Results, table and page.")]
Folders = Annotated[
    list[str] | None,
    Argument(metavar="[TRACE|DIR...]", help="As --trace; with --merge, sweeps to join."),
]
Grid = Annotated[
    list[str] | None,
    Option(metavar="KEY=VALUES", help="1,2,3 or lin(0,1,5) or log(1,64,7); any number."),
]
Rows = Annotated[
    list[str] | None, Option("--list", metavar="KEY=VALUES|FILE", help="Values taken row by row.")
]
Laws = Annotated[
    list[str] | None,
    Option(metavar="KEY=LAW", help="uniform(A,B), loguniform(A,B) or choice(X,Y)."),
]
Samples = Annotated[
    int | None, Option(min=1, metavar="N", help="Number of points to draw; default: 32.")
]
SampleSeed = Annotated[int, Option(min=0, metavar="N", help="Seed of the drawn points.")]
Seeds = Annotated[int | None, Option(min=1, metavar="N", help="Run every point on N seeds.")]
Shard = Annotated[str | None, Option(metavar="K/N", help="Run only this part; --merge joins them.")]
Ledger = Annotated[bool, Option("--ledger", help="Also say where time and prompt tokens went.")]
Merge = Annotated[bool, Option("--merge", help="Join the runs of DIR...")]


@takes_bundles
def sweep(
    *,
    out: Out,
    folders: Folders = None,
    trace: TracePath = None,
    config: ConfigFile = None,
    grid: Grid = None,
    rows: Rows = None,
    random: Laws = None,
    samples: Samples = None,
    sample_seed: SampleSeed = 0,
    seeds: Seeds = None,
    slo: Slo = None,
    workers: Workers,
    ledger: Ledger = False,
    shard: Shard = None,
    merge: Merge = False,
    as_json: AsJson = False,
    form: TraceForm,
    fleet: FleetOptions,
    server: ServerOptions,
    settings: SettingOptions,
) -> None:
    """Run every combination of settings once, and show which are best.

    A sweep may be stopped at any moment; the same command continues it.
    """
    from kvsim.search.slo import parse_slo
    from kvsim.search.sweep import (
        PAGE,
        TABLE,
        expand,
        make_plan,
        parse_space,
        read_plan,
        shard_of,
        write_plan,
    )

    if merge:
        _merge(out, as_json, folders, trace, grid, rows, random)
        return
    if folders and (trace is not None or folders[1:]):
        raise ConfigError(f"{folders[-1]}: one trace, please; folders are for --merge")
    trace = folders[0] if folders else trace
    tried = grid or (), rows or (), random or ()
    space = parse_space(*tried, samples=samples, sample_seed=sample_seed, seeds=seeds)
    if slo is not None:
        parse_slo(slo)
    loaded = settings.load(config, server.word())
    table = to_table(loaded) | fleet.table()
    points = expand(space, table)
    mine = shard_of(len(points), shard)
    runner = workers.chosen()
    opened = form.requests(trace, loaded)
    write_plan(out, make_plan(opened, table, points, slo, ledger=ledger), TABLE, PAGE)
    plan = read_plan(out)
    note_arrivals(opened, (points[i].config for i in mine))
    configs = {plan.points[i].key: points[i].config for i in mine}
    _run(out, opened, configs, ledger, runner, workers.jobs)
    if shard is None:
        _finish(out, plan, as_json)
    else:
        print(f"shard {shard}: {len(mine)} of {len(points)} points are in {out}; join with --merge")


def _run(
    out: str,
    trace: Trace,
    configs: Mapping[str, RunConfig],
    ledger: bool,
    backend: Backend,
    jobs: int | None,
) -> None:
    """Run what is missing, and report how much that was."""
    from kvsim.search.runner import run_missing
    from kvsim.search.store import Store

    with progress_bar("sweeping", len(configs)) as done:
        made = run_missing(
            Store(out), trace, configs, ledger=ledger, backend=backend, jobs=jobs, done=done
        )
    note(f"{made} runs made, {len(configs) - made} already there")


def _merge(out: str, as_json: bool, folders: list[str] | None, *others: object) -> None:
    from kvsim.search.sweep import merge

    if not folders:
        raise ConfigError("--merge: no folders; give kvsim sweep --merge DIR... --out DIR")
    if any(others):
        raise ConfigError(
            "--merge: joins finished runs; leave out --trace, --grid, --list and --random"
        )
    _finish(out, merge(folders, out), as_json)


def _finish(out: str, plan: Plan, as_json: bool) -> None:
    """Table, page and the verdict on the terminal."""
    from kvsim.search.store import Store
    from kvsim.search.sweep import (
        MANIFEST,
        PAGE,
        TABLE,
        build_page,
        choose,
        chosen_record,
        gather,
        manifest,
        table_bytes,
    )
    from kvsim.writing import json_text, write_together

    outcomes = gather(Store(out), plan, out)
    chosen = choose(plan, outcomes)
    table, page = table_bytes(plan, outcomes), build_page(plan, chosen)
    write_together(out, {MANIFEST: manifest(plan), TABLE: table, PAGE: page})
    if as_json:
        print(json_text(chosen_record(chosen)), end="")
        return
    console = make_console()
    for text, _ in chosen.verdict:
        console.print(text)
    if chosen.best:
        console.print(chosen.rule, _best(chosen), sep="\n\n")
    tell_written(out, PAGE)


def _best(chosen: Chosen) -> Table:
    """The first few of the best configurations."""
    from kvsim.results.numerals import show

    listed, metrics = chosen.best[:MOST_LISTED], chosen.metrics[:MOST_FIGURES]
    keys, labels = list(listed[0].first.settings), (metric.label for metric in metrics)
    table = make_table(*keys, *labels, texts=len(keys))
    for place in listed:
        figures = (show(place.first.figures.get(metric.key), metric.unit) for metric in metrics)
        table.add_row(*place.settings.values(), *figures)
    return table
