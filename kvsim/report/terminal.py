"""Prints the summary of a run on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvsim.report import wording
from kvsim.report.ledger_lines import ledger_lines
from kvsim.report.metrics import BLOCKED_BY, LATENCIES
from kvsim.report.numerals import show
from kvsim.report.statistics import STATISTICS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {"plain": "default", "warning": "yellow", "bad": "bold red"}


def render(summary: Mapping[str, Any], console: Console) -> None:
    """Print the verdict, the latencies and the key figures of memory, preemption and cache."""
    from rich.text import Text

    meta = summary["meta"]
    estimated = "green" if wording.measured(meta) else "yellow"
    console.print(Text(wording.subject(meta), style="bold"))
    console.print(Text(wording.time_source(meta), style=estimated))
    if meta.get("assumed"):
        console.print(Text(f"Assumed: {'; '.join(wording.assumed(meta))}", style="dim"))
    console.print()
    for remark in wording.verdict(summary):
        console.print(Text(remark.text, style=_STYLES[remark.tone]))
    console.print()
    console.print(_latencies(summary))
    console.print(_figures(summary))


def _latencies(summary: Mapping[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("latency")
    columns = [name for name in STATISTICS if name != "median"]
    for name in columns:
        table.add_column(name, justify="right", style="bold" if name == "p99" else None)
    for kind, label in LATENCIES.items():
        values = (show(summary[f"{statistic}_{kind}_ms"], "ms") for statistic in columns)
        table.add_row(label, *values)
    return table


def _figures(summary: Mapping[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for label, parts in _lines(summary):
        grid.add_row(label, Text(" · ".join(part for part in parts if part)))
    return grid


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Label and parts of each line; lines about unused features are left out."""

    def figure(key: str, unit: str, text: str) -> str:
        return text.format(show(summary[key], unit)) if summary[key] is not None else ""

    lines = [
        (
            "throughput",
            [
                figure("request_rate", "requests/s", "{} offered"),
                figure("request_throughput", "requests/s", "{} served"),
                figure("output_throughput", "tokens/s", "{} output"),
                figure("request_goodput", "requests/s", "goodput {}"),
                figure("max_concurrent_requests", "requests", "at most {} at once"),
            ],
        ),
        (
            "KV cache",
            [
                figure("kv_cache_usage_mean", "share", "{} used"),
                figure("kv_cache_usage_max", "share", "at most {}"),
                figure("internal_fragmentation", "share", "{} of used slots empty"),
                figure("external_fragmentation", "share", "{} of blocks stranded"),
            ],
        ),
        (
            "queues",
            [
                figure("running_mean", "", "{} running"),
                figure("waiting_mean", "", "{} waiting"),
                figure("waiting_max", "requests", "at most {} waiting"),
                figure("swapped_max", "requests", "at most {} swapped")
                if summary["swapped_max"]
                else "",
            ],
        ),
    ]
    if summary["meta"].get("prefix_caching"):
        lines.append(
            (
                "prefix cache",
                [
                    figure("prefix_cache_hit_rate", "share", "{} of prompt tokens hit"),
                    figure("prefix_cache_hit_rate_with_preempted", "share", "{} with preempted"),
                    figure("prefix_cache_block_hit_rate", "share", "{} of block look-ups"),
                    figure("prefix_cache_request_hit_share", "share", "{} of requests"),
                ],
            )
        )
    if "time_ledger_mean_ms" in summary and summary["completed"]:
        lines += ledger_lines(summary)
    blocked = {cause: s for cause, s in summary["head_blocked_s"].items() if s}
    if blocked:
        parts = [f"{BLOCKED_BY[cause]} {show(s, 's')}" for cause, s in blocked.items()]
        lines.append(("head waits", parts))
    return lines
