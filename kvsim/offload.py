"""The CPU tier that the settings of a run ask for: its size, its rules and its speed.

vLLM 0.33.0 `config/vllm.py`, `v1/kv_offload/cpu/spec.py`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from kvsim.config import RunConfig
from kvsim.engine.tables import Tables
from kvsim.engines import GROUP_MANAGER, Engine
from kvsim.engines.vllm_v1_features.cpu_tier import CpuTier
from kvsim.engines.vllm_v1_features.offloading import Offloading
from kvsim.engines.vllm_v1_features.timed import TimedWorker
from kvsim.engines.vllm_v1_groups.group import Group
from kvsim.engines.vllm_v1_groups.mamba import Mamba
from kvsim.engines.vllm_v1_groups.manager import GroupTables
from kvsim.errors import ConfigError
from kvsim.hardware import Hardware
from kvsim.library import build
from kvsim.link import make_link
from kvsim.memory import block_bytes
from kvsim.models import Model

PAGE_BYTES = 4096
"""Chunks begin at a multiple of this."""


class Offload(NamedTuple):
    """The parts of a scheduler that keep KV in CPU memory."""

    connector: Offloading
    worker: TimedWorker
    block_bytes: int
    """Bytes of a block on all GPUs together."""
    pool_blocks: int
    """Blocks of the GPU's pool."""

    def parts(self) -> dict[str, Any]:
        """Returns the arguments of a scheduler."""
        return {"connector": self.connector, "worker": self.worker}

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result should know, one line each."""
        tier, size = self.connector.tier, self.connector.blocks_per_chunk
        lines = []
        if tier.capacity * size <= self.pool_blocks:
            lines.append(
                f"kv_offloading_size: the tier has room for {tier.capacity * size:,} blocks, and"
                f" the GPU for {self.pool_blocks:,}: it mostly keeps what the GPU keeps, too"
            )
        if self.connector.prompts_only:
            lines.append(
                "kv_offloading_size: prompts only are stored (offload_prompt_only), so an answer"
                " comes back from CPU memory once it was part of a prompt"
            )
        return tuple(lines)

    def describe(self) -> dict[str, Any]:
        """What was stored and loaded, in plain values."""
        tier, worker = self.connector.tier, self.worker
        lanes = {"stored": (worker.stores,), "loaded": (worker.loads, worker.within)}
        moved: dict[str, Any] = {}
        for name, parts in lanes.items():
            blocks = sum(lane.blocks for lane in parts)
            moved[f"{name}_blocks"] = blocks
            moved[f"{name}_bytes"] = blocks * self.block_bytes
            moved[f"{name}_copy_s"] = sum(lane.busy_ns for lane in parts) / 1e9
        return {
            "capacity_chunks": tier.capacity,
            "blocks_per_chunk": self.connector.blocks_per_chunk,
            **moved,
            "flushed_jobs": self.connector.flushed,
            "refused_stores": tier.refused,
        }


def offloads(config: RunConfig, engine: Engine, groups: tuple[Group, ...]) -> bool:
    """Whether KV blocks are kept in CPU memory. Raises `ConfigError` where the engine cannot."""
    if not config.kv_offloading_size:
        if config.kv_connector_extra_config:
            raise ConfigError(
                "kv_connector_extra_config: there is no KV offload; set --kv-offloading-size"
            )
        return False
    if not engine.grouped_schedulers or ":" in config.engine:
        raise ConfigError(f"kv_offloading_size: {config.engine} has no such setting; leave it out")
    if config.block_manager not in (None, GROUP_MANAGER):
        raise ConfigError(
            f"kv_offloading_size: it needs the block manager {GROUP_MANAGER}; leave out"
            " --block-manager"
        )
    if any(isinstance(group, Mamba) for group in groups):
        raise ConfigError(
            "kv_offloading_size: the offload of states of linear attention is not simulated; leave"
            " it out for this model"
        )
    return True


def offload_of(config: RunConfig, model: Model, hardware: Hardware, blocks: Tables) -> Offload:
    """The tier that `kv_offloading_size` asks for. Raises `ConfigError`."""
    assert isinstance(blocks, GroupTables)
    size = block_bytes(model, config)
    connector: Offloading = build(
        "kv_connector_extra_config",
        _native,
        config.kv_connector_extra_config,
        blocks=blocks,
        capacity_bytes=int(config.kv_offloading_size * (1 << 30)),
        block_bytes=size * config.tensor_parallel_size,
    )
    # All GPUs copy their parts at once.
    link = make_link(model, hardware, config, size, whole=True)
    worker = TimedWorker(link.transfer_ns)
    return Offload(connector, worker, size * config.tensor_parallel_size, blocks.gpu.size)


def _native(
    *,
    blocks: GroupTables,
    capacity_bytes: int,
    block_bytes: int,
    blocks_per_chunk: int = 1,
    eviction_policy: Literal["lru", "arc"] = "lru",
    store_threshold: int = 0,
    max_tracker_size: int = 64_000,
    offload_prompt_only: bool = True,
    sync_load_budget_bytes: int = 0,
) -> Offloading:
    if min(blocks_per_chunk, max_tracker_size) < 1:
        raise ValueError("blocks_per_chunk and max_tracker_size are numbers of at least 1")
    if min(store_threshold, sync_load_budget_bytes) < 0:
        raise ValueError("store_threshold and sync_load_budget_bytes are not below 0")
    chunk_bytes = -(-block_bytes * blocks_per_chunk // PAGE_BYTES) * PAGE_BYTES
    chunks = capacity_bytes // chunk_bytes
    if not chunks:
        raise ValueError(
            f"a chunk takes {chunk_bytes:,} bytes, more than --kv-offloading-size; raise it"
        )
    tier = CpuTier(
        chunks,
        eviction_policy=eviction_policy,
        store_threshold=store_threshold,
        max_tracker_size=max_tracker_size,
    )
    return Offloading(
        blocks,
        tier,
        blocks_per_chunk=blocks_per_chunk,
        offload_prompt_only=offload_prompt_only,
        sync_load_budget_bytes=sync_load_budget_bytes,
        bytes_per_token=sum(block_bytes // group.block_size for group in blocks.groups),
    )
