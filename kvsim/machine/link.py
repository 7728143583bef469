"""Times of copies over links: pure figures, without a clock.

A swap moves whole blocks. The number of copies decides its speed more than the link does: a block
that is stored layer by layer is many small pieces, each of which costs at least `copy_overhead_us`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kvsim.errors import ConfigError
from kvsim.machine.hardware import Hardware
from kvsim.machine.models import Model
from kvsim.settings.config import RunConfig
from kvsim.settings.library import build

BOTH_WAYS = 0.834
"""Speed of each direction of PCIe 5 while both copy, as a share of one alone: 83.4 GB/s both
ways together, 50 GB/s one way (H100; vLLM blog of 2026-01-08)."""

MOST = 1e9
"""Of a time of one copy, in its unit."""
LINK, KV_TRANSFER, STAGE_LINK = LINKS = "link", "kv_transfer", "stage_link"
"""Tables of `[cost]` that price transfers, not steps."""


class LinkTimes:
    """One direction of the host link of one GPU.

    A block of `block_bytes` bytes takes pieces x max(`copy_overhead_us`, piece / bandwidth).
    `layout` `layer` has 2 x layers pieces, keys and values of each layer apart (vLLM 0.6.3,
    vllm/worker/cache_engine.py: one tensor per layer), or one piece per layer of latent vectors;
    `cross` has one. Bandwidth and overhead
    default to the hardware's. `block_us` sets the time of a block and replaces all of these.
    `call_us` is added once per transfer. `both_ways`: speed of each direction while both copy, as a
    share of that of one alone. Only a KV offload copies both ways at once; set 1 for links whose
    directions do not share, as NVLink-C2C. Raises `ValueError`.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        block_bytes: int,
        *,
        layout: Literal["layer", "cross"] | None = None,
        bandwidth_gb_s: float | None = None,
        copy_overhead_us: float | None = None,
        block_us: float | None = None,
        call_us: float = 0.0,
        both_ways: float = BOTH_WAYS,
    ) -> None:
        if not 0.5 <= both_ways <= 1:
            raise ValueError(f"both_ways: {both_ways} is not a share from 0.5 to 1")
        self.both_ways = both_ways
        self._call_ns = _time("call_us", call_us) * 1e3
        if block_us is not None:
            if (layout, bandwidth_gb_s, copy_overhead_us) != (None, None, None):
                raise ValueError(
                    "block_us is the whole time of a block; leave out the other settings"
                )
            self._described: dict[str, Any] = {"block_us": _time("block_us", block_us)}
            self._block_ns = block_us * 1e3
            return
        chosen = hardware.link_bandwidth_gb_s if bandwidth_gb_s is None else bandwidth_gb_s
        bandwidth = _bandwidth(chosen)
        overhead = hardware.copy_overhead_us if copy_overhead_us is None else copy_overhead_us
        groups = model.shard(1).kv_groups
        pieces = sum(each.layers * each.tensors for each in groups) if layout != "cross" else 1
        self._block_ns = pieces * max(
            _time("copy_overhead_us", overhead) * 1e3, block_bytes / pieces / bandwidth
        )
        self._described = {
            "layout": layout or "layer",
            "pieces_per_block": pieces,
            "block_bytes": block_bytes,
            "bandwidth_gb_s": bandwidth,
            "copy_overhead_us": overhead,
            "block_us": self._block_ns / 1e3,
        }

    def transfer_ns(self, blocks: int) -> int:
        """Nanoseconds for `blocks` blocks in one direction, one after another."""
        return round(self._call_ns + blocks * self._block_ns) if blocks else 0

    def describe(self) -> dict[str, Any]:
        """Figures in plain values, for the provenance of a result."""
        if not self._call_ns:
            return dict(self._described)
        return {**self._described, "call_us": self._call_ns / 1e3}


def make_link(
    model: Model, hardware: Hardware, config: RunConfig, block_bytes: int, whole: bool = False
) -> LinkTimes:
    """The link that the table `[cost.link]` describes; raises `ConfigError`.

    `whole`: blocks are one piece unless the table says otherwise, as in vLLM V1's offload.
    """
    args = _table(config, LINK)
    if whole and not {"layout", "block_us"} & args.keys():
        args = {**args, "layout": "cross"}
    times: LinkTimes = build(
        "cost.link", LinkTimes, args, model=model, hardware=hardware, block_bytes=block_bytes
    )
    return times


class TransferTimes:
    """KV blocks that one engine reads from another over the network (RDMA).

    A transfer takes `call_us` + bytes / `bandwidth_gb_s`, the bandwidth of all GPUs of an engine
    together. The defaults, 0.4 ms and 140 GiB/s, fit a public measurement within 10 % from 20 MB to
    4.5 GiB (Qwen3-8B, H800 with 8 ConnectX-7 over RoCE; Mooncake,
    `performance/vllm/vllm-v1-pd-performance.md`). Before the first transfer between two engines,
    they shake hands for `handshake_ms`, about 2 s (github.com/neuralmagic/vllm/pull/63). Set 0 for
    engines that have met before. Raises `ValueError`.
    """

    def __init__(
        self,
        *,
        bandwidth_gb_s: float = 150.3,
        call_us: float = 400.0,
        handshake_ms: float = 2000.0,
    ) -> None:
        self._bandwidth = _bandwidth(bandwidth_gb_s)
        self._call_ns = _time("call_us", call_us) * 1e3
        self.handshake_ns = round(_time("handshake_ms", handshake_ms, "milliseconds") * 1e6)

    def transfer_ns(self, moved_bytes: int) -> int:
        """Nanoseconds of one transfer that has the network for itself."""
        return round(self._call_ns + moved_bytes / self._bandwidth)

    def describe(self) -> dict[str, float]:
        """Figures in plain values, for the provenance of a result."""
        return {
            "bandwidth_gb_s": self._bandwidth,
            "call_us": self._call_ns / 1e3,
            "handshake_ms": self.handshake_ns / 1e6,
        }


def make_transfer_times(config: RunConfig) -> TransferTimes:
    """The network that the table `[cost.kv_transfer]` describes; raises `ConfigError`."""
    times: TransferTimes = build("cost.kv_transfer", TransferTimes, _table(config, KV_TRANSFER))
    return times


def _table(config: RunConfig, key: str) -> Mapping[str, Any]:
    """What the settings say of a link. Raises `ConfigError`."""
    args = config.cost.get(key, {})
    if not isinstance(args, Mapping):
        raise ConfigError(f"cost.{key}: expected a table of keys, got {args!r}")
    return args


def _time(key: str, value: float, unit: str = "microseconds") -> float:
    """Where a million of them fit into 64 bits of nanoseconds."""
    if not 0 <= value <= MOST:
        raise ValueError(f"{key}: {value} is not a time; use {unit} from 0 to {MOST:.0e}")
    return value


def _bandwidth(gb_s: float) -> float:
    if not 0 < gb_s < float("inf"):
        raise ValueError(f"bandwidth_gb_s: {gb_s} is not a bandwidth above 0")
    if gb_s < 1 / MOST:
        raise ValueError(f"bandwidth_gb_s: {gb_s} is less than a byte in a second; use more")
    return gb_s
