"""Builds the KV connector of a run: its tiers, their rules and their speed.

vLLM 0.33.0 `v1/kv_offload/cpu/spec.py`,
`distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from kvsim.core.blocks import BlockManager
from kvsim.core.scheduler import Scheduler
from kvsim.engines.vllm_v1.connector import Connector
from kvsim.engines.vllm_v1.cpu_tier import POLICIES, CpuTier
from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.engines.vllm_v1.nixl import Nixl
from kvsim.engines.vllm_v1.offloading import Offloading
from kvsim.engines.vllm_v1.simple import SimpleOffload
from kvsim.engines.vllm_v1.storage import Storage
from kvsim.engines.vllm_v1.timed import TimedWorker
from kvsim.errors import ConfigError
from kvsim.machine.hardware import Hardware, TransferTimes, make_link, make_transfer_times
from kvsim.machine.memory import block_bytes
from kvsim.machine.models import Model
from kvsim.run.offload import NATIVE, ROLES, asked
from kvsim.settings.config import RunConfig
from kvsim.settings.library import build, construct, look_up

PAGE_BYTES = 4096
"""Chunks begin at a multiple of this."""
TIERED = "TieringOffloadingSpec"


class Offload(NamedTuple):
    """The parts of a scheduler that keep KV outside the GPU."""

    connector: Connector
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
        room = self.connector.capacity_blocks
        if not 0 < room <= self.pool_blocks:
            return ()
        return (
            f"KV offload: the tier has room for {room:,} blocks, and the GPU for"
            f" {self.pool_blocks:,}: it mostly keeps what the GPU keeps, too",
        )

    def describe(self) -> dict[str, Any]:
        """Returns the entries of the provenance of a result: what was stored and loaded."""
        worker = self.worker
        lanes = {"stored": (worker.stores,), "loaded": (worker.loads, worker.within)}
        moved: dict[str, Any] = {}
        for name, parts in lanes.items():
            moved[f"{name}_jobs"] = sum(lane.finished for lane in parts)
            moved[f"{name}_blocks"] = worker.blocks[name]
            moved[f"{name}_bytes"] = worker.blocks[name] * self.block_bytes
            moved[f"{name}_copy_s"] = sum(lane.busy_ns for lane in parts) / 1e9
        name = type(self.connector).__name__
        return {"kv_offload": {"connector": name, **moved, **self.connector.describe()}}


def offload_of(
    config: RunConfig, model: Model, hardware: Hardware, blocks: BlockManager, engine: Scheduler
) -> Offload | Side:
    """What keeps KV beyond the GPU, as the settings ask for it. Raises `ConfigError`."""
    wanted = asked(config)
    assert isinstance(blocks, KVCacheManager) and wanted is not None
    assert wanted.kv_connector is not None
    # On each GPU, and on all together.
    size = block_bytes(model, config)
    whole = size * config.tensor_parallel_size
    name, args = wanted.kv_connector, wanted.kv_connector_extra_config
    if wanted.kv_role is not None:
        if config.data_parallel_size > 1:
            raise ConfigError(
                "data_parallel_size: ranks of a prefill/decode split are not simulated; use 1"
            )
        lease = build("kv_connector_extra_config", Lease, args)
        nixl = Nixl(blocks, wanted.kv_role)
        return Side(ROLES[wanted.kv_role], nixl, make_transfer_times(config), lease, whole)
    if config.kv_offloading_size and name not in CONNECTORS:
        raise ConfigError(
            f"kv_offloading_size: {name} does not obey it; leave it out, or leave kv_connector"
            " out of kv_transfer_config"
        )
    connector = build(
        "kv_connector_extra_config" if name in CONNECTORS else f"kv_connector: {name}",
        _class(name),
        args,
        blocks=blocks,
        block_bytes=whole,
        world_size=config.tensor_parallel_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
    )
    # All GPUs copy their parts at once.
    link = make_link(model, hardware, config, size, whole=True)
    worker = TimedWorker(
        link.transfer_ns, both_ways=link.both_ways, stores_at_once=connector.stores_at_once
    )
    return Offload(connector, worker, whole, blocks.gpu.size)


def _class(name: str) -> Callable[..., Connector]:
    if name not in CONNECTORS and ":" not in name:
        raise ConfigError(
            f"kv_transfer_config: kv_connector: {name} is not simulated; choose from"
            f" {', '.join(CONNECTORS)}, or give package.module:Class"
        )
    kind: Callable[..., Connector] = look_up("kv_connector", CONNECTORS, name)
    if name not in CONNECTORS and not (isinstance(kind, type) and issubclass(kind, Connector)):
        raise ConfigError(
            f"kv_connector: {name} is not a connector; make it a subclass of"
            " kvsim.engines.vllm_v1.connector.Connector"
        )
    return kind


def _native(
    *,
    blocks: KVCacheManager,
    block_bytes: int,
    cpu_bytes_to_use: int,
    spec_name: Literal["CPUOffloadingSpec", "TieringOffloadingSpec"] = "CPUOffloadingSpec",
    secondary_tiers: list[dict[str, Any]] | None = None,
    block_size: int | None = None,
    blocks_per_chunk: int | None = None,
    eviction_policy: str = "lru",
    store_threshold: int = 0,
    max_tracker_size: int = 64_000,
    offload_prompt_only: bool = True,
    sync_load_budget_bytes: int = 0,
) -> Offloading:
    per_chunk = _blocks_per_chunk(blocks, block_size, blocks_per_chunk)
    if min(per_chunk, max_tracker_size) < 1:
        raise ValueError("blocks_per_chunk and max_tracker_size are numbers of at least 1")
    if min(store_threshold, sync_load_budget_bytes) < 0:
        raise ValueError("store_threshold and sync_load_budget_bytes are not below 0")
    # vLLM rounds chunks up to pages (`v1/kv_offload/cpu/spec.py`).
    chunk_bytes = -(-block_bytes * per_chunk // PAGE_BYTES) * PAGE_BYTES
    chunks = cpu_bytes_to_use // chunk_bytes
    if chunks < 1:
        raise ValueError(
            f"a chunk takes {chunk_bytes:,} bytes, more than --kv-offloading-size; raise it"
        )
    policy = look_up("eviction_policy", POLICIES, eviction_policy)
    if secondary_tiers and spec_name != TIERED:
        raise ValueError(f'secondary_tiers have no effect without "spec_name": "{TIERED}"')
    tier = CpuTier(
        chunks,
        policy=policy,
        store_threshold=store_threshold,
        max_tracker_size=max_tracker_size,
        storage=_storage(secondary_tiers, chunk_bytes) if secondary_tiers else None,
    )
    return Offloading(
        blocks,
        tier,
        blocks_per_chunk=per_chunk,
        offload_prompt_only=offload_prompt_only,
        sync_load_budget_bytes=sync_load_budget_bytes,
        # A token has a slot in a block of each group.
        bytes_per_token=sum(block_bytes // group.block_size for group in blocks.groups),
    )


def _blocks_per_chunk(blocks: KVCacheManager, tokens: int | None, number: int | None) -> int:
    """The blocks of a chunk, given as a number or in tokens (`block_size`)."""
    if tokens is None:
        return 1 if number is None else number
    sizes = {group.block_size for group in blocks.groups}
    if number is not None:
        raise ValueError("block_size and blocks_per_chunk say the same; give one of them")
    if len(sizes) > 1 or tokens < 1 or tokens % min(sizes):
        raise ValueError(
            f"block_size: {tokens} tokens are not a number of blocks of all groups; use"
            " blocks_per_chunk"
        )
    return tokens // sizes.pop()


def _storage(tiers: list[dict[str, Any]], chunk_bytes: int) -> Storage:
    """The tier below the CPU: one, of the user's own class."""
    if len(tiers) > 1:
        raise ValueError("secondary_tiers: one tier below the CPU is simulated; give one")
    args = dict(tiers[0])
    name, path = str(args.pop("type", "")), args.pop("module_path", None)
    name = f"{path}:{name}" if path else name
    if ":" not in name:
        raise ValueError(
            f"secondary_tiers: type: {name or 'none'}; give package.module:Class, a subclass of"
            " kvsim.engines.vllm_v1.storage.Storage"
        )
    storage = construct("secondary_tiers", {}, name, args, chunk_bytes=chunk_bytes)
    if not isinstance(storage, Storage):
        raise ValueError(f"secondary_tiers: {name} is not a subclass of Storage")
    return storage


CONNECTORS: dict[str, Callable[..., Connector]] = {
    NATIVE: _native,
    "SimpleCPUOffloadConnector": SimpleOffload,
}
"""Values of `kv_connector`; also `package.module:Class`."""


class Lease:
    """How long a prefill engine keeps the blocks of a prompt that nobody reads.

    They are kept for `kv_lease_duration` seconds. While the decode engine has the request, its
    heartbeats, a sixth of that time apart at least, make it two thirds from then on, at least
    (`nixl/base_scheduler.py`, `nixl/base_worker.py`). Raises `ValueError`.
    """

    def __init__(self, *, kv_lease_duration: int = 30) -> None:
        if kv_lease_duration < 1:
            raise ValueError(
                f"kv_lease_duration: {kv_lease_duration} is not a time of at least 1 s"
            )
        self.duration_ns = kv_lease_duration * 10**9
        self.interval_ns = kv_lease_duration // 6 * 10**9
        self.extension_ns = kv_lease_duration * 2 // 3 * 10**9


class Side(NamedTuple):
    """What makes an engine one side of a split."""

    role: str
    """`prefill` or `decode`."""
    connector: Nixl
    times: TransferTimes
    lease: Lease
    block_bytes: int
    """Bytes of a block on all GPUs together."""

    def parts(self) -> dict[str, Any]:
        """Returns the arguments of a scheduler."""
        return {"connector": self.connector}

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result should know, one line each."""
        if not self.times.handshake_ns:
            return ()
        return (
            "KV transfer: engines that meet for the first time shake hands for"
            f" {self.times.handshake_ns / 1e6:g} ms, and prompts wait for it"
            " (cost.kv_transfer.handshake_ms)",
        )

    def describe(self) -> dict[str, Any]:
        """Returns the entries of the provenance of a result."""
        return {"kv_transfer": {"role": self.role, **self.times.describe()}}
