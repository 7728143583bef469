"""Processes that a test starts: what they inherit, whom they start, and whether they live."""

from __future__ import annotations

import signal
from pathlib import Path


def heed_signals() -> None:
    """A process started in the background inherits that SIGINT is ignored; under nohup, SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def children(parent: int) -> list[int]:
    """Processes that the process started, at any depth."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            own = int(path.parent.name)
            found += [own, *children(own)]
    return found


def alive(process: int) -> bool:
    """Whether a process is there, and not only waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
