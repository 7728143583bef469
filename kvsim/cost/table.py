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

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from kvsim.config import RunConfig
from kvsim.cost.all_reduces import AllReduces
from kvsim.cost.decodes import cut
from kvsim.cost.experts import ExpertLayers
from kvsim.cost.kernels import ByTokens, Kernels
from kvsim.cost.profile import DecodeGrid, Fit, Tail, load_profile, refuse_special
from kvsim.cost.scaling import GEOMETRY, differences, scaled
from kvsim.cost.tail import Uneven
from kvsim.defaults import DEFAULT_BLOCK_SIZE
from kvsim.hardware import AllReduce, Hardware
from kvsim.models import DTYPE_BYTES, Model

if TYPE_CHECKING:
    from kvsim.cost.explain import Work
    from kvsim.engine.plan import Plan

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
        decode = fit.decode_v1 if decode_kernel == "v1" else fit.decode_v2
        if not isinstance(decode, DecodeGrid):
            raise ValueError(f"decode_kernel: profile {profile} has no decode_{decode_kernel}")
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
        self._kernels = self._priced(fit, decode)
        self._floor_ns = round(fit.launch_floor_us * 1000)
        self._decode_floor_ns = 0 if self._profile.engine.graph else self._floor_ns
        self.priced_steps = 0
        self.extrapolated_steps = 0
        """Steps that left at least one table; `extrapolated_ns` is their time."""
        self.priced_ns = 0
        self.extrapolated_ns = 0

    def _priced(self, fit: Fit, decode: DecodeGrid) -> Kernels:
        return Kernels(fit, decode, self._layers, self._beside, self._uneven)

    @property
    def longest_decodes(self) -> int:
        """How many lengths matter (`kvsim.cost.decodes.PricesLongest`)."""
        return 0 if self._uneven is None else self._uneven.longest

    @property
    def kind(self) -> str:
        """`measured`, `scaled`, `roofline` or, with other kernels or terms, `estimated`."""
        if self._experts is not None and self._experts.estimated:
            return "estimated"
        return _KINDS[self._profile.source]

    @property
    def source(self) -> str:
        """Profile, device and model; for a scaled profile, also what it was scaled from."""
        measured = self._measured
        device = measured.device.get("name", "unnamed device")
        made = f"{device} x {measured.model.name}"
        if not self._scaled_in:
            return f"{measured.source}: {made} ({self._path}){self._terms()}"
        changes = [f"{key} {b}" for key, (_, b) in self._scaled_in.items() if key not in GEOMETRY]
        if len(changes) < len(self._scaled_in):
            changes.insert(0, self._profile.model.name)
        to = ", ".join(changes)
        return f"scaled from {measured.source}: {made} ({self._path}) to {to}{self._terms()}"

    def _terms(self) -> str:
        """The terms that are priced beside the tables, and their sources."""
        used = {key: text for key, text in self._all_terms().items() if key != "uneven batches"}
        if self._uneven is not None:
            used["uneven batches"] = self._profile.terms.get("uneven batches", "derived")
        return "".join(f"; {name}: {text}" for name, text in used.items())

    def _all_terms(self) -> dict[str, str]:
        found = self._profile.terms | ({} if self._experts is None else self._experts.terms)
        if self._profile.model.tp == 1:
            found.pop("all-reduce", None)
        return found

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        ns = self._even_ns(plan)
        if plan.rank_tokens is None or self._experts is None or not plan.tokens:
            return ns
        us = self._experts.us(plan.rank_tokens) - self._experts.us(plan.tokens)
        more = max(self._kernels.scaled_ns(us), -ns)
        self.priced_ns += more
        return ns + more

    def _even_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step if all ranks have as many tokens."""
        seqs, chunks = plan.decode_seqs, plan.chunks
        if plan.samples == seqs and seqs and not (chunks or plan.copies):
            longest = plan.longest(self.longest_decodes) if self._uneven is not None else ()
            return self.decode_ns(seqs, plan.context_tokens, longest)
        ns = round(self._kernels.step_us(plan) * 1000)
        floor_ns = self._floor_ns if chunks else self._decode_floor_ns
        if ns < floor_ns:
            ns = floor_ns
        return self._counted(ns, self._kernels.outside)

    def decode_ns(self, sequences: int, context_tokens: int, longest: Sequence[int] = ()) -> int:
        """Nanoseconds of a pure decode step (`kvsim.cost.decodes`)."""
        line = self._kernels.decode_step(sequences)
        ns = round(line.at(context_tokens))
        if longest:
            ns += self._kernels.uneven_ns(sequences, context_tokens, longest)
        if ns < self._decode_floor_ns:
            ns = self._decode_floor_ns
        return self._counted(ns, not line.first <= context_tokens <= line.last)

    def decode_run_ns(
        self,
        sequences: int,
        context_tokens: int,
        steps: int,
        within_ns: int | None = None,
        longest: Sequence[int] = (),
    ) -> list[int]:
        """Nanoseconds of pure decode steps in a row (`kvsim.cost.decodes`)."""
        line, floor_ns = self._kernels.decode_step(sequences), self._decode_floor_ns
        contexts = range(context_tokens, context_tokens + steps * sequences, sequences)
        times = line.rounded(contexts)
        # Lengths grow alike, so their differences stay what they are.
        if longest and (extra := self._kernels.uneven_ns(sequences, context_tokens, longest)):
            times = [ns + extra for ns in times]
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
            "uneven": self._uneven is not None,
            "terms": self._all_terms(),
            "fitted": self._profile.fitted,
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
