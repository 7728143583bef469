"""What the tables of a profile say about a shape, as a table cost model reads them. No torch here.

```
step = a0 + a1 x kernels + a2 x sequences, at least the launch floor if launched eagerly
kernels = dense[tokens] + layers x attention + layers x experts[tokens, active] + head[samples]
attention = decode[n, mean context] + what its uneven lengths add + sum of prefill[q, context]
```
"""

from dataclasses import dataclass, field
from typing import Any

from kvsim_kernels.geometry import Experts
from kvsim_kernels.grid import lengths
from kvsim_kernels.tables import Table, along, between
from kvsim_kernels.uneven import longer_us


@dataclass(frozen=True)
class Setting:
    """What of the first line of the rows prices depend on."""

    layers: int
    tile: int
    capture_sizes: tuple[int, ...]
    decode_kernel: str
    longest: int
    """Longest sequence."""
    experts: Experts | None

    @classmethod
    def of(cls, header: dict[str, Any]) -> "Setting":
        """From the first line of a file of rows."""
        engine = header["engine"]
        return cls(
            header["model"]["layers"],
            engine["tile"],
            tuple(engine["capture_sizes"]),
            engine["decode_kernel"],
            engine["max_model_len"],
            Experts(**header["model"]["experts"]) if "experts" in header["model"] else None,
        )


@dataclass(frozen=True)
class Map:
    """From the time of an attention kernel alone to its time in a step.

    `base` and `slope`: a line to the time in situ. `unequal`: decode batches of unequal lengths,
    as engines have them, over those of equal lengths, which grids consist of.
    """

    base: float = 0.0
    slope: float = 1.0
    unequal: float = 1.0

    def inside(self, us: float) -> float:
        """What a launch that takes `us` alone takes inside a forward pass; at least half of it."""
        return max(self.base + self.slope * us, us / 2)

    def batch(self, us: float) -> float:
        """Microseconds inside a forward pass of a batch with as many tokens in unequal lengths."""
        return self.unequal * self.inside(us)


@dataclass
class Prices:
    """Prices in microseconds by `fit` of a profile; `maps` by attention kernel."""

    fit: Table
    setting: Setting
    maps: dict[str, Map] = field(default_factory=dict)

    def decode(self, kernel: str, n: float, ctx: float) -> float:
        """Decode attention of one layer, by sequences and the mean of their lengths."""
        table = self.fit[kernel]
        return between(table["n"], table["ctx"], table["us"], n, ctx)

    def uneven(self, shape: dict[str, Any]) -> float:
        """What the decode batch of a shape takes longer, of one layer, than an even one."""
        tail = self.fit.get("tail")
        if tail is None or not tail["used"]:
            return 0.0
        found = lengths(shape, self.setting.longest)
        return longer_us(found, tail["alone_ns"], tail["share_ns"])

    def experts(self, tokens: float, active: float) -> float:
        """Router and experts of one layer."""
        table = self.fit["experts"]
        return between(table["tokens"], table["active"], table["us"], tokens, active)

    def all_reduce(self, moved_bytes: float) -> float:
        """Sum of so many bytes over the GPUs that were measured."""
        figures: Table = self.fit["all_reduce"]
        gpus, large = figures["gpus"], figures.get("large")
        if large is not None and moved_bytes >= large["from_bytes"]:
            figures = large
        moved_bytes *= 2 * (gpus - 1) / gpus
        return float(figures["latency_us"] + moved_bytes / figures["bandwidth_gb_s"] / 1e3)

    def prefill(self, q: int, ctx: int) -> float:
        """Attention of one chunk in one layer."""
        table, tile = self.fit["prefill"], self.setting.tile
        return between(table["q"], table["ctx"], table["us"], -(-q // tile) * tile, ctx)

    def dense(self, tokens: int) -> float:
        """Everything but attention and logits, all layers."""
        return along(self.fit["dense"]["tokens"], self.fit["dense"]["us"], tokens)

    def head(self, samples: int) -> float:
        """Output projection and sampler."""
        return along(self.fit["head"]["samples"], self.fit["head"]["us"], samples)

    def kernels(self, shape: dict[str, Any]) -> float:
        """The sum over the kernels of a step."""
        n, chunks = shape["n"], shape["chunks"]
        attention = sum(self.prefill(q, ctx) for q, ctx in chunks)
        if n:
            attention += self.decode(self.setting.decode_kernel, n, shape["ctx"])
            attention += self.uneven(shape)
        tokens, samples = n + sum(q for q, _ in chunks), n + len(chunks)
        us = self.dense(tokens) + self.setting.layers * attention + self.head(samples)
        if (experts := self.setting.experts) is not None:
            us += self.setting.layers * self.experts(tokens, experts.active(tokens))
        return us

    def step(self, shape: dict[str, Any]) -> float:
        """A whole step."""
        a0, a1, a2 = self.fit["step"]
        us = a0 + a1 * self.kernels(shape) + a2 * (shape["n"] + len(shape["chunks"]))
        return float(max(us, self.fit["launch_floor_us"] if self.eager(shape) else 0.0))

    def eager(self, shape: dict[str, Any]) -> bool:
        """Whether a step is launched kernel by kernel: only decodes are captured in graphs."""
        return bool(shape["chunks"]) or not self.setting.capture_sizes
