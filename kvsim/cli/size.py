"""`size`: find the pool, rate or limit that keeps the objectives, and how near the cliff is."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.bundles import takes_bundles
from kvsim.cli.console import make_console, note, tell_written
from kvsim.cli.options import ConfigFile, Objectives, OutDir, TraceForm, TracePath, Workers
from kvsim.cli.progress import spinner
from kvsim.cli.server import ServerOptions, SettingOptions
from kvsim.config import RunConfig, to_table
from kvsim.errors import ConfigError
from kvsim.report.rich_tables import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from kvsim.size.answer import Answer
    from kvsim.size.search import Laboratory
    from kvsim.workload.trace import Trace

SEEDS = 5
STYLES = {"plain": "", "warning": "yellow", "bad": "red"}


Find = Annotated[
    str,
    typer.Option(
        metavar="KNOB",
        help="num_gpu_blocks, gpu_memory_utilization, kv_offloading_size (or cpu_offload_gib),"
        " request_rate, watermark, max_num_batched_tokens or max_num_seqs.",
    ),
]
Low = Annotated[float | None, typer.Option("--from", metavar="X", help="Try nothing below.")]
High = Annotated[float | None, typer.Option("--to", metavar="X", help="Try nothing above.")]
Seeds = Annotated[int, typer.Option(min=1, metavar="N", help="Seeds, the same for every value.")]
HitRate = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Assume shared prefixes: this share of the prompt tokens hits an unlimited"
        " cache. For traces without content.",
    ),
]
Prefixes = Annotated[
    int, typer.Option(min=1, metavar="N", help="With --hit-rate: number of different prefixes.")
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
    out: OutDir = None,
    workers: Workers,
    form: TraceForm,
    server: ServerOptions,
    settings: SettingOptions,
) -> None:
    """Find the least memory, the highest rate or the best limit that keeps the objectives.

    Every value meets the same seeds. With --out no run is ever repeated.
    """
    from kvsim.pages.size import PAGE, build_page
    from kvsim.size.answer import answer, lasting_answer
    from kvsim.size.knobs import Bounds, make_knob
    from kvsim.size.search import Laboratory
    from kvsim.sweep.slo import parse_slo
    from kvsim.sweep.store import Store
    from kvsim.writing import write_together

    objectives = parse_slo(slo)
    loaded = settings.load(config, server.word())
    runner = workers.chosen()
    opened = form.requests(trace, loaded)
    if hit_rate is not None:
        opened, loaded = _sharing(opened, loaded, hit_rate, prefixes)
    for_rate = find == "request_rate"
    if for_rate:
        loaded, objectives = _open(opened, loaded), objectives._replace(steady=True)
    knob = make_knob(find, opened, to_table(loaded), Bounds(low, high))
    varies = what_varies(opened, loaded, find)
    numbers = range(loaded.seed, loaded.seed + (seeds if varies else 1))
    place = tempfile.TemporaryDirectory(prefix="kvsim-") if out is None else nullcontext(out)
    with place as folder, spinner(f"looking for {find}") as done:
        store = Store(folder)
        lab = Laboratory(
            opened, loaded, knob, objectives, numbers, store, runner, workers.jobs, done
        )
        lab, found = lasting_answer(lab, varies) if for_rate else (lab, answer(lab, varies))
    _show(lab, found)
    if out is not None:
        write_together(out, {PAGE: build_page(lab, found)})
        tell_written(out, PAGE)


def _open(trace: Trace, config: RunConfig) -> RunConfig:
    """The configuration with open arrivals; says so where the trace has sessions."""
    from kvsim.size.knobs import open_arrivals

    if config.sessions == "auto" and any(row.after >= 0 for row in trace.rows):
        note(
            "the turns of sessions are sent at random times like all requests; none waits for the"
            " one before it"
        )
    return open_arrivals(config)


def _sharing(
    trace: Trace, config: RunConfig, hit_rate: float, prefixes: int
) -> tuple[Trace, RunConfig]:
    """The trace with assumed prefixes, and a configuration with the cache that they need."""
    import msgspec

    from kvsim.assembly import assemble
    from kvsim.workload.assumed import assume_hit_rate

    if config.enable_prefix_caching is False:
        raise ConfigError("--hit-rate: prefix caching is off; leave out --no-enable-prefix-caching")
    config = msgspec.structs.replace(config, enable_prefix_caching=True)
    block_size = assemble(config).config.block_size
    assert block_size is not None
    shared = assume_hit_rate(trace, hit_rate, block_size, prefixes=prefixes, seed=config.seed)
    note(*shared.notes[len(trace.notes) :])
    return shared, config


def what_varies(trace: Trace, config: RunConfig, find: str) -> tuple[str, ...]:
    """What differs from seed to seed when a knob is searched."""
    import msgspec

    from kvsim.replicates import Load, redrawn

    if find == "request_rate":
        config = msgspec.structs.replace(config, request_rate=1.0)
    return redrawn(Load(trace), [("", config)])


def _show(lab: Laboratory, found: Answer) -> None:
    from kvsim.size.verdict import verdict
    from kvsim.sweep.choose import sources

    console = make_console()
    console.print(_neighbours(lab, found))
    for text, tone in verdict(lab, found):
        console.print(text, style=STYLES[tone])
    for text, measured in sources(configuration.records for configuration in lab.tried.values()):
        console.print(text, style="" if measured else "dim")


def _neighbours(lab: Laboratory, found: Answer) -> Table:
    """Values around the answer, with their figures."""
    from kvsim.size.answer import neighbourhood
    from kvsim.size.verdict import HEAD, row

    labels = (metric.label for metric in lab.objectives.metrics)
    table = make_table(lab.knob.key, *HEAD, *labels, header_style="dim")
    for value, configuration in neighbourhood(lab, found.value):
        style = "bold" if value == found.value else "" if configuration.meets else "dim"
        table.add_row(*row(lab, found.value, value), style=style)
    return table
