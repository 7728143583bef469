"""Options that several commands share, and what their values stand for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvsim.workload.trace import Trace

TracePath = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Trace: native, Mooncake or Azure; .gz too."),
]
TraceFormat = Annotated[
    str | None, typer.Option(metavar="NAME", help="Its format, if the content is ambiguous.")
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
    typer.Option("--vllm", metavar="COMMAND", help="Settings from a `vllm serve ...` command."),
]
VllmFile = Annotated[
    str | None,
    typer.Option(
        "--vllm-file",
        metavar="FILE",
        help="The same from a shell script, Dockerfile, Compose or pod file.",
    ),
]


def open_noted(path: str, trace_format: str | None) -> Trace:
    """The trace at `path`; the notes of its reader go to standard error."""
    from kvsim.workload import open_trace

    opened = open_trace(path, trace_format)
    for note in opened.notes:
        print(f"note: {note}", file=sys.stderr)
    return opened


def config_path(config: str | None) -> str | None:
    """The file that a name in configs/runs, or a path, stands for."""
    if config is None:
        return None
    from kvsim.library import find

    return str(find("runs", config))
