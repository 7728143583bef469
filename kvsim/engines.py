"""Engines by name: a scheduler, the block managers it goes with, and what it is.

A new engine is one class and one entry. An outsider's is `package.module:Class` on the command
line: a scheduler whose constructor takes any of the keyword arguments listed in `Scheduler`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvsim.plan import Plan
from kvsim.schedule.batch import Batch
from kvsim.schedule.vllm063 import Vllm063
from kvsim.schedule.vllm063_async import Vllm063Async


class Scheduler(Protocol):
    """What a replica needs of a scheduler.

    The constructor may name `block_size`, `num_gpu_blocks`, `max_model_len`, `max_num_seqs`,
    `max_num_batched_tokens`, `enable_chunked_prefill`, `enable_prefix_caching`,
    `preemption_mode`, `scheduling_policy`, `watermark` and arguments of its own; a `ValueError`
    is a refusal to start. A scheduler must not read `Request.output_length`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Decide what the next step does, through the moves of `batch`."""
        ...

    def overlap(self, batch: Batch, now_ns: int) -> None:
        """What the engine's host does while the model runs."""
        ...

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """The step's time has passed: book its tokens, end what is complete."""
        ...


class Engine(NamedTuple):
    """An engine of the table."""

    scheduler: type[Scheduler]
    block_manager: str
    """Without `enable_prefix_caching`."""
    prefix_manager: str
    """With it."""
    about: str


ENGINES: dict[str, Engine] = {
    "vllm-0.6.3": Engine(
        Vllm063,
        "naive",
        "prefix-caching",
        "vLLM 0.6.3.post1, synchronous output processing",
    ),
    "vllm-0.6.3-async": Engine(
        Vllm063Async,
        "naive",
        "prefix-caching",
        "the same with asynchronous output processing, its default on CUDA (n = 1 only)",
    ),
}
"""Names of `--engine`."""
