"""`run --replicas`: several replicas behind a router."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.bundles import Bundle
from kvsim.cli.console import command_line, make_console, tell_written
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


@dataclass(frozen=True)
class FleetOptions(Bundle):
    """How many engines there are, and who sends them requests."""

    replicas: Annotated[
        int | None,
        typer.Option("--replicas", min=1, metavar="N", help="Simulate N engines and a router."),
    ] = None
    router: Annotated[
        str | None,
        typer.Option("--router", metavar="NAME", help="The router: round-robin, dynamo-kv, ..."),
    ] = None
    router_set: Annotated[
        list[str] | None,
        typer.Option("--router-set", metavar="KEY=VALUE", help="An argument of the router."),
    ] = None

    @property
    def asked(self) -> bool:
        """Whether a router is asked for."""
        return self.replicas is not None or self.router is not None or bool(self.router_set)

    @property
    def args(self) -> dict[str, Any]:
        """Arguments of the router. Raises `ConfigError`."""
        return dict(map(_argument, self.router_set or ()))

    def table(self) -> dict[str, Any]:
        """What is said of the fleet, as keys of `FleetConfig`; empty if nothing is."""
        given = {"replicas": self.replicas, "router": self.router, "router_args": self.args}
        return {key: value for key, value in given.items() if value}

    def run(
        self, trace: Trace, config: RunConfig, out: str | None, write: Write, *, as_json: bool
    ) -> None:
        """Simulates engines with equal settings, prints the figures, and writes their folders."""
        from kvsim.fleet.figures import summarise_fleet
        from kvsim.fleet.fleet import simulate_fleet

        configs = [config] * (self.replicas or 1)
        total = min(len(trace.rows), config.num_prompts or len(trace.rows))
        router, command = self.router or "round-robin", command_line()
        with progress_bar(total, "simulating") as progress:
            result = simulate_fleet(
                trace,
                configs,
                router,
                self.args,
                jobs=None,
                progress=progress,
                command=command,
            )
        summary = summarise_fleet(result)
        if out is not None:
            _write(result, summary, out, write)
        if as_json:
            print(json.dumps(summary, indent=1))
            return
        render(summary, make_console())
        if out is not None:
            tell_written(out, "replica-0")


def refuse_watching(block_map: bool, step_log: str | None) -> None:
    """Raises `ConfigError` for what shows one engine."""
    if block_map or step_log is not None:
        raise ConfigError("--replicas: --block-map and --step-log show one engine; leave them out")


def render(summary: Mapping[str, Any], console: Console) -> None:
    """Prints the latencies of all requests, and a line for each replica."""
    from rich.text import Text

    from kvsim.report.metrics import LATENCIES
    from kvsim.report.numerals import show
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
        table.add_row(
            str(number),
            f"{each['num_requests']:,}",
            f"{each['total_input_tokens']:,}",
            show(each["prefix_cache_hit_rate"], "share"),
            f"{each['num_preemptions']:,}",
            show(each["kv_cache_usage_mean"], "share"),
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
    from kvsim.writing import json_text, write_together

    for number, replica in enumerate(result.replicas):
        write(replica, str(Path(out) / f"replica-{number}"))
    routing = dict(zip(result.requests["id"], result.requests["replica"].tolist(), strict=True))
    write_together(out, {SUMMARY: json_text(summary), ROUTING: json_text(routing)})
