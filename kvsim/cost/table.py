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

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Literal

from kvsim.config import RunConfig
from kvsim.cost.decodes import cut
from kvsim.cost.kernels import Kernels
from kvsim.cost.profile import DecodeGrid, load_profile, refuse_special
from kvsim.cost.scaling import GEOMETRY, differences, scaled
from kvsim.defaults import DEFAULT_BLOCK_SIZE
from kvsim.hardware import Hardware
from kvsim.models import Model

if TYPE_CHECKING:
    from kvsim.cost.explain import Work
    from kvsim.engine.plan import Plan

_KINDS = {
    "measured": "measured",
    "scaled": "scaled",
    "roofline": "roofline",
    "public-table": "estimated",
}


class TableCost:
    """Prices from a profile; a profile of another model, dtype or tensor parallelism is scaled.

    A measured profile of another block size is scaled as well. `kvsim.cost.scaling` says how;
    `kind` and `source` report it. `decode_kernel` chooses between the decode kernels of the
    profile. Raises `ValueError` for a kernel that the profile does not have, and `ConfigError` for
    a model with experts, windows, latent or linear attention, or quantised weights.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        config: RunConfig,
        profile: str,
        decode_kernel: Literal["v1", "v2"] = "v2",
    ) -> None:
        refuse_special(model)
        self._measured, self._path = load_profile(profile), profile
        self._scaled_in = differences(self._measured, model, config)
        self._profile = self._measured
        if self._scaled_in:
            self._profile = scaled(self._measured, model, config, hardware)
        fit = self._profile.fit_at(config.block_size or DEFAULT_BLOCK_SIZE) or self._profile.fit
        decode = fit.decode_v1 if decode_kernel == "v1" else fit.decode_v2
        if not isinstance(decode, DecodeGrid):
            raise ValueError(f"decode_kernel: profile {profile} has no decode_{decode_kernel}")
        self._decode_kernel = decode_kernel
        self._kernels = Kernels(fit, decode, model.num_hidden_layers)
        self._floor_ns = round(fit.launch_floor_us * 1000)
        self._decode_floor_ns = 0 if self._profile.engine.graph else self._floor_ns
        self.priced_steps = 0
        self.extrapolated_steps = 0
        """Steps that left at least one table; `extrapolated_ns` is their time."""
        self.priced_ns = 0
        self.extrapolated_ns = 0

    @property
    def kind(self) -> str:
        """`measured`, `scaled`, `roofline` or, for public tables of other kernels, `estimated`."""
        return _KINDS[self._profile.source]

    @property
    def source(self) -> str:
        """Profile, device and model; for a scaled profile, also what it was scaled from."""
        measured = self._measured
        device = measured.device.get("name", "unnamed device")
        made = f"{device} x {measured.model.name}"
        if not self._scaled_in:
            return f"{measured.source}: {made} ({self._path})"
        changes = [f"{key} {b}" for key, (_, b) in self._scaled_in.items() if key not in GEOMETRY]
        if len(changes) < len(self._scaled_in):
            changes.insert(0, self._profile.model.name)
        return f"scaled from {measured.source}: {made} ({self._path}) to {', '.join(changes)}"

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        seqs, chunks = plan.decode_seqs, plan.chunks
        if plan.samples == seqs and seqs and not (chunks or plan.copies):
            return self.decode_ns(seqs, plan.context_tokens)
        ns = round(self._kernels.step_us(plan) * 1000)
        floor_ns = self._floor_ns if chunks else self._decode_floor_ns
        if ns < floor_ns:
            ns = floor_ns
        return self._counted(ns, self._kernels.outside)

    def decode_ns(self, sequences: int, context_tokens: int) -> int:
        """Nanoseconds of a pure decode step (`kvsim.cost.decodes`)."""
        line = self._kernels.decode_step(sequences)
        ns = round(line.at(context_tokens))
        if ns < self._decode_floor_ns:
            ns = self._decode_floor_ns
        return self._counted(ns, not line.first <= context_tokens <= line.last)

    def decode_run_ns(
        self, sequences: int, context_tokens: int, steps: int, within_ns: int | None = None
    ) -> list[int]:
        """Nanoseconds of pure decode steps in a row (`kvsim.cost.decodes`)."""
        line, floor_ns = self._kernels.decode_step(sequences), self._decode_floor_ns
        contexts = range(context_tokens, context_tokens + steps * sequences, sequences)
        times = line.rounded(contexts)
        if times and min(times) < floor_ns:
            times = [max(ns, floor_ns) for ns in times]
        times = cut(times, within_ns)
        inside = times[bisect_left(contexts, line.first) : bisect_right(contexts, line.last)]
        self.priced_steps += len(times)
        self.priced_ns += sum(times)
        self.extrapolated_steps += len(times) - len(inside)
        self.extrapolated_ns += sum(times) - sum(inside)
        return times

    def explain(self, work: Work) -> dict[str, Any]:
        """The terms of steps (`kvsim.cost.explain`)."""
        return self._kernels.explain(work)

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
            "block_size": self._measured.engine.block_size,
            "scaled": {key: {"profile": a, "run": b} for key, (a, b) in self._scaled_in.items()},
            "error": self._profile.error,
            "priced_steps": self.priced_steps,
            "extrapolated_steps": self.extrapolated_steps,
            "priced_ns": self.priced_ns,
            "extrapolated_ns": self.extrapolated_ns,
        }

    def _counted(self, ns: int, outside: bool) -> int:
        self.priced_steps += 1
        self.priced_ns += ns
        if outside:
            self.extrapolated_steps += 1
            self.extrapolated_ns += ns
        return ns
