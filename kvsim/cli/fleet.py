"""`run --replicas`: several replicas behind a router."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.cli.console import make_console
from kvsim.cli.progress import progress_bar
from kvsim.config import RunConfig
from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from kvsim.fleet.fleet import FleetResult
    from kvsim.result import Result
    from kvsim.workload.trace import Trace

SUMMARY, ROUTING = "fleet.json", "routing.json"
Write = Callable[["Result", str], None]
"""Writes the folder of one replica."""


def run_fleet(
    trace: Trace,
    config: RunConfig,
    replicas: int,
    router: str | None,
    assignments: Sequence[str],
    *,
    out: str | None,
    as_json: bool,
    write: Write,
) -> None:
    """Simulates replicas with equal settings, prints the figures, and writes a folder for each."""
    from kvsim.fleet.figures import summarise_fleet
    from kvsim.fleet.fleet import simulate_fleet

    args = dict(map(_argument, assignments))
    total = min(len(trace.rows), config.num_prompts or len(trace.rows))
    command = shlex.join(["kvsim", *sys.argv[1:]])
    name = router or "round-robin"
    with progress_bar(total, "simulating") as progress:
        result = simulate_fleet(
            trace, [config] * replicas, name, args, progress=progress, command=command
        )
    summary = summarise_fleet(result)
    if out is not None:
        _write(result, summary, out, write)
    if as_json:
        print(json.dumps(summary, indent=1))
        return
    console = make_console()
    render(summary, console)
    if out is not None:
        console.print(f"\nwritten to {out}: open replica-0/report.html, ...", highlight=False)


def render(summary: Mapping[str, Any], console: Console) -> None:
    """Prints the latencies of all requests, and a line for each replica."""
    from rich.text import Text

    from kvsim.report.metrics import LATENCIES
    from kvsim.report.numerals import percent, show
    from kvsim.report.rich_tables import make_table
    from kvsim.report.statistics import LISTED

    replicas = summary["replicas"]
    name = summary["meta"]["router"]["name"]
    console.print(Text(f"{len(replicas)} replicas behind {name}", style="bold"))
    served = f"{summary['completed']:,} of {summary['num_requests']:,} requests completed"
    console.print(f"{served} in {summary['duration']:,.1f} s", highlight=False)
    console.print()
    latencies = make_table("latency", *LISTED, pad_edge=False, header_style="dim")
    for kind, label in LATENCIES.items():
        latencies.add_row(label, *(show(summary[f"{key}_{kind}_ms"], "ms") for key in LISTED))
    console.print(latencies)
    table = make_table(
        *("replica", "sent", "prompt tokens", "hits", "preempted", "KV mean", "TTFT p99", "ended"),
        pad_edge=False,
        header_style="dim",
    )
    for number, each in enumerate(replicas):
        hits = each["prefix_cache_hit_rate"]
        table.add_row(
            str(number),
            f"{each['num_requests']:,}",
            f"{each['total_input_tokens']:,}",
            "–" if hits is None else percent(hits),
            f"{each['num_preemptions']:,}",
            percent(each["kv_cache_usage_mean"]),
            show(each["p99_ttft_ms"], "ms"),
            each["outcome"],
        )
    console.print(table)


def _argument(assignment: str) -> tuple[str, Any]:
    """KEY=VALUE; the value as in JSON, or else as text."""
    key, equals, value = assignment.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(f"--router-set: {assignment!r} is no KEY=VALUE, as in temperature=0.5")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _write(result: FleetResult, summary: Mapping[str, Any], out: str, write: Write) -> None:
    """Writes each replica's folder, then the figures of all and where each request went."""
    from kvsim.writing import write_together

    for number, replica in enumerate(result.replicas):
        write(replica, str(Path(out) / f"replica-{number}"))
    routing = dict(zip(result.requests["id"], result.requests["replica"].tolist(), strict=True))
    tables = {SUMMARY: summary, ROUTING: routing}
    texts = {
        name: json.dumps(table, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        for name, table in tables.items()
    }
    write_together(out, texts)
