"""`bench`: measure how fast this simulator is on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

import kvsim
from kvsim.cli.console import make_console
from kvsim.cli.options import AsJson
from kvsim.report.rich_tables import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from kvsim.bench.repeat import Bench, Row
    from kvsim.bench.settings import Case

Names = Annotated[
    list[str] | None,
    Option(
        "--workload",
        metavar="NAME",
        help="A name such as W1, or `decode` for all of decode-N; may be repeated. Default: the"
        " usual ones of each engine; W4 only with --trace.",
    ),
]
Engines = Annotated[
    list[str] | None,
    Option(
        "--settings",
        metavar="NAME|FILE",
        help="An engine such as vllm-v1 or vllm-v1-table, or a TOML file of settings; may be"
        " repeated. Default: all; vllm-v1 if there is a --workload.",
    ),
]
TraceFile = Annotated[
    str | None,
    Option("--trace", metavar="FILE", help="Mooncake's conversation_trace.jsonl, for W4."),
]
Stored = Annotated[
    str | None,
    Option("--compare", metavar="FILE", help="Show the ratio to an earlier output of --json."),
]
PeerName = Annotated[
    str | None,
    Option(
        "--peer",
        metavar="aisimulate",
        help="Run another simulator in turns, on the same requests with its prefix cache on.",
    ),
]
PeerPython = Annotated[str, Option("--peer-python", metavar="PATH", help="The Python that has it.")]

_WIDTH = 120
"""Columns of the widest table; a narrow terminal folds its lines."""


def bench(
    names: Names = None,
    engines: Engines = None,
    repeats: Annotated[int, Option(min=1, metavar="N", help="Runs of each.")] = 3,
    trace: TraceFile = None,
    as_json: AsJson = False,
    stored: Stored = None,
    peer: PeerName = None,
    peer_python: PeerPython = "python3",
    around: Annotated[
        bool, Option("--around", help="Measure what a run costs besides the simulation.")
    ] = False,
) -> None:
    """Measure CPU time and memory of `simulate()` on workloads that anybody can rebuild.

    Each run has a process of its own; the tables show the least and the median of the repeats. A
    ping is the cost of one `yield env.timeout(...)` of SimPy in the same process; ns/seq: per
    running sequence and step; sim/CPU: simulated seconds per CPU second; MB: peak memory, in all
    and before `simulate()`; a pure decode step is one without arrivals and ends, measured as the
    difference of two runs. Exit code 1 if a run does not give the known results of its workload.
    """
    from kvsim.bench import repeat
    from kvsim.bench.peers import check_peer
    from kvsim.bench.processes import store_bytecode
    from kvsim.bench.settings import choose

    cases = choose(names or [], engines or [], trace)
    store_bytecode(Path(kvsim.__file__).parent)
    if around:
        _show_parts(cases, trace)
        return
    if peer is not None:
        check_peer(peer, peer_python)
    then = None if stored is None else repeat.load(stored)
    measured = repeat.run(
        cases, repeats, trace, _note, None if peer is None else (peer, peer_python)
    )
    if as_json:
        print(repeat.to_json(measured), end="")
    else:
        _show(measured, then)
    wrong = _wrong(measured)
    if wrong:
        print(f"kvsim: wrong results: {', '.join(wrong)}", file=sys.stderr)
        raise typer.Exit(1)


def _wrong(bench: Bench) -> list[str]:
    """Cases with a run that did not give the known results."""
    return [
        str(row.case)
        for row in bench.rows
        if row.case.checks is not None and not all(each.meets(row.case.checks) for each in row.runs)
    ]


def _note(row: Row) -> None:
    if sys.stderr.isatty():
        print(f"{row.case}: {min(each.cpu_s for each in row.runs):.3f} s", file=sys.stderr)


def _show(bench: Bench, then: Bench | None) -> None:
    console = make_console()
    console.width = max(console.width, _WIDTH)
    load = "" if bench.load_average is None else f", load {bench.load_average:.2f}"
    console.print(
        f"kvsim {bench.kvsim_version}, Python {bench.python}, {bench.machine}{load}", soft_wrap=True
    )
    tables = (_times, _beside_peer, _wholes, _decode_steps, _sizes, _short_cuts)
    shown = [make(bench) for make in tables]
    if then is not None:
        shown.append(_compared(bench, then))
    for table in shown:
        if table.row_count:
            console.print(table)


def _times(bench: Bench) -> Table:
    from kvsim.bench.repeat import least, middle

    table = _table("CPU s", "median", "us/req", "us/step", "pings/step", "ns/seq", "sim/CPU")
    for row in bench.rows:
        one = row.runs[0]
        cpu_s, pings = least(row.runs, lambda m: m.cpu_s), least(row.runs, lambda m: m.pings)
        table.add_row(
            *row.case,
            f"{cpu_s:.3f}",
            f"{middle(row.runs, lambda m: m.cpu_s):.3f}",
            f"{cpu_s * 1e6 / one.requests:,.1f}",
            f"{cpu_s * 1e6 / one.steps:,.2f}",
            f"{pings / one.steps:,.1f}",
            f"{cpu_s * 1e9 / max(one.seq_steps, 1):,.0f}",
            f"{one.end_ns / 1e9 / cpu_s:,.0f}",
        )
    return table


def _beside_peer(bench: Bench) -> Table:
    """The simulation alone, and the whole process, beside those of another simulator."""
    from kvsim.bench.repeat import least

    name = bench.peer or ""
    table = _table("CPU s", name, "ratio", "whole CPU s", name, "ratio")
    for row in bench.rows:
        if row.peer:
            mine, other = least(row.runs, lambda m: m.cpu_s), least(row.peer, lambda p: p.core_s)
            pairs = [(mine, other)]
            mine = least(row.whole, lambda w: w.cpu_s)
            pairs.append((mine, least(row.peer, lambda p: p.whole.cpu_s)))
            cells = [(f"{a:.3f}", f"{b:.3f}", f"{a / b:.2f}") for a, b in pairs]
            table.add_row(*row.case, *cells[0], *cells[1])
    return table


def _wholes(bench: Bench) -> Table:
    """The whole process of `kvsim run --out`, where it was measured."""
    from kvsim.bench.repeat import least, middle

    table = _table("kvsim run --out: CPU s", "median", "MB")
    for row in bench.rows:
        if row.whole:
            table.add_row(
                *row.case,
                f"{least(row.whole, lambda w: w.cpu_s):.3f}",
                f"{middle(row.whole, lambda w: w.cpu_s):.3f}",
                f"{least(row.whole, lambda w: w.rss_mb):,.0f}",
            )
    return table


def _decode_steps(bench: Bench) -> Table:
    """The cost of one more pure decode step, where it was measured."""
    table = _table("us per pure decode step")
    for row in bench.rows:
        known = [each.decode_step_us for each in row.runs if each.decode_step_us is not None]
        if known:
            table.add_row(*row.case, f"{min(known):.3f}")
    return table


def _sizes(bench: Bench) -> Table:
    from kvsim.bench.repeat import least

    table = _table("requests", "steps", "events", "MB", "trace MB", "digest", "known")
    for row in bench.rows:
        one, checks = row.runs[0], row.case.checks
        known = "-" if checks is None else "yes" if one.meets(checks) else "NO"
        table.add_row(
            *row.case,
            f"{one.requests:,}",
            f"{one.steps:,}",
            f"{one.events:,}",
            f"{least(row.runs, lambda m: m.rss_mb):,.0f}",
            f"{least(row.runs, lambda m: m.idle_rss_mb):,.0f}",
            one.digest if one.outcome == "finished" else one.outcome,
            known,
        )
    return table


def _short_cuts(bench: Bench) -> Table:
    """How often the simulator's short cuts applied, where it says so."""
    counts = [
        {key: _most_often(value) for key, value in (row.runs[0].fast_path or {}).items()}
        for row in bench.rows
    ]
    keys = list(dict.fromkeys(key for each in counts for key in each))
    table = _table(*(key.replace("_", " ") for key in keys))
    if keys:
        for row, each in zip(bench.rows, counts, strict=True):
            table.add_row(*row.case, *(_shown(each.get(key)) for key in keys))
    return table


def _compared(now: Bench, then: Bench) -> Table:
    from kvsim.bench.repeat import ratios

    table = _table("CPU now / then", "pings now / then")
    for case, (seconds, pings) in ratios(now, then).items():
        table.add_row(*case, f"{seconds:.2f}", f"{pings:.2f}")
    return table


def _most_often(value: Any) -> Any:
    """Returns the word with the greatest count in a table; any other value unchanged."""
    if not isinstance(value, dict):
        return value
    return max(value, key=lambda word: value[word], default="")


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _show_parts(cases: list[Case], trace: str | None) -> None:
    from kvsim.bench.around import around
    from kvsim.bench.processes import in_fresh_process

    table = _table("part", "CPU s")
    for case in cases:
        for part, cpu_s in in_fresh_process(around, case, trace).items():
            table.add_row(*case, part, f"{cpu_s:.3f}")
    make_console().print(table)


def _table(*columns: str) -> Table:
    """A table of cases: workload, settings, and these columns."""
    heads = ("workload", "settings", *columns)
    table = make_table(*heads, texts=2, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for column in table.columns:
        column.no_wrap = True
    return table
