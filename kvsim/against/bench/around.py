"""Measures the cost of a run besides the simulation: start, trace, results, files, page."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kvsim.against.bench.processes import in_fresh_process, spent, write_requests
from kvsim.against.bench.settings import Case
from kvsim.against.bench.usage import cpu_s

Parts = dict[str, float]
"""Part → CPU seconds, in the order in which the parts happen."""


def around(case: Case, trace: str | None = None) -> Parts:
    """The parts of `kvsim run --out` of a case; call it in a fresh process.

    Each part includes the libraries that it is the first to load.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.jsonl")
        in_fresh_process(write_requests, case.workload, trace, path)
        parts = {"start: kvsim --help": _start_s()}
        return parts | _run(case.table, path, folder)


def _run(settings: dict[str, object], path: str, folder: str) -> Parts:
    laps = _Laps()
    from kvsim.workload import open_trace

    opened = open_trace(path)
    laps.lap("trace: read and check")
    from kvsim.run.simulation import simulate

    laps.lap("simulate: imports")
    result = simulate(opened, settings)
    laps.lap("simulate")
    summary = result.summary
    laps.lap("summary")
    from kvsim.report import write_results

    write_results(Path(folder) / "out", summary, result.requests, result.steps)
    laps.lap("files")
    from kvsim.report.pages.run import build_page

    build_page(summary, result.requests, result.steps)
    laps.lap("page")
    return laps.parts


class _Laps:
    """CPU time between one call and the next."""

    def __init__(self) -> None:
        self.parts: Parts = {}
        self._last = cpu_s()

    def lap(self, name: str) -> None:
        """Store the time since the last lap under a name."""
        now = cpu_s()
        self.parts[name] = now - self._last
        self._last = now


def _start_s() -> float:
    """CPU time of the shortest command, the least of three."""
    return min(spent(sys.executable, "-m", "kvsim", "--help")[0].cpu_s for _ in range(3))
