"""`kvsim.simulate`: a run for who calls it from Python, whose result shows itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.run import simulation
from kvsim.run.assembly import Parts, assemble
from kvsim.settings.config import RunConfig
from kvsim.workload.trace import Trace

if TYPE_CHECKING:
    from kvsim.report.result import Result
    from kvsim.run.watchers import Watcher


def simulate(
    trace: Trace | str | Path | None,
    config: simulation.Settings = None,
    *,
    progress: simulation.Progress | None = None,
    watcher: Watcher | None = None,
    command: str = "",
    parts_of: Callable[[RunConfig], Parts] = assemble,
) -> Result:
    """Replay a trace under a configuration, as `kvsim.run.simulation.simulate` does and says."""
    run = simulation.simulate(
        trace, config, progress=progress, watcher=watcher, command=command, parts_of=parts_of
    )
    from kvsim.report.result import Result  # With numpy, as a run has it by now.

    return Result(**{each.name: getattr(run, each.name) for each in fields(run)})
