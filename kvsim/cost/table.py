"""Step time looked up in measured tables.

```
kernels = dense[tokens] + layers x attention + head[samples] + copied blocks
          + layers with experts, exchange of replicas and all-reduces, by tokens
step    = a0 + a1 x kernels + a2 x sequences, at least the launch floor if launched eagerly

attention = decode[n, mean context] + sum of prefill[q, context]
            or, in an engine that serves both in one launch, mixed[q, context, n, mean context]
```

Tables are interpolated linearly in raw counts (`kvsim.cost.profile`): on public decode tables
that errs less than logarithmic axes or one fitted formula. Steps outside the tables are counted.

A profile records how far held-out rows are from its fit. `UncertainCost` multiplies each table by a
factor that is drawn from those errors, once for a run. So every seed is one machine that the
profile might describe.

    true time = time of the profile / (1 + error),   error ~ normal(bias, p95 / 1.96)

One factor for a whole table is the largest effect that an error can have: errors that differ from
point to point partly cancel. Steps with prompts are slowed by a factor between 1 and what public
runs of the GPU showed (`kvsim.cost.sustained`). The seed alone decides the factors, so policies
that are compared on the same seeds meet the same machine. Tables without a recorded error are
unchanged, and `describe` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvsim.cost.experts import AllReduces, ExpertLayers
from kvsim.cost.explain import Compiled
from kvsim.cost.kernels import ByTokens, Kernels
from kvsim.cost.profile import (
    DecodeGrid,
    Fit,
    Profile,
    distrust,
    load_profile,
    refuse_special,
)
from kvsim.cost.scaling import GEOMETRY, differences, scaled
from kvsim.cost.sustained import check, label, missed
from kvsim.cost.tail import Uneven
from kvsim.cost.ungrouped import LABEL, beside_prompts
from kvsim.errors import ConfigError
from kvsim.machine.hardware import LINKS, AllReduce, Hardware, load_hardware
from kvsim.machine.models import DTYPE_BYTES, Model, model_of
from kvsim.settings.config import RunConfig
from kvsim.settings.library import names
from kvsim.settings.versions import DEFAULT_BLOCK_SIZE
from kvsim.workload.clients import random_stream

if TYPE_CHECKING:
    import numpy as np


class TableCost(Compiled):
    """Prices from a profile; a profile of another model, dtype or tensor parallelism is scaled.

    A measured profile of another block size is scaled as well. `kvsim.cost.scaling` says how;
    `kind` and `source` report it. `decode_kernel` chooses between the decode kernels of the
    profile. Raises `ValueError` for a kernel that the profile does not have, and `ConfigError` for
    a model with windows, latent or linear attention, or quantised weights that the profile was not
    made for.

    `uneven`: whether the lengths of decoding sequences count where they differ
    (`kvsim.cost.tail`); None: as the profile's own evidence says. It is a `ValueError` to ask a
    profile for it that does not have the term. `sustained`: a factor on steps with prompts
    (`kvsim.cost.sustained`).
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        config: RunConfig,
        profile: str | Profile,
        decode_kernel: Literal["v1", "v2"] = "v2",
        uneven: bool | None = None,
        sustained: float = 1.0,
    ) -> None:
        if isinstance(profile, Profile):
            self._measured, self._path = profile, "a profile at hand"
        else:
            self._measured, self._path = load_profile(profile), profile
        # Experts are priced beside the tables, so no profile has to be made for them.
        refuse_special(model, ("experts", *self._measured.model.special.split(", ")))
        self._hardware_name, self._sustained = hardware.name, check(sustained)
        self._scaled_in = differences(self._measured, model, config)
        self._profile = self._for_run(model, config, hardware)
        fit = self._profile.fit_at(config.block_size or DEFAULT_BLOCK_SIZE) or self._profile.fit
        self._decode_kernel = decode_kernel
        self._uneven = self._term_of_uneven(fit, uneven)
        fit = self._drawn(fit, config.seed)
        beside: list[ByTokens] = []
        if isinstance(fit.all_reduce, AllReduce):
            width = model.hidden_size * DTYPE_BYTES[self._profile.model.dtype]
            # One behind attention and one behind the MLP of each layer.
            number, gpus = 2 * model.num_hidden_layers, config.tensor_parallel_size
            beside.append(AllReduces(fit.all_reduce, gpus, number, width))
        self._experts = None
        if model.experts is not None:
            grid, link = fit.experts or None, fit.all_reduce or hardware.exchange
            self._experts = ExpertLayers(model, config, hardware, grid, link)
            beside.append(self._experts)
        decode = fit.decode_v1 if decode_kernel == "v1" else fit.decode_v2
        if not isinstance(decode, DecodeGrid):
            kernel = f"decode_{decode_kernel}"
            raise ValueError(f"decode_kernel: profile {self._path} has no {kernel}")
        self._ungrouped = self._beside_prompts(fit, decode)
        self._compiled = self._kernels = Kernels(
            fit,
            (decode, decode if self._ungrouped is None else self._ungrouped),
            model.num_hidden_layers,
            beside,
            self._uneven,
            not self._profile.engine.graph,
            self._experts,
            self._sustained,
        )

    def _for_run(self, model: Model, config: RunConfig, hardware: Hardware) -> Profile:
        """The profile, scaled where the run differs from what it was made for."""
        if not self._scaled_in:
            return self._measured
        if special := self._measured.model.special:
            key, (of, wanted) = next(iter(self._scaled_in.items()))
            raise ConfigError(
                f"profile {self._path}: {key}: made for {of}, the run has {wanted}, and times of"
                f" {special} are not scaled; use --cost-model roofline"
            )
        return scaled(self._measured, model, config, hardware)

    def _term_of_uneven(self, fit: Fit, asked: bool | None) -> Uneven | None:
        """The term of uneven batches if it counts; it then explains the rest of a step."""
        tail = fit.tail
        if not tail:
            if asked:
                what = f"profile {self._path} has no term of uneven batches (fit.tail)"
                raise ValueError(f"uneven: {what}")
            return None
        if not (tail.used if asked is None else asked):
            return None
        self.rest = "attention_decode"
        return Uneven(tail)

    def _beside_prompts(self, fit: Fit, decode: DecodeGrid) -> DecodeGrid | None:
        """Decodes in launches with prompts, where they take longer and nobody measured them."""
        if not fit.l2_mib or fit.mixed:
            return None
        made = self._profile.model
        row_bytes = 2 * made.head_dim * DTYPE_BYTES[made.kv_dtype]
        return beside_prompts(decode, max(1, made.heads // made.kv_heads), row_bytes, fit.l2_mib)

    def _drawn(self, fit: Fit, seed: int) -> Fit:
        """The tables that price the run of a seed."""
        return fit

    @property
    def kind(self) -> str:
        """`measured`, `scaled`, `roofline`, or `estimated`: with other kernels or terms, or by a
        profile that its own checks do not bear out."""
        source = self._profile.source
        estimated = self._experts is not None and self._experts.estimated
        if estimated or distrust(self._measured.error) or source == "public-table":
            return "estimated"
        return source

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
        listed = "".join(f"; {name}: {text}" for name, text in used.items())
        if self._measured.source == "measured" and self._sustained == 1:
            return listed
        return listed + label(self._hardware_name, self._prices, self._sustained)

    @property
    def _prices(self) -> str:
        """What prices the steps (`kvsim.cost.sustained.PUBLIC`)."""
        return "table of experts" if self._measured.fit.experts else "table"

    def _all_terms(self) -> dict[str, str]:
        found = self._profile.terms | ({} if self._experts is None else self._experts.terms)
        if self._profile.model.tp == 1:
            # On one GPU nothing is reduced, whatever the profile was made for.
            found.pop("all-reduce", None)
        return found if self._ungrouped is None else found | {"decodes beside prompts": LABEL}

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
            "sustained": self._sustained,
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


_TRUST = ("measured", "estimated", "public-table", "scaled", "roofline")


def profile_for(model: Model, hardware: Hardware, config: RunConfig) -> str | None:
    """The name of the shipped profile of the hardware that fits a run best; None if there is none.

    Profiles that need no scaling come first, then measured ones. None is scaled to a model that is
    not dense, or has quantised weights. The name of a shipped profile begins with its hardware's.
    """
    ranked = []
    for name in names("profiles"):
        profile = load_profile(name) if name.startswith(f"{hardware.name}-") else None
        if profile and profile.device["name"] in (hardware.name, *hardware.device_names):
            changed = bool(differences(profile, model, config))
            if not (changed and (model.special or profile.model.special)):
                ranked.append((changed, _TRUST.index(profile.source), name))
    return min(ranked)[-1] if ranked else None


ERRORS = {
    "dense": ("dense", "gemm_layer_sum", "gemm"),
    "head": ("head", "gemm"),
    "prefill": ("prefill",),
    "decode_v1": ("decode_v1", "decode"),
    "decode_v2": ("decode_v2", "decode"),
    "mixed": ("mixed", "decode"),
    "experts": ("experts",),
}
"""Table of a fit → the regions of a profile's `error` that apply to it, the closest first."""

_NORMAL_P95 = 1.959964
"""95 % of a normal distribution lie within this many deviations."""
_LEAST, _MOST = 0.2, 5.0
"""Bounds of a factor: an error of -100 % would make time negative."""


class UncertainCost(TableCost):
    """A table cost model whose tables are scaled by factors drawn from the seed.

    Raises `ValueError` for a profile that records no error at all.
    """

    def _drawn(self, fit: Fit, seed: int) -> Fit:
        self._factors = draw_factors(self._profile, seed)
        if not self._factors:
            raise ValueError(f"profile {self._path} records no errors of its tables to draw from")
        known = missed(self._hardware_name, self._prices)
        if known is not None and self._sustained == 1 and self._measured.source != "measured":
            drawn = random_stream(seed, "sustained factor").uniform(1, known.most)
            self._sustained = round(float(drawn), 3)
        return multiplied(fit, self._factors)

    @property
    def source(self) -> str:
        """The source of the profile, with a note that its error was drawn."""
        return f"{super().source}, within its held-out errors"

    def describe(self) -> dict[str, Any]:
        """The description of the profile, the factor of each table, and the tables without one."""
        tables = [key for key in ERRORS if getattr(self._profile.fit, key)]
        return {
            **super().describe(),
            "error_factors": self._factors,
            "without_error": [key for key in tables if key not in self._factors],
        }


def uncertain(config: RunConfig) -> RunConfig:
    """The configuration with kernel times drawn within the errors of its profile.

    Raises `ConfigError` if it has no profile.
    """
    name, profile = config.cost.get("model"), config.cost.get("profile")
    if name is None and config.cost.keys() <= set(LINKS):
        model, hardware = model_of(config), load_hardware(config.hardware_name)
        profile = profile_for(model, hardware, config)
    if name not in (None, "table", "uncertain") or profile is None:
        raise ConfigError(
            f"--cost-uncertainty: steps are priced by the model {name or 'roofline'}, which records"
            " no errors; use --cost-model table with --set cost.profile=NAME"
        )
    cost = {**config.cost, "model": "uncertain", "profile": profile}
    return msgspec.structs.replace(config, cost=cost)


def draw_factors(profile: Profile, seed: int) -> dict[str, float]:
    """The factor of every table whose error the profile records.

    Each table has its own random stream, so that a further table changes no other.
    """
    factors = {}
    for key, regions in ERRORS.items():
        error = next((e for r in regions if _judged(e := profile.error.get(r))), None)
        if error is not None and getattr(profile.fit, key):
            factors[key] = _factor(error, random_stream(seed, f"cost error of {key}"))
    return factors


def multiplied(fit: Fit, factors: dict[str, float]) -> Fit:
    """The fit with the times of these tables multiplied."""
    tables = {
        key: msgspec.structs.replace(table, us=_multiplied(table.us, factor))
        for key, factor in factors.items()
        if (table := getattr(fit, key))
    }
    return msgspec.structs.replace(fit, **tables)


def _judged(error: Any) -> bool:
    return isinstance(error, dict) and isinstance(error.get("p95_percent"), int | float)


def _factor(error: dict[str, Any], random: np.random.Generator) -> float:
    bias, deviation = error.get("bias_percent", 0.0), error["p95_percent"] / _NORMAL_P95
    drawn = float(random.normal(bias, deviation)) / 100
    return 1 / min(max(1 + drawn, 1 / _MOST), 1 / _LEAST)


def _multiplied(times: Any, factor: float) -> Any:
    if isinstance(times, list):
        return [_multiplied(each, factor) for each in times]
    return times * factor
