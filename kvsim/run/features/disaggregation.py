"""The part of one engine in a prefill/decode split: its connector, and how fast its KV moves.

vLLM 0.33.0 `distributed/kv_transfer/kv_connector/v1/nixl/`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.engines.vllm_v1.nixl import Nixl
from kvsim.errors import ConfigError
from kvsim.machine.link import TransferTimes, make_transfer_times
from kvsim.machine.memory import block_bytes
from kvsim.machine.models import Model
from kvsim.run.features.offload import asked, role_of
from kvsim.run.replica.rdma import Lease
from kvsim.settings.config import RunConfig
from kvsim.settings.library import build


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


def side_of(config: RunConfig, model: Model, blocks: KVCacheManager) -> Side:
    """The part of an engine that the settings ask for. Raises `ConfigError`."""
    wanted = asked(config)
    assert wanted is not None and wanted.kv_role is not None
    if config.data_parallel_size > 1:
        raise ConfigError(
            "data_parallel_size: ranks of a prefill/decode split are not simulated; use 1"
        )
    lease = build("kv_connector_extra_config", Lease, wanted.kv_connector_extra_config)
    return Side(
        role_of(config),
        Nixl(blocks, wanted.kv_role),
        make_transfer_times(config),
        lease,
        block_bytes(model, config) * config.tensor_parallel_size,
    )
