"""One GPU and its links, as figures with a stated source each.

The figures are read from a TOML of `configs/hardware`. kvsim measured none of them. Peaks are from
the maker's data sheet; efficiencies are fitted to public measurements or estimated, as `source`
says for each figure. Measured step times are in profiles (`kvsim.cost.profile`).

A GPU is found by the name of its file, by its name in the CUDA runtime and by the aliases in the
file. Case, punctuation, order, makers' words and the unit of a size do not count: `H100`,
`NVIDIA H100 80GB HBM3`, `h100-80gb` and `h100-80` are one GPU.

Copies over its links take times without a clock. A swap moves whole blocks, and the number of
copies decides its speed more than the link does: a block that is stored layer by layer is many
small pieces, each of which costs at least `copy_overhead_us`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from kvsim.errors import ConfigError
from kvsim.machine.models import Model
from kvsim.machine.models.parts import ExpertWeights
from kvsim.settings.config import RunConfig, read_toml
from kvsim.settings.library import build, convert, find, is_at, names, read_by

Above0 = Annotated[float, Meta(gt=0, le=1e9)]
AtLeast0 = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
T = TypeVar("T", "AllReduce", "LargeMessages")

GIB = 2**30

PCIE_5_GB_S = 64
"""One direction of 16 lanes of PCIe 5: 16 x 32 Gbit/s."""


class LargeMessages(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of `AllReduce` for messages of `from_bytes` and more: libraries change their protocol
    with the size."""

    from_bytes: Above0
    latency_us: AtLeast0
    bandwidth_gb_s: Above0


class AllReduce(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sum over the GPUs of one tensor-parallel group.

    Time: `latency_us` + 2 (n - 1) / n x bytes / `bandwidth_gb_s` for n GPUs (ring all-reduce).
    """

    latency_us: AtLeast0
    bandwidth_gb_s: Above0
    large: LargeMessages | None = None
    gpus: int | None = None
    """Number of GPUs that they were measured between; None: they are taken to hold for any."""

    def slowed(self, factor: float) -> AllReduce:
        """Returns the figures of a link that takes `factor` times as long."""

        def figures(of: T) -> T:
            latency_us, bandwidth_gb_s = of.latency_us * factor, of.bandwidth_gb_s / factor
            return replace(of, latency_us=latency_us, bandwidth_gb_s=bandwidth_gb_s)

        return replace(figures(self), large=self.large and figures(self.large))

    def us(self, moved_bytes: float, gpus: int) -> float:
        """Microseconds to sum `moved_bytes` over `gpus` GPUs; 0 for one GPU."""
        if gpus == 1:
            return 0.0
        figures: AllReduce | LargeMessages = self
        if self.large is not None and moved_bytes >= self.large.from_bytes:
            figures = self.large
        moved_bytes *= 2 * (gpus - 1) / gpus
        # 1 GB/s is 1,000 bytes per microsecond.
        return figures.latency_us + moved_bytes / figures.bandwidth_gb_s / 1e3


class ExpertProducts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What kernels reach that multiply the rows of all experts at once."""

    tflop_s: Above0
    """With many rows for each expert."""
    padding_rows: AtLeast0
    """Rows that are multiplied for each expert besides its own, as rows come in blocks and some
    experts have more of them than others."""


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU; GiB are 2^30 bytes, GB are 10^9 bytes."""

    name: str
    device_names: list[str] = []
    """Names of the device in the CUDA runtime, and so in the profiles that were measured on it. The
    first is the one that engines see."""
    aliases: list[str] = []
    """What else people call it."""
    memory_gib: Above0
    """Total memory as the CUDA runtime reports it, which is below the size on the box."""
    context_gib: AtLeast0
    """Memory in use as soon as a process has a CUDA context, before anything is allocated."""
    library_gib: AtLeast0
    """Memory that libraries take outside the tensor allocator while the model runs."""
    memory_bandwidth_gb_s: Above0
    tflop_s: dict[str, Above0]
    """Dense peak per type: float32, float16, bfloat16, fp8."""
    compute_efficiency: Share
    """Reached share of `tflop_s` in matrix products."""
    expert_products: dict[ExpertWeights, ExpertProducts] = {}
    """By how the weights of experts are stored; others reach what matrix products do."""
    bandwidth_efficiency: Share
    """Reached share of `memory_bandwidth_gb_s` when weights and KV are read."""
    layer_overhead_us: AtLeast0
    """Launch floors and small kernels of one layer, per step."""
    step_overhead_us: AtLeast0
    """Host work between two steps that the GPU waits for."""
    multiprocessors: Annotated[int, Meta(ge=1)] | None = None
    """Streaming multiprocessors, where they are known."""
    link_bandwidth_gb_s: Above0
    """Host link, one direction, as reached by large copies from pinned memory."""
    copy_overhead_us: AtLeast0
    """Shortest time of one copy over the host link."""
    all_reduce: AllReduce
    gather_scatter: AllReduce | None = None
    """Gathering tokens and scattering their sums, which moves as much as one all-reduce, where that
    takes another time."""
    source: dict[str, str]
    """Where each figure comes from, by key."""

    @property
    def memory_bytes(self) -> int:
        """Total memory."""
        return int(self.memory_gib * GIB)

    @property
    def device_name(self) -> str:
        """The name that the CUDA runtime reports, or the file's name where none is stated."""
        return self.device_names[0] if self.device_names else self.name

    @property
    def nvlink(self) -> bool:
        """Whether GPUs of a group are connected by NVLink: faster than 16 lanes of PCIe 5 are."""
        return self.all_reduce.bandwidth_gb_s > PCIE_5_GB_S

    def products_of(self, model: Model, dtype: str) -> ExpertProducts | None:
        """What products of the experts of a model reach; None: what others do, or it has none."""
        weights = model.expert_weights if model.experts and dtype != "float32" else None
        return self.expert_products.get(weights) if weights else None

    @property
    def exchange(self) -> AllReduce:
        """What replicas send each other for the sake of experts."""
        return self.gather_scatter or self.all_reduce

    def flop_s(self, dtype: str) -> float:
        """Peak floating-point operations per second, or a `ConfigError` if none is stated."""
        if dtype not in self.tflop_s:
            raise ConfigError(
                f"hardware {self.name}: no tflop_s for {dtype};"
                f" use --dtype {' or '.join(self.tflop_s)}, or add the figure"
            )
        return self.tflop_s[dtype] * 1e12


def load_hardware(name_or_path: str) -> Hardware:
    """The GPU that a name means, or that of a TOML at this path; errors as in `hardware_path`."""
    return read_by(_read, "hardware", hardware_path(name_or_path))


def hardware_path(name_or_path: str) -> Path:
    """The TOML that a name means; a file that exists is taken as it is.

    Raises `ConfigError` with the nearest names for an unknown name, and with all that fit for an
    ambiguous one.
    """
    if is_at(Path.is_file, Path(name_or_path)) or name_or_path in names("hardware"):
        return find("hardware", name_or_path)
    known, key = _names_by_key(), _key(name_or_path)
    key = key if key in known else _sorted_key(name_or_path)
    if key not in known and name_or_path not in known.values():
        key = _key(name_or_path)
        # No name is this one: those that contain it may be meant, as several of `h100` are.
        fitting = sorted({name for other, name in known.items() if key in other})
        if len(fitting) > 1:
            raise ConfigError(
                f"no hardware named {name_or_path!r}; it could be {', '.join(fitting)}; give one of"
                " them, or the path of a file"
            )
    return find("hardware", known.get(key, name_or_path))


def _read(path: Path) -> Hardware:
    return convert(read_toml(str(path)), Hardware, str(path))


@cache
def _names_by_key() -> dict[str, str]:
    """Key of each name of a shipped GPU → name of its file."""
    found = {}
    for name in names("hardware"):
        hardware = _read(find("hardware", name))
        for other in (name, *hardware.device_names, *hardware.aliases):
            # Words may stand in any order, unless another name is spelt so.
            found[_key(other)] = name
            found.setdefault(_sorted_key(other), name)
    return found


# The number behind SXM is the generation of the socket, which no one needs to tell GPUs apart.
_MAKERS_WORDS = re.compile(
    r"nvidia|geforce|rtx|tesla|amd|instinct|generation|(?<=sxm)\d|[^a-z0-9 ]"
)
_UNIT = re.compile(r"\b(\d{2,3}) ?g(?:i?b)?\b")


def _key(name: str) -> str:
    """A name without case, punctuation, makers' words and the unit of a size."""
    return "".join(_parts(name))


def _sorted_key(name: str) -> str:
    return "".join(sorted(_parts(name)))


def _parts(name: str) -> list[str]:
    spaced = _UNIT.sub(r"\1", re.sub(r"[-_]", " ", name.lower()))
    return _MAKERS_WORDS.sub("", spaced).split()


BOTH_WAYS = 0.834
"""Speed of each direction of PCIe 5 while both copy, as a share of one alone: 83.4 GB/s both
ways together, 50 GB/s one way (H100; vLLM blog of 2026-01-08)."""

MOST = 1e9
"""Of a time of one copy, in its unit."""
LINK, KV_TRANSFER, STAGE_LINK, FRONT_END = LINKS = "link", "kv_transfer", "stage_link", "front_end"
"""Tables of `[cost]` that price ways, not steps: of KV blocks, and of requests to their engine."""


class CopiedBlock(NamedTuple):
    """A KV block of one GPU, as it is copied."""

    bytes: int
    tensors: int
    """Those of all layers that have a part of it."""


class LinkTimes:
    """One direction of the host link of one GPU.

    A block takes pieces x max(`copy_overhead_us`, piece / bandwidth).
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
        block: CopiedBlock,
        hardware: Hardware,
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
        pieces = block.tensors if layout != "cross" else 1
        # Bytes over GB/s are nanoseconds.
        self._block_ns = pieces * max(
            _time("copy_overhead_us", overhead) * 1e3, block.bytes / pieces / bandwidth
        )
        self._described = {
            "layout": layout or "layer",
            "pieces_per_block": pieces,
            "block_bytes": block.bytes,
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
    args = link_settings(config, LINK)
    if whole and not {"layout", "block_us"} & args.keys():
        args = {**args, "layout": "cross"}
    tensors = sum(each.layers * each.tensors for each in model.shard(1).kv_groups)
    block = CopiedBlock(block_bytes, tensors)
    return build("cost.link", LinkTimes, args, block=block, hardware=hardware)


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
    return build("cost.kv_transfer", TransferTimes, link_settings(config, KV_TRANSFER))


class FrontEndTimes:
    """The way of a request through the front end of its server: HTTP, chat template, tokenizer.

    It takes `request_ms`, and `token_us` for each token of the prompt. Raises `ValueError`.
    """

    def __init__(self, *, request_ms: float = 0.0, token_us: float = 0.0) -> None:
        self._request_ns = _time("request_ms", request_ms, "milliseconds") * 1e6
        self._token_ns = _time("token_us", token_us) * 1e3

    def request_ns(self, prompt_tokens: int) -> int:
        """Nanoseconds for a request that has the front end for itself."""
        return round(self._request_ns + prompt_tokens * self._token_ns)


def make_front_end_times(config: RunConfig) -> FrontEndTimes | None:
    """What the table `[cost.front_end]` says; None without one. Raises `ConfigError`."""
    if FRONT_END not in config.cost:
        return None
    return build("cost.front_end", FrontEndTimes, link_settings(config, FRONT_END))


def link_settings(config: RunConfig, key: str) -> Mapping[str, Any]:
    """What the settings say of a way. Raises `ConfigError`."""
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
