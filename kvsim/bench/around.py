"""Measures the cost of a run besides the simulation: start, trace, results, files, page."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from kvsim.bench.measure import settings_of
from kvsim.bench.usage import children_cpu_s, cpu_s
from kvsim.bench.workloads import WORKLOADS

Parts = dict[str, float]
"""Part → CPU seconds, in the order in which the parts happen."""


def around(name: str, engine: str, cost: str, trace: str | None = None) -> Parts:
    """The parts of `kvsim run --out` on a workload; call it in a fresh process.

    Each part includes the libraries that it is the first to load.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = trace
        if WORKLOADS[name].own or trace is None:
            path = str(Path(folder) / "trace.jsonl")
            _write_trace(name, path)
        parts = {"start: kvsim --help": _start_s("--help")}
        return parts | _run(settings_of(WORKLOADS[name].settings, engine, cost), str(path), folder)


def _run(settings: dict[str, object], path: str, folder: str) -> Parts:
    laps = _Laps()
    from kvsim.workload import open_trace

    opened = open_trace(path)
    laps.lap("trace: read and check")
    from kvsim.run import simulate

    laps.lap("simulate: imports")
    result = simulate(opened, settings)
    laps.lap("simulate")
    summary = result.summary
    laps.lap("summary")
    from kvsim.report.files import write_results

    write_results(Path(folder) / "out", summary, result.requests, result.steps)
    laps.lap("files")
    from kvsim.pages.run import build_page

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


def _write_trace(name: str, path: str) -> None:
    """Make the trace in another process, so that its imports do not count."""
    code = (
        "import sys; from kvsim.bench.workloads import WORKLOADS;"
        " from kvsim.workload.native import write;"
        " write(WORKLOADS[sys.argv[1]].make(None), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, name, path], check=True)


def _start_s(*arguments: str) -> float:
    """CPU time of a whole process, the least of three."""
    found = []
    for _ in range(3):
        before = children_cpu_s()
        subprocess.run(
            [sys.executable, "-m", "kvsim", *arguments], check=True, stdout=subprocess.DEVNULL
        )
        found.append(children_cpu_s() - before)
    return min(found)
