"""Step time looked up in measured tables.

```
kernels = dense[tokens] + layers x attention + head[samples] + copied blocks
step    = a0 + a1 x kernels + a2 x sequences, at least the launch floor if launched eagerly

attention = decode[n, mean context] + sum of prefill[q, context]
            or, in an engine that serves both in one launch, mixed[q, context, n, mean context]
```

Tables are interpolated linearly in raw counts (`kvsim.cost.interpolation`): on public decode tables
that errs less than logarithmic axes or one fitted formula. Steps outside the tables are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from kvsim.config import DEFAULT_BLOCK_SIZE, RunConfig
from kvsim.cost.interpolation import Interpolation
from kvsim.cost.profile import Curve, DecodeGrid, MixedGrid, Profile, load_profile
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
    profile of something else; only one that was not measured may have another block size.
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
        self._dense_us: dict[int, float] = {}
        """Looked up before, within the curve; likewise `_head_us`."""
        self._head_us: dict[int, float] = {}
        self._look = Interpolation()
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
        self._look.outside, fit = False, self._fit
        tokens = seqs = plan.decode_seqs
        for new, _ in plan.chunks:
            tokens += new
            seqs += 1
        kernels_us = plan.copied_blocks * fit.copied_block_us
        if tokens:
            dense_us = self._dense_us.get(tokens)
            if dense_us is None:
                dense_us = self._look_up(fit.dense, self._dense_us, tokens)
            kernels_us += dense_us + self._layers * self._attention_us(plan)
        if plan.samples:
            head_us = self._head_us.get(plan.samples)
            if head_us is None:
                head_us = self._look_up(fit.head, self._head_us, plan.samples)
            kernels_us += head_us
        a0, a1, a2 = fit.step
        us = a0 + a1 * kernels_us + a2 * seqs
        if us < fit.launch_floor_us and (plan.chunks or not self._profile.engine.graph):
            us = fit.launch_floor_us
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
        if self._look.outside:
            self.extrapolated_steps += 1
            self.extrapolated_ns += ns
        return ns

    def _look_up(self, curve: Curve, known: dict[int, float], count: int) -> float:
        """A curve at a count, kept in `known` if the count lies within it."""
        us = self._look.along(curve.x, curve.us, count)
        if curve.x[0] <= count <= curve.x[-1]:
            known[count] = us
        return us

    def _attention_us(self, plan: Plan) -> float:
        """One layer's attention."""
        us, seqs, look, fit = 0.0, plan.decode_seqs, self._look, self._fit
        if seqs:
            mean = plan.context_tokens / seqs
            if plan.chunks and isinstance(fit.mixed, MixedGrid):
                return self._mixed_us(fit.mixed, plan.chunks, seqs, mean)
            decode = self._decode
            us = look.between(decode.x, decode.ctx, decode.us, seqs, mean)
        prefill, tile = fit.prefill, fit.prefill.tile
        for new, context in plan.chunks:
            padded = -(-new // tile) * tile
            us += look.between(prefill.x, prefill.ctx, prefill.us, padded, context)
        return us

    def _mixed_us(
        self, grid: MixedGrid, chunks: list[tuple[int, int]], seqs: int, mean: float
    ) -> float:
        """One launch for chunks and decodes.

        Measured with one chunk; a further one adds what it takes beyond the smallest chunk, so
        that the launch and the decodes count once.
        """
        smallest = (int(grid.q[0]), int(grid.ctx[0]))
        *times, base = self._look.mixed(grid, [*chunks, smallest], seqs, mean)
        return sum(times) - (len(chunks) - 1) * base


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
    if profile.source == "measured":
        pairs.append(
            ("block_size", config.block_size or DEFAULT_BLOCK_SIZE, profile.engine.block_size)
        )
    for key, wanted, found in pairs:
        if wanted != found:
            raise ValueError(
                f"profile: it was made with {key} {found}, the run has {wanted};"
                " calibrate for this run, or use the roofline"
            )
