"""Options that several commands share, and what their values stand for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvsim.config import RunConfig
    from kvsim.workload.trace import Trace

TracePath = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Trace, benchmark result or table of any known format (.gz too), a folder of coding"
        " sessions, or a shipped one: chat, api, agents, burst.",
    ),
]
TraceFormat = Annotated[
    str | None, typer.Option(metavar="NAME", help="Its format, if the content is ambiguous.")
]
TraceColumns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="ROLE=COLUMN,...",
        help="What the columns of a CSV or Parquet trace are, as in"
        " arrival_ms=ts,input=prompt,output=completion.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as in --set cost.step_us=5000."),
]
OutDir = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", help="Write results and report.html into this folder."),
]
ConfigFile = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="Settings: a TOML, or a name in configs/runs."),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, metavar="N", help="Runs at once; default: the cores.")
]
StartupLog = Annotated[
    str | None,
    typer.Option(
        "--startup-log",
        metavar="FILE",
        help="Settings and block count from the log of a real vLLM server; .gz too.",
    ),
]
VllmCommand = Annotated[
    str | None,
    typer.Option(
        "--vllm",
        "--server-command",
        metavar="COMMAND",
        help="Settings from a command, `vllm serve ...` or `python -m sglang.launch_server ...`.",
    ),
]
VllmFile = Annotated[
    str | None,
    typer.Option(
        "--vllm-file",
        metavar="FILE",
        help="The same from a shell script, Dockerfile, Compose or pod file.",
    ),
]


def open_noted(path: str, trace_format: str | None, columns: str | None) -> Trace:
    """The trace at `path`; the notes of its reader go to standard error."""
    from kvsim.workload import open_trace

    opened = open_trace(path, trace_format, columns)
    for note in opened.notes:
        print(f"note: {note}", file=sys.stderr)
    return opened


def requests_of(
    config: RunConfig, path: str | None, trace_format: str | None, columns: str | None
) -> Trace:
    """The trace at `path`, or what the `workload` of the settings makes. Raises `ConfigError`."""
    if path is not None:
        return open_noted(path, trace_format, columns)
    from kvsim.workload.spec import trace_of

    return trace_of(config)


def note_arrivals(trace: Trace, configs: Iterable[RunConfig]) -> None:
    """Say on standard error, once, if some of these settings have to send all requests at once."""
    from kvsim.workload.arrivals import missing_arrivals

    for config in configs:
        for note in missing_arrivals(trace.rows, config):
            print(f"note: {note}", file=sys.stderr)
            return


def config_path(config: str | None) -> str | None:
    """The file that a name in configs/runs, or a path, stands for."""
    if config is None:
        return None
    from kvsim.library import find

    return str(find("runs", config))
