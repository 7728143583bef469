"""Which of the two cores runs an engine: what its requests, its batch and its loop are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsim.core.batch import Batch as CoreBatch
from kvsim.core.loop import Loop as CoreLoop
from kvsim.core.request import Request as CoreRequest
from kvsim.core.scheduler import Scheduler as CoreScheduler
from kvsim.engine.batch import Batch, Endings
from kvsim.engine.loop import Loop
from kvsim.engine.request import Request


def batch_of(scheduler: Any, blocks: Any, output_length: Callable[[int], int]) -> Any:
    """The batch of a scheduler and a block manager. `output_length`: as for `Serving`."""
    longest = scheduler.longest_sequence
    if isinstance(scheduler, CoreScheduler):
        return CoreBatch(blocks, output_length, longest)
    return Batch(blocks, Endings(output_length, longest))


def loop_class(scheduler: Any) -> Any:
    """The class of the loop that steps a scheduler."""
    return CoreLoop if isinstance(scheduler, CoreScheduler) else Loop


def request_class(scheduler: Any) -> type[Any]:
    """The class of the requests that a scheduler serves."""
    return CoreRequest if isinstance(scheduler, CoreScheduler) else Request
