"""A progress bar on standard error, for runs that are long enough for one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kvsim.cli.console import command_line

if TYPE_CHECKING:
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace

T = TypeVar("T")

QUIET_BELOW = 2_000
"""Fewest requests for a bar; shorter runs end before a bar could be read."""


@contextmanager
def progress_bar(
    total: int, label: str, quiet_below: int = QUIET_BELOW
) -> Iterator[Callable[[int], None] | None]:
    """Yields a function to call with the number of requests, or runs, that just ended; or None."""
    if total < quiet_below or not sys.stderr.isatty():
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
    if not sys.stderr.isatty():
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
