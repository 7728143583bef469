"""`bench`: measure how fast this simulator is on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import kvsim
from kvsim.cli.console import watched
from kvsim.cli.options import AsJson, Bundle, takes_bundles
from kvsim.report import make_console, make_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from kvsim.against.bench.measure import Bench
    from kvsim.against.bench.workloads import Case

Names = Annotated[
    list[str] | None,
    Option(
        "--workload",
        metavar="NAME",
        help="A name such as W1, or `decode` for all of decode-N; may be repeated. Default: the"
        " usual ones of the settings; conversation-N only with --trace.",
    ),
]
Engines = Annotated[
    list[str] | None,
    Option(
        "--settings",
        metavar="NAME|FILE",
        help="An engine such as sglang, `feature` or `own` for all features of vLLM V1 or policies"
        " of one's own, or a TOML file of settings; may be repeated. Default: all; vllm-v1 if there"
        " is a --workload.",
    ),
]
TraceFile = Annotated[
    str | None,
    Option(
        "--trace", metavar="FILE", help="Mooncake's conversation_trace.jsonl, for conversation-N."
    ),
]
Stored = Annotated[
    str | None,
    Option("--compare", metavar="FILE", help="Show the ratio to an earlier output of --json."),
]
_WIDTH = 120
"""Columns of the widest table; a narrow terminal folds its lines."""


@dataclass(frozen=True)
class Peer(Bundle):
    """Another simulator to measure beside."""

    name: Annotated[
        str | None,
        Option(
            "--peer",
            metavar="aisimulate",
            help="Run another simulator in turns, on the same requests with its prefix cache on.",
        ),
    ] = None
    python: Annotated[
        str, Option("--peer-python", metavar="PATH", help="The Python that has it.")
    ] = "python3"


@takes_bundles
def bench(
    *,
    names: Names = None,
    engines: Engines = None,
    repeats: Annotated[int, Option(min=1, metavar="N", help="Runs of each.")] = 3,
    trace: TraceFile = None,
    as_json: AsJson = False,
    stored: Stored = None,
    peer: Peer,
    around: Annotated[
        bool, Option("--around", help="Measure what a run costs besides the simulation.")
    ] = False,
) -> None:
    """Measure CPU time and memory of runs that anybody can rebuild.

    Each run reads a file of requests and simulates them, on an H100 where the settings name no
    other times, in a process of its own. All take turns; the tables show the least and the median
    of the repeats. ns/seq: per decoding sequence and step; over base: a feature's or policy's time
    of a step over the default's on the same requests, a fleet's time of a request over that of one
    replica; MB: peak memory.
    """
    from kvsim.against.bench import measure
    from kvsim.against.bench.measure import check_peer, store_bytecode
    from kvsim.against.bench.workloads import choose

    cases = choose(names or [], engines or [], trace)
    store_bytecode(Path(kvsim.__file__).parent)
    if around:
        _show_parts(cases, trace)
        return
    if peer.name is not None:
        check_peer(peer.name, peer.python)
    then = None if stored is None else measure.load(stored)
    beside = None if peer.name is None else (peer.name, peer.python)
    measured = measure.run(cases, repeats, trace, _note, beside)
    if as_json:
        print(measure.to_json(measured), end="")
    else:
        _show(measured, then)


def _note(case: Case) -> None:
    if watched():
        print(f"{case}: measured", file=sys.stderr)


def _show(bench: Bench, then: Bench | None) -> None:
    from kvsim.against.bench.measure import columns_of, ratios

    console = make_console()
    console.width = max(console.width, _WIDTH)
    load = "" if bench.load_average is None else f", load {bench.load_average:.2f}"
    console.print(
        f"kvsim {bench.kvsim_version}, Python {bench.python}, {bench.machine}{load}", soft_wrap=True
    )
    for rows, columns in columns_of(bench):
        if rows and columns:
            cells = ([*row.case, *(write(row) for _, write in columns)] for row in rows)
            console.print(_table([head for head, _ in columns], cells))
    if then is not None:
        found = ratios(bench, then).items()
        changes = [[*case, f"{ratio:.2f}"] for case, ratio in found]
        if changes:
            console.print(_table(("CPU now / then",), changes))


def _show_parts(cases: list[Case], trace: str | None) -> None:
    from kvsim.against.bench.measure import around, in_fresh_process

    rows = (
        [*case, part, f"{cpu_s:.3f}"]
        for case in cases
        for part, cpu_s in in_fresh_process(around, case, trace).items()
    )
    make_console().print(_table(("part", "CPU s"), rows))


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of cases: workload, settings, and columns with these heads."""
    look: dict[str, Any] = {"pad_edge": False, "padding": (0, 1), "collapse_padding": True}
    table = make_table("workload", "settings", *heads, rows=rows, texts=2, **look)
    for column in table.columns:
        column.no_wrap = True
    return table
