"""Engines by name: a scheduler, the block managers it goes with, and its own defaults.

A new engine is one class and one entry. An outsider's is `package.module:Class` on the command
line: a scheduler whose constructor takes any of the keyword arguments listed in `Scheduler`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvsim.batch.batch import Batch
from kvsim.config import DEFAULT_BLOCK_SIZE
from kvsim.plan import Plan
from kvsim.schedule.nano import Nano, Nano2025
from kvsim.schedule.vllm033 import Vllm033
from kvsim.schedule.vllm063 import Vllm063
from kvsim.schedule.vllm063_async import Vllm063Async
from kvsim.schedule.vllm_v1 import VllmV1
from kvsim.schedule.vllm_v1_async import VllmV1Async


class Scheduler(Protocol):
    """What a replica needs of a scheduler.

    The constructor may name `block_size`, `num_gpu_blocks`, `max_model_len`, `max_num_seqs`,
    `max_num_batched_tokens`, `enable_chunked_prefill`, `enable_prefix_caching`,
    `preemption_mode`, `prices` (`schedule.means.Prices`; None unless the mode is `auto`),
    `scheduling_policy`, `victim` (`schedule.victims.Victim`, None: its own rule), `watermark` and
    arguments of its own; a `ValueError` is a refusal to start. A scheduler must not read
    `Request.output_length`.

    It may have `in_flight`, the number of steps composed before the oldest is settled (1 where it
    has not), `arrive(batch, request)`, called instead of `Batch.arrive`, and `watermark_blocks`,
    which a run notes down. One that is a `batch.pace.Sprinter`, whose `terms(blocks)` say what
    its steps have in common, is not asked to compose the ordinary ones of them.
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

    about: str
    scheduler: type[Scheduler]
    block_manager: str
    """Without `enable_prefix_caching`; empty: the engine always shares."""
    prefix_manager: str
    """With it; empty: the engine cannot."""
    others: tuple[str, ...] = ()
    """Further block managers that go with its scheduler."""
    asynchronous: type[Scheduler] | None = None
    """Its scheduler by default, where that differs: asynchronous scheduling (`async_scheduling`)
    or output processing (`disable_async_output_proc`)."""
    samples: bool = False
    """Whether it can fork a request into several samples (`n > 1`); it is synchronous then."""
    block_size: int = DEFAULT_BLOCK_SIZE
    enable_prefix_caching: bool = False


ENGINES: dict[str, Engine] = {
    "vllm-0.3.3": Engine(
        "vLLM 0.3.3: the early block manager, prompts padded to a rectangle",
        Vllm033,
        "vllm-0.3.3",
        "",
        samples=True,
    ),
    "vllm-0.6.3": Engine(
        "vLLM 0.6.3.post1, block manager v1",
        Vllm063,
        "naive",
        "prefix-caching",
        others=("contiguous", "prefix-runs"),
        asynchronous=Vllm063Async,
        samples=True,
    ),
    "vllm-v1": Engine(
        "vLLM V1 0.33.0",
        VllmV1,
        "vllm-v1",
        "vllm-v1-prefix-caching",
        others=("naive",),
        asynchronous=VllmV1Async,
        enable_prefix_caching=True,
    ),
    "nano-vllm": Engine(
        "nano-vllm of April 2026 (bb823b3)",
        Nano,
        "",
        "nano-vllm",
        block_size=256,
        enable_prefix_caching=True,
    ),
    "nano-vllm-2025-08": Engine(
        "nano-vllm of August 2025 (6ef2a4f)",
        Nano2025,
        "",
        "nano-vllm-2025-08",
        block_size=256,
        enable_prefix_caching=True,
    ),
}
"""Names of `--engine`."""
