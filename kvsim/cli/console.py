"""What commands say besides their results: notes, progress, where files are."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from kvsim.report import make_console

if TYPE_CHECKING:
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace

T = TypeVar("T")

PATIENCE_S = 1.0
"""A run that ends before has no progress bar: it could not be read."""

asked = {"quiet": False, "json": False}
"""Whether nothing but results is to be said, and whether these are JSON."""


def note(*texts: str) -> None:
    """Print these notes to standard error, one a line."""
    for text in () if asked["quiet"] else texts:
        print(f"note: {text}", file=sys.stderr)


def command_line() -> str:
    """The command that runs now, as one would type it."""
    return shlex.join(["kvsim", *sys.argv[1:]])


def tell_written(out: str | Path, page: str) -> None:
    """Say which folder was written, and which of its pages to open."""
    if not (asked["quiet"] or asked["json"]):
        make_console().print(f"\nwritten to {out}: open {Path(out) / page}")


def watched() -> bool:
    """Whether somebody reads what is said besides results."""
    return sys.stderr.isatty() and not asked["quiet"]


@contextmanager
def progress_bar(
    label: str, total: int | None = None, patience_s: float = 0
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of requests, or runs, that just ended.

    A bar to `total`, or without one a count of runs; it is not shown before `patience_s`.
    """
    if not watched():
        yield lambda number: None
        return
    from rich import progress
    from rich.console import Console

    counted = (
        (progress.TextColumn("{task.completed} runs"), progress.TimeElapsedColumn())
        if total is None
        else (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
    )
    columns = progress.SpinnerColumn(), progress.TextColumn("{task.description}"), *counted
    shown = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    task, begin_s = shown.add_task(label, total=total), monotonic()

    def advance(number: int) -> None:
        if monotonic() - begin_s >= patience_s:
            shown.start()
        shown.advance(task, number)

    advance(0)
    try:
        yield advance
    finally:
        shown.stop()


def simulate_shown(
    simulate: Callable[..., T], trace: Trace, config: RunConfig, label: str, **more: Any
) -> T:
    """What `simulate` returns for a trace, with a progress bar if that takes a while.

    `more`: further arguments of `simulate`.
    """
    total = min(len(trace.rows), config.num_prompts or len(trace.rows))
    with progress_bar(label, total, PATIENCE_S) as progress:
        return simulate(trace, config, progress=progress, command=command_line(), **more)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module` in a process of its own, because start-up settings
    decide its times; exits with its exit code if that is not 0.

    The process finds the modules of this one, and `kvsim_kernels` also in a checkout.
    """
    beside = Path(__file__).resolve().parents[2] / "kernels"
    paths = [str(beside), *(str(Path(path).resolve()) for path in sys.path)]
    quiet = {"KVSIM_QUIET": "1"} if asked["quiet"] else {}
    environment = {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *arguments]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise typer.Exit(code if code > 0 else 1)
