"""Runs tasks in processes of this machine, which end with this process however it ends."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

_LOOKS_S = 1.0
"""How often a process looks whether its parent is still there."""


def in_processes(
    run: Callable[..., T], tasks: Iterable[tuple[Any, ...]], number: int, *, ordered: bool = True
) -> Iterator[T]:
    """What `run(*task)` returns, for each task, in `number` processes.

    In the order of the tasks, or as they end.
    """
    from joblib import Parallel, delayed

    kind = "generator" if ordered else "generator_unordered"
    watch = {"initializer": _end_with, "initargs": (os.getpid(),)}
    pool = Parallel(n_jobs=number, batch_size=1, return_as=kind, **watch)
    yield from pool(delayed(run)(*task) for task in tasks)


@lru_cache(maxsize=1)
def unpickled(path: str) -> Any:
    """The value in a file of the parent process, for all its tasks; read once per process."""
    return pickle.loads(Path(path).read_bytes())


@cache
def _end_with(parent: int) -> None:
    """End this process soon after its parent: a parent that is killed cannot say so."""
    Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOKS_S)
    os._exit(1)
