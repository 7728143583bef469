"""What commands say besides their results: notes, progress, where files are."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from kvsim.report.screen import make_console

if TYPE_CHECKING:
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace

T = TypeVar("T")

QUIET_BELOW = 2_000
"""Fewest requests for a bar; shorter runs end before a bar could be read."""

asked = {"quiet": False}
"""Whether nothing but results is to be said."""


def note(*texts: str) -> None:
    """Print these notes to standard error, one a line."""
    for text in () if asked["quiet"] else texts:
        print(f"note: {text}", file=sys.stderr)


def command_line() -> str:
    """The command that runs now, as one would type it."""
    return shlex.join(["kvsim", *sys.argv[1:]])


def tell_written(out: str | Path, page: str) -> None:
    """Say which folder was written, and which of its pages to open."""
    if not asked["quiet"]:
        make_console().print(f"\nwritten to {out}: open {Path(out) / page}")


def _watched() -> bool:
    return sys.stderr.isatty() and not asked["quiet"]


@contextmanager
def progress_bar(
    total: int, label: str, quiet_below: int = QUIET_BELOW
) -> Iterator[Callable[[int], None] | None]:
    """Yields a function to call with the number of requests, or runs, that just ended; or None."""
    if total < quiet_below or not _watched():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Left())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda number: progress.advance(task, number)


@contextmanager
def spinner(label: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of runs that just ended; the total is unknown."""
    if not _watched():
        yield lambda number: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}, {task.completed} runs"))
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task(label, total=None)
        yield lambda number: progress.advance(task, number)


def simulate_shown(
    simulate: Callable[..., T], trace: Trace, config: RunConfig, label: str, **more: Any
) -> T:
    """What `simulate` returns for a trace, with a progress bar if the run is long enough for one.

    `more`: further arguments of `simulate`.
    """
    total = min(len(trace.rows), config.num_prompts or len(trace.rows))
    with progress_bar(total, label) as progress:
        return simulate(trace, config, progress=progress, command=command_line(), **more)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module` in a process of its own, because start-up settings
    decide its times; exits with its exit code if that is not 0.

    The process finds the modules of this one, and `kvsim_kernels` also in a checkout.
    """
    beside = Path(__file__).resolve().parents[2] / "kernels"
    paths = [str(beside), *(str(Path(path).resolve()) for path in sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *arguments]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise typer.Exit(code if code > 0 else 1)
