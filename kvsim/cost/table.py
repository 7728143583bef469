"""Step time looked up in measured tables.

```
kernels = dense[tokens] + layers x attention + head[samples] + copied blocks
          + layers with experts, exchange of replicas and all-reduces, by tokens
step    = a0 + a1 x kernels + a2 x sequences, at least the launch floor if launched eagerly

attention = decode[n, mean context] + sum of prefill[q, context]
            or, in an engine that serves both in one launch, mixed[q, context, n, mean context]
```

Tables are interpolated linearly in raw counts (`kvsim.cost.interpolation`): on public decode tables
that errs less than logarithmic axes or one fitted formula. Steps outside the tables are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from kvsim.cost.all_reduces import AllReduces
from kvsim.cost.experts import ExpertLayers
from kvsim.cost.explain import each
from kvsim.cost.kernels import ByTokens, Kernels
from kvsim.cost.profile import DecodeGrid, Fit, Tail, distrust, load_profile, refuse_special
from kvsim.cost.scaling import GEOMETRY, differences, scaled
from kvsim.cost.tail import Uneven
from kvsim.machine.hardware import AllReduce, Hardware
from kvsim.machine.models import DTYPE_BYTES, Model
from kvsim.settings.config import RunConfig
from kvsim.settings.versions import DEFAULT_BLOCK_SIZE

if TYPE_CHECKING:
    from kvsim.core.plan import Plan
    from kvsim.cost.explain import Work

_KINDS = {
    "measured": "measured",
    "scaled": "scaled",
    "roofline": "roofline",
    "public-table": "estimated",
    "estimated": "estimated",
}


class TableCost:
    """Prices from a profile; a profile of another model, dtype or tensor parallelism is scaled.

    A measured profile of another block size is scaled as well. `kvsim.cost.scaling` says how;
    `kind` and `source` report it. `decode_kernel` chooses between the decode kernels of the
    profile. Raises `ValueError` for a kernel that the profile does not have, and `ConfigError` for
    a model with windows, latent or linear attention, or quantised weights.

    `uneven`: whether the lengths of decoding sequences count where they differ
    (`kvsim.cost.tail`); None: as the profile's own evidence says. It is a `ValueError` to ask a
    profile for it that does not have the term.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        config: RunConfig,
        profile: str,
        decode_kernel: Literal["v1", "v2"] = "v2",
        uneven: bool | None = None,
    ) -> None:
        refuse_special(model, ("experts",))
        self._measured, self._path = load_profile(profile), profile
        self._scaled_in = differences(self._measured, model, config)
        self._profile = self._measured
        if self._scaled_in:
            self._profile = scaled(self._measured, model, config, hardware)
        fit = self._profile.fit_at(config.block_size or DEFAULT_BLOCK_SIZE) or self._profile.fit
        self._decode_kernel = decode_kernel
        tail = fit.tail if isinstance(fit.tail, Tail) else None
        if uneven and tail is None:
            raise ValueError(f"uneven: profile {profile} has no term of uneven batches (fit.tail)")
        uses = tail is not None and (tail.used if uneven is None else uneven)
        self._uneven = Uneven(tail) if tail is not None and uses else None
        self._beside: list[ByTokens] = []
        if isinstance(fit.all_reduce, AllReduce):
            width = model.hidden_size * DTYPE_BYTES[self._profile.model.dtype]
            number, gpus = 2 * model.num_hidden_layers, config.tensor_parallel_size
            self._beside.append(AllReduces(fit.all_reduce, gpus, number, width))
        self._experts = None
        if model.experts is not None:
            grid, link = fit.experts or None, fit.all_reduce or hardware.all_reduce
            self._experts = ExpertLayers(model, config, hardware, grid, link)
            self._beside.append(self._experts)
        self._layers = model.num_hidden_layers
        self._price_by(fit)

    def _price_by(self, fit: Fit) -> None:
        """Prices steps by the tables of `fit`."""
        decode = fit.decode_v1 if self._decode_kernel == "v1" else fit.decode_v2
        if not isinstance(decode, DecodeGrid):
            kernel = f"decode_{self._decode_kernel}"
            raise ValueError(f"decode_kernel: profile {self._path} has no {kernel}")
        eager = not self._profile.engine.graph
        self._fit = fit
        self._kernels = Kernels(fit, decode, self._layers, self._beside, self._uneven, eager)

    @property
    def kind(self) -> str:
        """`measured`, `scaled`, `roofline`, or `estimated`: with other kernels or terms, or by a
        profile that its own checks do not bear out."""
        estimated = self._experts is not None and self._experts.estimated
        if estimated or distrust(self._measured.error):
            return "estimated"
        return _KINDS[self._profile.source]

    @property
    def source(self) -> str:
        """Profile, device and model; what it was scaled from, and why it is not trusted."""
        measured = self._measured
        device = measured.device.get("name", "unnamed device")
        made = f"{device} x {measured.model.name}"
        if not self._scaled_in:
            return f"{measured.source}: {made} ({self._path}){self._further()}"
        changes = [f"{key} {b}" for key, (_, b) in self._scaled_in.items() if key not in GEOMETRY]
        if len(changes) < len(self._scaled_in):
            changes.insert(0, self._profile.model.name)
        to = ", ".join(changes)
        return f"scaled from {measured.source}: {made} ({self._path}) to {to}{self._further()}"

    def _further(self) -> str:
        """Doubts, and the terms that are priced beside the tables, with their sources."""
        used = {key: text for key, text in self._all_terms().items() if key != "uneven batches"}
        if self._uneven is not None:
            used["uneven batches"] = self._profile.terms.get("uneven batches", "derived")
        if why := distrust(self._measured.error):
            used = {"not trusted": why, **used}
        return "".join(f"; {name}: {text}" for name, text in used.items())

    def _all_terms(self) -> dict[str, str]:
        found = self._profile.terms | ({} if self._experts is None else self._experts.terms)
        if self._profile.model.tp == 1:
            found.pop("all-reduce", None)
        return found

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        experts = self._experts
        if experts is None or plan.rank_tokens is None or not plan.tokens:
            return self._kernels.step_ns(plan)
        further_us = experts.us(plan.rank_tokens) - experts.us(plan.tokens)
        return self._kernels.step_ns(plan, further_us)

    def explain(self, work: Work) -> dict[str, Any]:
        """The terms of steps in nanoseconds, before any floor (`kvsim.cost.explain`)."""
        import numpy as np

        fit, kernels, tokens, samples = self._fit, self._kernels, work.tokens, work.samples
        a0, a1, a2 = fit.step
        scale, entries = a1 * 1000, work.prefill_seqs + work.decode_seqs
        prompts_us = np.where(work.prefill_seqs > 0, fit.prompt_step_us, 0.0)
        attention_us = each(kernels.decodes_us, work.decode_seqs, work.context_tokens)
        return {
            "host": (a0 + prompts_us + a2 * entries) * 1000,
            "dense": np.where(tokens > 0, each(kernels.dense.at, tokens), 0.0) * scale,
            "attention_decode": attention_us * self._layers * scale,
            "head": np.where(samples > 0, each(kernels.head.at, samples), 0.0) * scale,
            "copies": work.copied_blocks * fit.copied_block_us * scale,
            "rest": "host" if self._uneven is None else "attention_decode",
        }

    def describe(self) -> dict[str, Any]:
        """Provenance of the profile, its stated error, and how much was priced outside it."""
        kernels = self._kernels
        return {
            "kind": self.kind,
            "source": self.source,
            "profile": self._path,
            "created": self._profile.created,
            "device": self._profile.device,
            "software": self._profile.software,
            "decode_kernel": self._decode_kernel,
            "uneven": self._uneven is not None,
            "terms": self._all_terms(),
            "fitted": self._profile.fitted,
            "block_size": self._measured.engine.block_size,
            "scaled": {key: {"profile": a, "run": b} for key, (a, b) in self._scaled_in.items()},
            "error": self._profile.error,
            "priced_steps": kernels.priced_steps,
            "extrapolated_steps": kernels.extrapolated_steps,
            "priced_ns": kernels.priced_ns,
            "extrapolated_ns": kernels.extrapolated_ns,
        }
