"""The engines by name: each has a scheduler, its block managers, and its own defaults.

In go the queues of a batch (`kvsim.core.batch`). Out comes the plan of each step, and who holds
which block.

A new engine is one class and one entry. Classes are named as `module:Class` of this package, and
imported when they are asked for. Your own is `package.module:Class` on the command line: a
subclass of `kvsim.core.scheduler.Scheduler`, or of `kvsim.core.blocks.BlockManager` for
`--block-manager`. Its constructor names the settings that it wants to receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.settings.versions import DEFAULT_BLOCK_SIZE

if TYPE_CHECKING:
    from kvsim.core.blocks import BlockManager
    from kvsim.core.scheduler import Scheduler
    from kvsim.machine.hardware import Hardware
    from kvsim.machine.memory import Formula
    from kvsim.machine.models import Model
    from kvsim.settings.config import RunConfig


class Engine(NamedTuple):
    """An entry of the table of engines."""

    about: str
    schedulers: tuple[str, ...]
    """The scheduler, and the asynchronous one, which is the default, if the engine has one."""
    block_manager: str
    """The block manager without `enable_prefix_caching`; empty if the engine always shares."""
    prefix_manager: str
    """The block manager with `enable_prefix_caching`; empty if the engine has no prefix cache."""
    others: tuple[str, ...] = ()
    """Further block managers that work with its scheduler."""
    groups: bool = False
    """Whether it keeps KV cache groups, and takes connectors, drafts, adapters and stages; if not,
    it keeps all tokens in all layers."""
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
    chooses: str = ""
    """The function behind `server_defaults`."""
    caps_sequences: bool = False
    """Whether it starts with a pool smaller than `max_model_len`, and caps what a request may
    hold."""

    @property
    def scheduler(self) -> type[Scheduler]:
        """The synchronous scheduler."""
        kind: type[Scheduler] = _found(self.schedulers[0])
        return kind

    @property
    def asynchronous(self) -> type[Scheduler] | None:
        """The asynchronous scheduler; None if the engine has none."""
        return _found(self.schedulers[1]) if len(self.schedulers) > 1 else None

    @property
    def server_defaults(self) -> Callable[[RunConfig, Hardware, Model], dict[str, Any]] | None:
        """Returns what its server chooses by GPU and model; None if it chooses nothing."""
        return _found(self.chooses) if self.chooses else None


ENGINES: dict[str, Engine] = {
    "vllm-0.3.3": Engine(
        "vLLM 0.3.3: the early block manager, prompts padded to a rectangle",
        ("vllm_033:Vllm033",),
        "vllm-0.3.3",
        "",
        samples=True,
        vllm_version="0.3.3",
    ),
    "vllm-0.6.3": Engine(
        "vLLM 0.6.3.post1, block manager v1",
        ("vllm_063.scheduler:Vllm063", "vllm_063.scheduler:Vllm063Async"),
        "naive",
        "prefix-caching",
        others=("contiguous",),
        switch="disable_async_output_proc",
        samples=True,
        vllm_version="0.6.3",
    ),
    "vllm-v1": Engine(
        "vLLM V1 0.33.0",
        ("vllm_v1.scheduler:VllmV1", "vllm_v1.scheduler:VllmV1Async"),
        "vllm-v1",
        "vllm-v1-prefix-caching",
        groups=True,
        switch="async_scheduling",
        enable_prefix_caching=True,
        vllm_version="0.33.0",
        serves=True,
    ),
    "nano-vllm": Engine(
        "nano-vllm of April 2026 (bb823b3)",
        ("nano:Nano",),
        "",
        "nano-vllm",
        block_size=256,
        enable_prefix_caching=True,
        memory_formula="nano-vllm",
    ),
    "nano-vllm-2025-08": Engine(
        "nano-vllm of August 2025 (6ef2a4f)",
        ("nano:Nano2025",),
        "",
        "nano-vllm-2025-08",
        block_size=256,
        enable_prefix_caching=True,
        memory_formula="nano-vllm",
    ),
    "sglang": Engine(
        "SGLang 0.5.23",
        ("sglang.scheduler:Sglang", "sglang.scheduler:SglangOverlap"),
        "sglang",
        "sglang-radix",
        switch="async_scheduling",
        block_size=1,
        enable_prefix_caching=True,
        memory_formula="sglang",
        chooses="sglang.server:server_defaults",
        caps_sequences=True,
    ),
}
"""Values of `--engine`."""


class _Classes(Mapping[str, "type[BlockManager]"]):
    """Name → class, from name → `module:Class`."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> type[BlockManager]:
        kind: type[BlockManager] = _found(self.places[name])
        return kind

    def __contains__(self, name: object) -> bool:
        return name in self.places  # without importing it

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return vars(import_module(f"{__name__}.{module}"))[name]


BLOCK_MANAGERS = _Classes(
    {
        "naive": "vllm_063.blocks:Naive",
        "prefix-caching": "vllm_063.blocks:PrefixCaching",
        "contiguous": "vllm_063.blocks:Contiguous",
        "vllm-0.3.3": "vllm_033:Vllm033Tables",
        "vllm-v1": "vllm_v1.manager:KVCacheManager",
        "vllm-v1-prefix-caching": "vllm_v1.manager:KVCacheManager",
        "nano-vllm": "nano:NanoTables",
        "nano-vllm-2025-08": "nano:NanoTables2025",
        "sglang": "sglang.manager:SglangTables",
        "sglang-radix": "sglang.manager:SglangRadixTables",
    }
)
"""Values of `--block-manager`: who holds which KV block, and what can still be hit."""

_FORMULAS = {
    "vllm": "memory:VllmMemory",
    "sglang": "sglang.server:SglangMemory",
    "nano-vllm": "memory:NanoMemory",
}
"""Values of `--memory-formula`."""


def memory_formula(name: str | None) -> Formula:
    """Returns the rule by which an engine counts its KV blocks; vLLM's for None."""
    formula: Formula = _found(_FORMULAS[name or "vllm"])()
    return formula


def __getattr__(name: str) -> Any:
    """The classes behind these tables, imported when they are asked for."""
    places = [*BLOCK_MANAGERS.places.values()]
    for engine in ENGINES.values():
        places += engine.schedulers
    for place in places:
        if place.endswith(f":{name}"):
            return _found(place)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
