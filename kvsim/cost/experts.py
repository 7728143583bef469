"""Times of the layers with experts of a step, by its tokens.

Of E experts, of which each token has k, t tokens need E (1 - (1 - k / E)^t) in the mean, as if
every token drew its experts by chance. Only these are read; t k rows are multiplied.

Replicas divide the experts among them and run in lock step: a layer begins when all of them have
sent their tokens. Where only one replica is simulated, each is taken to have as many tokens as any
other (`Plan.rank_tokens`). Each GPU's experts are always taken to have as many rows. Tokens are
gathered before a layer and their sums scattered after it, which moves the bytes of one ring
all-reduce of the tokens of all replicas, at the hardware's own figures for it
(`kvsim.machine.hardware.Hardware.exchange`). Which experts a token has, sent with it, is not
counted.

Source: vLLM 0.33.0, distributed/device_communicators/all2all.py, `AgRsAll2AllManager`, and
model_executor/layers/fused_moe/config.py, `FusedMoEParallelConfig.make`.
"""

from __future__ import annotations

from math import ceil

from kvsim.cost import layer
from kvsim.cost.kernels import Line
from kvsim.cost.layer import Peaks
from kvsim.cost.profile import ExpertGrid, Interpolation
from kvsim.machine.hardware import AllReduce, Hardware
from kvsim.machine.memory import expert_parallel_size
from kvsim.machine.models import DTYPE_BYTES, Model, Shard
from kvsim.settings.config import RunConfig


class AllReduces:
    """`number` all-reduces of `token_bytes` for each token of a step, over `gpus` GPUs."""

    def __init__(self, figures: AllReduce, gpus: int, number: int, token_bytes: int) -> None:
        def us(tokens: float) -> float:
            return number * figures.us(tokens * token_bytes, gpus)

        self._us, large = us, figures.large
        self.breaks: list[int] = []
        """Tokens before and after a change of the regime."""
        if large is not None and gpus > 1:
            first = ceil(large.from_bytes / token_bytes)
            self.breaks = [first - 1, first] if first > 1 else []
        # Within a regime the time is linear in the bytes, so two points of each tell all of it.
        points = sorted({1, *self.breaks, 2 * max([1, *self.breaks])})
        self._line = Line(points, [us(tokens) for tokens in points])

    def us(self, tokens: float) -> float:
        """Returns the microseconds in a step of `tokens` tokens, at least 1."""
        return self._line.at(tokens)


_BREAKS = [*range(1, 64), *(round(64 * 1.1**power) for power in range(60))]
"""Tokens between which the time of the experts is taken as a line; 64 x 1.1^59 is 17,700."""


class Routing:
    """How many experts the tokens of a step need; none, for a model without experts."""

    share: float
    """Share of all experts that one token has."""
    replicas: int

    def __init__(self, model: Model, config: RunConfig) -> None:
        experts = model.experts
        self.share = experts.num_experts_per_tok / experts.num_experts if experts else 0.0
        self.replicas = config.data_parallel_size if experts else 1

    def gathered(self, tokens: float) -> float:
        """Tokens of all replicas, where each has so many."""
        return tokens * self.replicas

    def active(self, tokens: float) -> float:
        """Share of the experts that any token needs, where each replica has so many tokens."""
        active: float = 1 - (1 - self.share) ** self.gathered(tokens)
        return active


def exchange(figures: AllReduce, model: Model, config: RunConfig, element_bytes: int) -> AllReduces:
    """What replicas send each other for the experts of a step; nothing, for one replica."""
    replicas = Routing(model, config).replicas
    width = replicas * model.hidden_size * element_bytes
    return AllReduces(figures, replicas, model.expert_layers, width)


class ExpertLayers:
    """Router and experts of all layers that have some, and what replicas send each other.

    `grid` is measured; without one, times are a roofline of the geometry. Columns of experts that
    are divided among other numbers of GPUs take the measured time times the ratio of two rooflines.
    """

    def __init__(
        self,
        model: Model,
        config: RunConfig,
        hardware: Hardware,
        grid: ExpertGrid | None,
        figures: AllReduce,
    ) -> None:
        dtype = model.dtype(config.dtype)
        self._element_bytes = DTYPE_BYTES[dtype]
        self._peaks = Peaks(hardware.flop_s(dtype), hardware.memory_bandwidth_gb_s * 1e9)
        self._reached = hardware.products_of(model, dtype)
        self._measured = model.shard(1 if grid is None else grid.tp)
        self._shard = model.shard(config.tensor_parallel_size, expert_parallel_size(config))
        self._held = self._shard.experts_held / self._measured.experts_held
        self._grid, self._layers = grid, model.expert_layers
        self._routing = Routing(model, config)
        self._exchange = exchange(figures, model, config, self._element_bytes)
        self.breaks = sorted({*_BREAKS, *self._exchange.breaks})
        """Tokens at which the line of `us` may bend."""
        by_chance = "as many read as tokens need by chance"
        self.terms = {"experts": f"estimated from the geometry, {by_chance}"}
        """Where these times come from, by name."""
        if grid is not None:
            self.terms["experts"] = grid.routing or f"measured, {by_chance}"
        if self._routing.replicas > 1:
            self.terms["exchange of replicas"] = (
                f"figures of {hardware.name}; replicas that are not simulated have as many tokens"
            )
        self.estimated = grid is None or self._routing.replicas > 1

    def us(self, tokens: float) -> float:
        """Microseconds in a step of so many tokens on each replica."""
        return self._layers * self._layer_us(tokens) + self._exchange.us(tokens)

    def _layer_us(self, tokens: float) -> float:
        rows = self._routing.gathered(tokens) * self._held
        active = self._shard.experts_held * self._routing.active(tokens)
        if self._grid is None:
            return self._roofline_us(self._shard, tokens, rows, active)
        grid = self._grid
        # The grid goes by tokens: so many would give the measured GPU the rows that this one has.
        us = Interpolation().between(grid.x, grid.ctx, grid.us, rows, active)
        if self._shard.expert_columns != self._measured.expert_columns:
            us *= self._roofline_us(self._shard, tokens, rows, active)
            us /= self._roofline_us(self._measured, tokens, rows, active)
        return us

    def _roofline_us(self, shard: Shard, tokens: float, rows: float, active: float) -> float:
        return layer.experts_us(
            *(shard, tokens, rows, active, self._peaks, self._element_bytes), self._reached
        )
