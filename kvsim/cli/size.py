"""`size`: find the pool, rate or limit that keeps the objectives, and how near the cliff is."""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
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
    requests_of,
)
from kvsim.cli.progress import spinner
from kvsim.cli.server import load_over, server_word
from kvsim.cli.sweep import BackendName, Base, RayAddress, backend_of
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


Bounded = Annotated[
    str,
    typer.Option("--slo", metavar="BOUNDS", help="Objectives, as in p99_ttft<2s,p99_tpot<60ms."),
]
Find = Annotated[
    str,
    typer.Option(
        metavar="KNOB",
        help="num_gpu_blocks, gpu_memory_utilization, kv_offloading_size, request_rate, watermark,"
        " max_num_batched_tokens or max_num_seqs.",
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
Out = Annotated[
    str | None, typer.Option("--out", metavar="DIR", help="Keep every run, and write size.html.")
]


@with_run_flags
def size(
    slo: Bounded,
    find: Find,
    trace: TracePath = None,
    base: Base = None,
    low: Low = None,
    high: High = None,
    seeds: Seeds = SEEDS,
    hit_rate: HitRate = None,
    prefixes: Prefixes = 16,
    out: Out = None,
    jobs: Jobs = None,
    backend: BackendName = "local",
    ray_address: RayAddress = None,
    trace_format: TraceFormat = None,
    columns: TraceColumns = None,
    startup_log: StartupLog = None,
    vllm: VllmCommand = None,
    vllm_file: VllmFile = None,
    assignments: Assignments = None,
    **flags: Any,
) -> None:
    """Find the least memory, the highest rate or the best limit that keeps the objectives.

    Every value meets the same seeds. With --out no run is ever repeated.
    """
    from kvsim.size.answer import answer, lasting_answer
    from kvsim.size.knobs import Bounds, make_knob
    from kvsim.size.search import Laboratory
    from kvsim.sweep.slo import parse_slo
    from kvsim.sweep.store import Store

    objectives = parse_slo(slo)
    word = server_word(startup_log, vllm, vllm_file)
    config = load_over(word, base, settings(flags), assignments or ())
    runner = backend_of(backend, ray_address)
    opened = requests_of(config, trace, trace_format, columns)
    if hit_rate is not None:
        opened, config = _sharing(opened, config, hit_rate, prefixes)
    for_rate = find == "request_rate"
    if for_rate:
        config, objectives = _open(opened, config), objectives._replace(steady=True)
    knob = make_knob(find, opened, to_table(config), Bounds(low, high))
    varies = what_varies(opened, config, find)
    numbers = range(config.seed, config.seed + (seeds if varies else 1))
    place = tempfile.TemporaryDirectory(prefix="kvsim-") if out is None else nullcontext(out)
    with place as folder, spinner(f"looking for {find}") as done:
        store = Store(folder)
        lab = Laboratory(opened, config, knob, objectives, numbers, store, runner, jobs, done)
        lab, found = lasting_answer(lab, varies) if for_rate else (lab, answer(lab, varies))
    _show(lab, found)
    if out is not None:
        _write(out, lab, found)


def _open(trace: Trace, config: RunConfig) -> RunConfig:
    """The configuration with open arrivals; says so where the trace has sessions."""
    from kvsim.size.knobs import open_arrivals

    if config.sessions == "auto" and any(row.after >= 0 for row in trace.rows):
        text = "the turns of sessions are sent at random times like all requests; none waits"
        print(f"note: {text} for the one before it", file=sys.stderr)
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
    for note in shared.notes[len(trace.notes) :]:
        print(f"note: {note}", file=sys.stderr)
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
        console.print(text, highlight=False, style=STYLES[tone])
    for text, measured in sources(configuration.records for configuration in lab.tried.values()):
        console.print(text, highlight=False, style="" if measured else "dim")


def _write(out: str, lab: Laboratory, found: Answer) -> None:
    from kvsim.pages.size import PAGE, build_page
    from kvsim.writing import write_text

    path = write_text(Path(out) / PAGE, build_page(lab, found))
    make_console().print(f"written to {out}: open {path}", highlight=False)


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
