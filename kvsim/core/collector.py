"""Keeps out of the way of a run what manages memory: Python's collector of reference cycles, and
the kernel."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 100_000
"""Requests of a run that are worth a pass."""
_SELDOM = 500_000
"""New objects between two passes in a command. Reading and running 10,000 requests makes fewer."""
_LARGE = 4_000_000
"""More bytes than a column of a usual run has."""

# Freeing this once tells glibc to keep the memory of columns for the next ones, instead of asking
# the kernel for it again and again (`man mallopt`, M_MMAP_THRESHOLD).
bytes(_LARGE)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's collector of reference cycles.

    A run makes millions of objects that live until its end. Each pass over them finds nothing, and
    the passes cost several times as much as making the objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_seldom() -> None:
    """From now on, the collector passes only after very many new objects."""
    gc.set_threshold(_SELDOM)


def collect_after(requests: int) -> None:
    """Free what a run of so many requests leaves in reference cycles: its trace above all.

    Nothing happens after a small run.
    """
    if requests >= _MANY:
        gc.collect()
