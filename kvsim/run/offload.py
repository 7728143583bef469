"""The KV connector that the settings of a run ask for; `connectors` makes it.

vLLM 0.33.0 `config/vllm.py`, `config/kv_transfer.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from kvsim.core.request import DECODE, PREFILL
from kvsim.engines import Engine
from kvsim.engines.vllm_v1.groups import Group, Mamba
from kvsim.errors import ConfigError
from kvsim.machine.hardware import GIB
from kvsim.run.checks import check_features
from kvsim.settings.config import RunConfig
from kvsim.settings.library import convert

NATIVE = "OffloadingConnector"
"""The connector of `kv_offloading_size`, where no other one is named."""
NIXL = "NixlConnector"
"""The connector of a prefill/decode split."""
ROLES = {"kv_producer": PREFILL, "kv_consumer": DECODE}
"""`kv_role` → the part of an engine in such a split."""


class KvTransferConfig(Struct, frozen=True, kw_only=True):
    """`--kv-transfer-config`, under vLLM's own keys."""

    kv_connector: str | None = None
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    kv_connector_extra_config: dict[str, Any] = {}
    kv_connector_module_path: str | None = None
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"
    """Simulated loads do not fail."""
    engine_id: str | None = None
    kv_buffer_device: str | None = None
    kv_port: int | None = None
    enable_permute_local_kv: bool = False


def asked(config: RunConfig) -> KvTransferConfig | None:
    """The connector that the settings ask for; None without one. Raises `ConfigError`."""
    transfer = convert(config.kv_transfer_config, KvTransferConfig, "kv_transfer_config")
    # What is given by itself counts more than what the JSON says.
    extra = {**transfer.kv_connector_extra_config, **config.kv_connector_extra_config}
    name = transfer.kv_connector
    if config.kv_offloading_size:
        if config.kv_offloading_backend != "native":
            raise ConfigError(
                f"kv_offloading_backend: {config.kv_offloading_backend} keeps the blocks in a"
                " server of its own, which is not simulated; use native"
            )
        name = name or NATIVE
        extra["cpu_bytes_to_use"] = int(config.kv_offloading_size * GIB)
    if name is None:
        if extra:
            raise ConfigError(
                "kv_connector_extra_config: there is no KV offload; set --kv-offloading-size"
            )
        return None
    if name == NIXL:
        return _split(config, transfer, extra)
    if not config.kv_offloading_size and transfer.kv_role != "kv_both":
        raise ConfigError(
            f"kv_transfer_config: kv_role: {transfer.kv_role or 'none'}; a tier stores and loads,"
            " so use kv_both"
        )
    path = transfer.kv_connector_module_path
    return KvTransferConfig(
        kv_connector=f"{path}:{name}" if path else name, kv_connector_extra_config=extra
    )


def role_of(config: RunConfig) -> str:
    """The part of an engine in a prefill/decode split, a value of `ROLES`; empty: it has none.
    Raises `ConfigError`."""
    wanted = asked(config)
    if wanted is None or wanted.kv_connector != NIXL:
        return ""
    assert wanted.kv_role is not None
    return ROLES[wanted.kv_role]


def _split(
    config: RunConfig, transfer: KvTransferConfig, extra: dict[str, Any]
) -> KvTransferConfig:
    """The connector of a prefill/decode split. Raises `ConfigError`."""
    if config.kv_offloading_size:
        raise ConfigError(
            f"kv_offloading_size: a tier beside {NIXL} is not simulated; leave one of the two out"
        )
    if transfer.kv_role not in ROLES:
        raise ConfigError(
            f"kv_transfer_config: kv_role: {transfer.kv_role or 'none'}; an engine either prefills"
            " (kv_producer) or decodes (kv_consumer); choose one"
        )
    if config.n > 1:
        raise ConfigError(f"n: {NIXL} is simulated with one sample; use --n 1")
    return KvTransferConfig(
        kv_connector=NIXL, kv_role=transfer.kv_role, kv_connector_extra_config=extra
    )


def offloads(config: RunConfig, engine: Engine, groups: tuple[Group, ...]) -> bool:
    """Whether KV blocks leave the GPU. Raises `ConfigError` where the engine cannot."""
    if asked(config) is None:
        return False
    key = "kv_offloading_size" if config.kv_offloading_size else "kv_transfer_config"
    check_features(key, config, engine, "has no such setting")
    if any(isinstance(group, Mamba) for group in groups):
        raise ConfigError(
            f"{key}: the offload of states of linear attention is not simulated; leave it out for"
            " this model"
        )
    return True
