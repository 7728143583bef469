"""Step time looked up in measured tables.

```
kernels = dense[tokens] + layers x (decode[n, mean context] + sum of prefill[q, context])
        + head[samples] + copied blocks
step    = a0 + a1 x kernels + a2 x sequences, at least the launch floor if launched eagerly
```

Tables are interpolated linearly in raw counts: on public decode tables that errs less than
logarithmic axes or one fitted formula. Below the first point the first value holds; past the last
the last slope continues, but never downwards. Steps outside the tables are counted.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Literal

from kvsim.config import DEFAULT_BLOCK_SIZE, RunConfig
from kvsim.cost.profile import DecodeGrid, Grid, Profile, load_profile
from kvsim.memory import kv_dtype
from kvsim.model import Model

if TYPE_CHECKING:
    from kvsim.plan import Plan

_KINDS = {
    "measured": "measured",
    "scaled": "scaled",
    "roofline": "roofline",
    "public-table": "estimated",
}


class TableCost:
    """Prices with a profile that was made for this model, dtype, tensor parallelism and block size.

    `decode_kernel` chooses between the decode kernels of the profile. Raises `ValueError` for a
    profile of something else; a profile marked `scaled` may have another block size.
    """

    def __init__(
        self,
        model: Model,
        config: RunConfig,
        profile: str,
        decode_kernel: Literal["v1", "v2"] = "v2",
    ) -> None:
        self._profile, self._path = load_profile(profile), profile
        _refuse_mismatch(self._profile, model, config)
        fit = self._profile.fit
        decode = fit.decode_v1 if decode_kernel == "v1" else fit.decode_v2
        if not isinstance(decode, DecodeGrid):
            raise ValueError(f"decode_kernel: profile {profile} has no decode_{decode_kernel}")
        self._fit, self._decode, self._decode_kernel = fit, decode, decode_kernel
        self._layers = model.num_hidden_layers
        self._outside = False
        self.priced_steps = 0
        self.extrapolated_steps = 0
        """Steps for which at least one table was left; likewise `extrapolated_ns`."""
        self.priced_ns = 0
        self.extrapolated_ns = 0

    @property
    def kind(self) -> str:
        """`measured`, `scaled`, `roofline` or, for public tables of other kernels, `estimated`."""
        return _KINDS[self._profile.source]

    @property
    def source(self) -> str:
        """Profile, device and model."""
        device = self._profile.device.get("name", "unnamed device")
        return f"{self._profile.source}: {device} x {self._profile.model.name} ({self._path})"

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        self._outside = False
        tokens = seqs = plan.decode_seqs
        attention_us = 0.0
        if seqs:
            attention_us = self._at(self._decode, seqs, plan.context_tokens / seqs)
        tile = self._fit.prefill.tile
        for new, context in plan.chunks:
            tokens += new
            seqs += 1
            attention_us += self._at(self._fit.prefill, -(-new // tile) * tile, context)
        kernels_us = plan.copied_blocks * self._fit.copied_block_us
        if tokens:
            kernels_us += self._along(self._fit.dense.x, self._fit.dense.us, tokens)
            kernels_us += self._layers * attention_us
        if plan.samples:
            kernels_us += self._along(self._fit.head.x, self._fit.head.us, plan.samples)
        a0, a1, a2 = self._fit.step
        us = a0 + a1 * kernels_us + a2 * seqs
        if plan.chunks or not self._profile.engine.graph:
            us = max(us, self._fit.launch_floor_us)
        return self._counted(max(round(us * 1000), 0))

    def describe(self) -> dict[str, Any]:
        """Provenance of the profile, its stated error, and how much was priced outside it."""
        return {
            "kind": self.kind,
            "source": self.source,
            "profile": self._path,
            "created": self._profile.created,
            "device": self._profile.device,
            "software": self._profile.software,
            "decode_kernel": self._decode_kernel,
            "error": self._profile.error,
            "priced_steps": self.priced_steps,
            "extrapolated_steps": self.extrapolated_steps,
            "priced_ns": self.priced_ns,
            "extrapolated_ns": self.extrapolated_ns,
        }

    def _counted(self, ns: int) -> int:
        self.priced_steps += 1
        self.priced_ns += ns
        if self._outside:
            self.extrapolated_steps += 1
            self.extrapolated_ns += ns
        return ns

    def _at(self, grid: Grid, x: float, ctx: float) -> float:
        """The grid at a point: along the context in the two rows around `x`, then between them."""
        xs, rows = grid.x, grid.us
        i = bisect_left(xs, x, 1, len(xs) - 1)
        around = (
            self._along(grid.ctx, rows[i - 1], ctx),
            self._along(grid.ctx, rows[i], ctx),
        )
        return self._along(xs[i - 1 : i + 1], around, x)

    def _along(self, xs: list[float], us: list[float] | tuple[float, float], x: float) -> float:
        """The line through the points `(xs[i], us[i])` at `x`; `us` may end before `xs`."""
        last = len(us) - 1
        if x <= xs[0]:
            self._outside = self._outside or x < xs[0]
            return us[0]
        i = bisect_left(xs, x, 1, last)
        value = us[i - 1] + (us[i] - us[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        if x > xs[last]:
            self._outside = True
            return max(value, us[last])
        return value


def _refuse_mismatch(profile: Profile, model: Model, config: RunConfig) -> None:
    """`ValueError` that names what the run and the profile do not share."""
    made = profile.model
    pairs = [
        ("num_hidden_layers", model.num_hidden_layers, made.layers),
        ("hidden_size", model.hidden_size, made.hidden),
        ("num_attention_heads", model.num_attention_heads, made.heads),
        ("num_key_value_heads", model.num_key_value_heads, made.kv_heads),
        ("head_dim", model.head_dim, made.head_dim),
        ("intermediate_size", model.intermediate_size, made.ffn),
        ("vocab_size", model.vocab_size, made.vocab),
        ("dtype", model.dtype(config.dtype), made.dtype),
        ("kv_cache_dtype", kv_dtype(model, config), made.kv_dtype),
        ("tensor_parallel_size", config.tensor_parallel_size, made.tp),
    ]
    if profile.source != "scaled":
        pairs.append(
            ("block_size", config.block_size or DEFAULT_BLOCK_SIZE, profile.engine.block_size)
        )
    for key, wanted, found in pairs:
        if wanted != found:
            raise ValueError(
                f"profile: it was made with {key} {found}, the run has {wanted};"
                " calibrate for this run, or use the roofline"
            )
