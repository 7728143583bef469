"""The engines by name: each has a scheduler, its block managers, and its own defaults.

A new engine is one class and one entry. Your own is `package.module:Class` on the command line: a
subclass of `kvsim.engine.scheduler.Scheduler`, or of `kvsim.engine.tables.Tables` for
`--block-manager`. Its constructor names the settings that it wants to receive.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsim.defaults import DEFAULT_BLOCK_SIZE
from kvsim.engine.scheduler import Scheduler
from kvsim.engine.tables import Tables
from kvsim.engines.contiguous import Contiguous
from kvsim.engines.nano import Nano, Nano2025
from kvsim.engines.nano_blocks import NanoTables, NanoTables2025
from kvsim.engines.prefix_runs import PrefixRuns
from kvsim.engines.sglang import Sglang, SglangOverlap
from kvsim.engines.sglang_blocks import SglangRadixTables, SglangTables
from kvsim.engines.vllm_033 import Vllm033
from kvsim.engines.vllm_033_blocks import Vllm033Tables
from kvsim.engines.vllm_063 import Vllm063, Vllm063Async
from kvsim.engines.vllm_063_blocks import Naive, PrefixCaching
from kvsim.engines.vllm_v1 import VllmV1, VllmV1Async
from kvsim.engines.vllm_v1_blocks import VllmV1PrefixTables, VllmV1Tables
from kvsim.engines.vllm_v1_features.scheduler import VllmV1Features, VllmV1FeaturesAsync
from kvsim.engines.vllm_v1_groups.manager import GroupTables

GROUP_MANAGER = "vllm-v1-groups"
"""The block manager of models with several KV cache groups."""


class Engine(NamedTuple):
    """An entry of the table of engines."""

    about: str
    scheduler: type[Scheduler]
    block_manager: str
    """The block manager without `enable_prefix_caching`; empty if the engine always shares."""
    prefix_manager: str
    """The block manager with `enable_prefix_caching`; empty if the engine has no prefix cache."""
    others: tuple[str, ...] = ()
    """Further block managers that work with its scheduler."""
    asynchronous: type[Scheduler] | None = None
    """The asynchronous scheduler, which is the default; None if the engine has none."""
    grouped: type[Scheduler] | None = None
    """The scheduler for models with several KV cache groups, and `grouped_asynchronous`; None if
    the engine keeps all tokens in all layers. Its block manager is `GROUP_MANAGER`."""
    grouped_asynchronous: type[Scheduler] | None = None
    switch: str = ""
    """The setting that chooses between the two schedulers."""
    samples: bool = False
    """Whether it can fork a request into several samples (`n > 1`). It then works synchronously."""
    block_size: int = DEFAULT_BLOCK_SIZE
    enable_prefix_caching: bool = False
    memory_formula: str = "vllm"
    vllm_version: str | None = None
    """The release of vLLM that it follows; empty if it is not vLLM."""
    serves: bool = False
    """Whether the defaults of `vllm serve` are known for other releases, too, by GPU."""


ENGINES: dict[str, Engine] = {
    "vllm-0.3.3": Engine(
        "vLLM 0.3.3: the early block manager, prompts padded to a rectangle",
        Vllm033,
        "vllm-0.3.3",
        "",
        samples=True,
        vllm_version="0.3.3",
    ),
    "vllm-0.6.3": Engine(
        "vLLM 0.6.3.post1, block manager v1",
        Vllm063,
        "naive",
        "prefix-caching",
        others=("contiguous", "prefix-runs"),
        asynchronous=Vllm063Async,
        switch="disable_async_output_proc",
        samples=True,
        vllm_version="0.6.3",
    ),
    "vllm-v1": Engine(
        "vLLM V1 0.33.0",
        VllmV1,
        "vllm-v1",
        "vllm-v1-prefix-caching",
        others=("naive",),
        asynchronous=VllmV1Async,
        grouped=VllmV1Features,
        grouped_asynchronous=VllmV1FeaturesAsync,
        switch="async_scheduling",
        enable_prefix_caching=True,
        vllm_version="0.33.0",
        serves=True,
    ),
    "nano-vllm": Engine(
        "nano-vllm of April 2026 (bb823b3)",
        Nano,
        "",
        "nano-vllm",
        block_size=256,
        enable_prefix_caching=True,
        memory_formula="nano-vllm",
    ),
    "nano-vllm-2025-08": Engine(
        "nano-vllm of August 2025 (6ef2a4f)",
        Nano2025,
        "",
        "nano-vllm-2025-08",
        block_size=256,
        enable_prefix_caching=True,
        memory_formula="nano-vllm",
    ),
    "sglang": Engine(
        "SGLang 0.5.23",
        Sglang,
        "sglang",
        "sglang-radix",
        asynchronous=SglangOverlap,
        switch="async_scheduling",
        block_size=1,
        enable_prefix_caching=True,
        memory_formula="sglang",
    ),
}
"""Values of `--engine`."""

BLOCK_MANAGERS: dict[str, type[Tables]] = {
    "naive": Naive,
    "prefix-caching": PrefixCaching,
    "contiguous": Contiguous,
    "prefix-runs": PrefixRuns,
    "vllm-0.3.3": Vllm033Tables,
    "vllm-v1": VllmV1Tables,
    "vllm-v1-prefix-caching": VllmV1PrefixTables,
    GROUP_MANAGER: GroupTables,
    "nano-vllm": NanoTables,
    "nano-vllm-2025-08": NanoTables2025,
    "sglang": SglangTables,
    "sglang-radix": SglangRadixTables,
}
"""Values of `--block-manager`: who holds which KV block, and what can still be hit."""
