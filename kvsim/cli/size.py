"""`size`: find the pool, replicas, rate or limit that keep the objectives, and how near the cliff
is."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvsim.cli.console import note, progress_bar, tell_written
from kvsim.cli.fleet import FleetOptions
from kvsim.cli.options import (
    AsJson,
    ConfigFile,
    Objectives,
    OutDir,
    TraceForm,
    TracePath,
    Workers,
    takes_bundles,
)
from kvsim.cli.server import ServerOptions, SettingOptions
from kvsim.errors import ConfigError
from kvsim.report.screen import make_console, make_table, print_remarks
from kvsim.settings.config import RunConfig, to_table

if TYPE_CHECKING:
    from rich.table import Table

    from kvsim.search.size import Answer, Laboratory, Search

SEEDS = 5


Find = Annotated[
    str,
    Option(
        metavar="KNOB",
        help="num_gpu_blocks, gpu_memory_utilization, kv_offloading_size,"
        " replicas, request_rate, watermark, max_num_batched_tokens or max_num_seqs.",
    ),
]
Low = Annotated[float | None, Option("--from", metavar="X", help="Try nothing below.")]
High = Annotated[float | None, Option("--to", metavar="X", help="Try nothing above.")]
Seeds = Annotated[int, Option(min=1, metavar="N", help="Seeds, the same for every value.")]
HitRate = Annotated[
    float | None,
    Option(
        metavar="SHARE",
        help="Assume shared prefixes: this share of the prompt tokens hits an unlimited"
        " cache. For traces without content.",
    ),
]
Price = Annotated[
    float | None,
    Option(min=0, metavar="X", help="Also say what a million tokens cost, in dollars."),
]
Prefixes = Annotated[
    int, Option(min=1, metavar="N", help="With --hit-rate: number of different prefixes.")
]


@takes_bundles
def size(
    *,
    slo: Objectives,
    find: Find,
    trace: TracePath = None,
    config: ConfigFile = None,
    low: Low = None,
    high: High = None,
    seeds: Seeds = SEEDS,
    hit_rate: HitRate = None,
    prefixes: Prefixes = 16,
    price_per_gpu_hour: Price = None,
    out: OutDir = None,
    as_json: AsJson = False,
    workers: Workers,
    form: TraceForm,
    fleet: FleetOptions,
    server: ServerOptions,
    settings: SettingOptions,
) -> None:
    """Find the least memory, the fewest replicas, the highest rate or the best limit that keeps the
    objectives.

    Every value meets the same seeds. With --out no run is ever repeated.
    """
    from kvsim.search.size import (
        LASTING,
        NAME,
        PAGE,
        Bounds,
        Laboratory,
        build_page,
        endless,
        make_knob,
        searched,
        sharing,
        size_record,
        what_varies,
    )
    from kvsim.search.slo import parse_slo
    from kvsim.search.store import Store
    from kvsim.writing import json_text, write_together

    objectives = parse_slo(slo)
    loaded = settings.load(config, server.word())
    runner = workers.chosen()
    opened = form.requests(trace, loaded)
    if hit_rate is not None:
        opened, loaded, notes = sharing(opened, loaded, hit_rate, prefixes)
        note(*notes)
    if find in LASTING:
        opened, loaded, notes = endless(opened, loaded, find)
        note(*notes)
        objectives = objectives._replace(steady=True)
    searches = []
    place = tempfile.TemporaryDirectory(prefix="kvsim-") if out is None else nullcontext(out)
    with place as folder, progress_bar(f"looking for {find}") as done:
        store = Store(folder)
        for base in _bases(loaded, fleet, find):
            knob = make_knob(find, opened, to_table(base), Bounds(low, high))
            varies = what_varies(opened, base, find)
            numbers = range(base.seed, base.seed + (seeds if varies else 1))
            lab = Laboratory(
                opened, base, knob, objectives, numbers, store, runner, workers.jobs, done
            )
            searches.append(searched(lab, varies))
    record = json_text(size_record(searches, price_per_gpu_hour))
    if as_json:
        print(record, end="")
    else:
        _show(searches, price_per_gpu_hour)
    if out is not None:
        write_together(out, {PAGE: build_page(searches, price_per_gpu_hour), NAME: record})
        tell_written(out, PAGE)


def _bases(loaded: RunConfig, fleet: FleetOptions, find: str) -> list[RunConfig]:
    """The settings of each search: one for each router, where there are replicas."""
    from kvsim.fleet.settings import make_settings

    table = fleet.table()
    if not table and find != "replicas":
        return [loaded]
    if fleet.replicas is not None and find == "replicas":
        raise ConfigError("--replicas: is what --find replicas looks for; leave it out")
    table = {"replicas": 1, **to_table(loaded), **table}
    names = dict.fromkeys((fleet.router or "round-robin").split(","))
    return [make_settings({**table, "router": name}) for name in names]


def _show(searches: Sequence[Search], price: float | None) -> None:
    from kvsim.search.size import compared, router_head, router_of, router_rows, verdict
    from kvsim.search.sweep import sources

    console = make_console()
    for search in searches:
        if len(searches) > 1:
            console.print(router_of(search), style="bold")
        console.print(_neighbours(*search))
        print_remarks(console, verdict(*search, price))
    if len(searches) > 1:
        rows = router_rows(searches, price)
        console.print(make_table(*router_head(searches, price), rows=rows))
        console.print(compared(searches).text)
    tried = (each.records for search in searches for each in search.lab.tried.values())
    for text, measured in sources(tried):
        console.print(text, style="" if measured else "dim")


def _neighbours(lab: Laboratory, found: Answer) -> Table:
    """Values around the answer, with their figures."""
    from kvsim.search.size import HEAD, neighbourhood, row

    labels = (metric.label for metric in lab.objectives.metrics)
    table = make_table(lab.knob.name, *HEAD, *labels)
    for value, configuration in neighbourhood(lab, found.value):
        style = "bold" if value == found.value else "" if configuration.meets else "dim"
        table.add_row(*row(lab, found.value, value), style=style)
    return table
