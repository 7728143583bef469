"""`bench`: measure how fast this simulator is on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.console import make_console
from kvsim.errors import ConfigError
from kvsim.report.rich_tables import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from kvsim.bench.measure import Measurement
    from kvsim.bench.repeat import Bench


Names = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="NAME",
        help="A name such as W1, or `decode` for all of decode-N; may be repeated. Default: all but"
        " `million`, and W4 only with --trace.",
    ),
]
Engine = Annotated[
    str, typer.Option("--engine", metavar="NAME", help="A name of `kvsim policies`.")
]
Cost = Annotated[
    str, typer.Option("--cost", metavar="constant|table", help="Cost model to price steps.")
]
TraceFile = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Mooncake's conversation_trace.jsonl, for W4."),
]
Stored = Annotated[
    str | None,
    typer.Option(
        "--compare", metavar="FILE", help="Show the ratio to an earlier output of --json."
    ),
]


def bench(
    names: Names = None,
    engine: Engine = "vllm-0.6.3",
    cost: Cost = "constant",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, metavar="N", help="Runs of each.")
    ] = 3,
    trace: TraceFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every measurement as JSON.")
    ] = False,
    stored: Stored = None,
    around: Annotated[
        bool, typer.Option("--around", help="Measure what a run costs besides the simulation.")
    ] = False,
) -> None:
    """Measure CPU time and memory of `simulate()` on workloads that anybody can rebuild.

    Each run has a process of its own; the tables show the least and the median of the repeats. A
    ping is the cost of one `yield env.timeout(...)` of SimPy in the same process; ns/seq: per
    running sequence and step; sim/CPU: simulated seconds per CPU second; MB: peak memory, in all
    and before `simulate()`; a pure decode step is one without arrivals and ends, measured as the
    difference of two runs. Exit code 1 if a run does not give the known results of its workload.
    """
    chosen = _chosen(names, cost, trace)
    if around:
        _show_parts(chosen, engine, cost, trace)
        return
    from kvsim.bench import repeat

    then = None if stored is None else repeat.load(stored)
    measured = repeat.run(chosen, engine, cost, repeats, trace, _note)
    if as_json:
        print(repeat.to_json(measured), end="")
    else:
        _show(measured, then)
    wrong = _wrong(measured)
    if wrong:
        print(f"kvsim: wrong results: {', '.join(wrong)}", file=sys.stderr)
        raise typer.Exit(1)


def _wrong(bench: Bench) -> list[str]:
    """Workloads with a run that did not give the known results."""
    from kvsim.bench.measure import checks_of

    known = {name: checks_of(name, bench.engine, bench.cost) for name in bench.workloads}
    return [
        name
        for name, checks in known.items()
        if checks is not None and not all(each.meets(checks) for each in bench.workloads[name])
    ]


def _chosen(names: list[str] | None, cost: str, trace: str | None) -> list[str]:
    """The workloads to run, checked before any of them runs."""
    from kvsim.bench.measure import COSTS
    from kvsim.bench.workloads import WORKLOADS, named, usual
    from kvsim.config import nearest

    if cost not in COSTS:
        raise ConfigError(
            f"--cost: no {cost!r};{nearest(cost, COSTS)} choose from {', '.join(COSTS)}"
        )
    if not names:
        return usual(trace)
    chosen = [name for word in names for name in named(word)]
    for name in chosen:
        if trace is None and not WORKLOADS[name].own:
            raise ConfigError(
                f"bench: {name} needs Mooncake's conversation_trace.jsonl; give --trace FILE"
            )
    return list(dict.fromkeys(chosen))


def _note(name: str, measured: list[Measurement]) -> None:
    if sys.stderr.isatty():
        print(f"{name}: {min(each.cpu_s for each in measured):.3f} s", file=sys.stderr)


def _show(bench: Bench, then: Bench | None) -> None:
    from kvsim.bench.repeat import ratios

    console = make_console()
    load = "" if bench.load_average is None else f", load {bench.load_average:.2f}"
    console.print(
        f"kvsim {bench.kvsim_version}, {bench.engine}, {bench.cost} cost,"
        f" Python {bench.python}, {bench.machine}{load}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_times(bench))
    console.print(_sizes(bench))
    for table in (_decode_steps(bench), _short_cuts(bench)):
        if table is not None:
            console.print(table)
    if then is not None:
        table = _table("workload", "CPU now / then", "pings now / then")
        for name, (seconds, pings) in ratios(bench, then).items():
            table.add_row(name, f"{seconds:.2f}", f"{pings:.2f}")
        console.print(table)


def _times(bench: Bench) -> Table:
    from kvsim.bench.repeat import least, middle

    table = _table(
        "workload",
        "CPU s",
        "median",
        "us/req",
        "us/step",
        "pings/step",
        "ns/seq",
        "sim/CPU",
    )
    for name, found in bench.workloads.items():
        one = found[0]
        cpu_s, pings = least(found, lambda m: m.cpu_s), least(found, lambda m: m.pings)
        table.add_row(
            name,
            f"{cpu_s:.3f}",
            f"{middle(found, lambda m: m.cpu_s):.3f}",
            f"{cpu_s * 1e6 / one.requests:,.1f}",
            f"{cpu_s * 1e6 / one.steps:,.2f}",
            f"{pings / one.steps:,.1f}",
            f"{cpu_s * 1e9 / one.seq_steps:,.0f}",
            f"{one.end_ns / 1e9 / cpu_s:,.0f}",
        )
    return table


def _decode_steps(bench: Bench) -> Table | None:
    """The cost of one more pure decode step, where it was measured."""
    table = _table("workload", "us per pure decode step")
    for name, found in bench.workloads.items():
        known = [each.decode_step_us for each in found if each.decode_step_us is not None]
        if known:
            table.add_row(name, f"{min(known):.3f}")
    return table if table.row_count else None


def _sizes(bench: Bench) -> Table:
    from kvsim.bench.measure import checks_of
    from kvsim.bench.repeat import least

    table = _table("workload", "requests", "steps", "events", "MB", "trace MB", "digest", "known")
    for name, found in bench.workloads.items():
        one, checks = found[0], checks_of(name, bench.engine, bench.cost)
        known = "-" if checks is None else "yes" if one.meets(checks) else "NO"
        table.add_row(
            name,
            f"{one.requests:,}",
            f"{one.steps:,}",
            f"{one.events:,}",
            f"{least(found, lambda m: m.rss_mb):,.0f}",
            f"{least(found, lambda m: m.idle_rss_mb):,.0f}",
            one.digest if one.outcome == "finished" else one.outcome,
            known,
        )
    return table


def _short_cuts(bench: Bench) -> Table | None:
    """How often the simulator's short cuts applied, where it says so."""
    counts = {
        name: {key: _most_often(value) for key, value in (found[0].fast_path or {}).items()}
        for name, found in bench.workloads.items()
    }
    keys = list(dict.fromkeys(key for each in counts.values() for key in each))
    if not keys:
        return None
    table = _table("fast path", *(key.replace("_", " ") for key in keys))
    for name, each in counts.items():
        table.add_row(name, *(_shown(each.get(key)) for key in keys))
    return table


def _most_often(value: Any) -> Any:
    """Of a table of counts, the word that counts most; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return max(value, key=lambda word: value[word], default="")


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _show_parts(names: list[str], engine: str, cost: str, trace: str | None) -> None:
    from kvsim.bench.around import around
    from kvsim.bench.repeat import in_fresh_process

    table = _table("CPU s", *names)
    columns = [in_fresh_process(around, name, engine, cost, trace) for name in names]
    for part in columns[0]:
        table.add_row(part, *(f"{parts[part]:.3f}" for parts in columns))
    make_console().print(table)


def _table(*columns: str) -> Table:
    table = make_table(*columns, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for column in table.columns:
        column.no_wrap = True
    return table
