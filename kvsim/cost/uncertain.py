"""Step time from measured tables, with an error drawn from the profile's own errors.

A profile records how far held-out rows are from its fit. Here each table is multiplied by a factor
that is drawn from those errors, once for a run. So every seed is one machine that the profile might
describe.

    true time = time of the profile / (1 + error),   error ~ normal(bias, p95 / 1.96)

One factor for a whole table is the largest effect that an error can have: errors that differ from
point to point partly cancel. The seed alone decides the factors, so policies that are compared on
the same seeds meet the same machine. Tables without a recorded error are unchanged, and `describe`
says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from kvsim.cost.profile import Curve, Fit, Grid, MixedGrid, Profile
from kvsim.cost.shipped import profile_for
from kvsim.cost.table import TableCost
from kvsim.errors import ConfigError
from kvsim.machine.hardware import Hardware, load_hardware
from kvsim.machine.link import LINKS
from kvsim.machine.models import Model, model_of
from kvsim.settings.config import RunConfig
from kvsim.settings.versions import DEFAULT_BLOCK_SIZE
from kvsim.workload.arrivals import random_stream

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T", Curve, Grid, MixedGrid)

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

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        config: RunConfig,
        profile: str,
        decode_kernel: Literal["v1", "v2"] = "v2",
        uneven: bool | None = None,
    ) -> None:
        super().__init__(model, hardware, config, profile, decode_kernel, uneven)
        self._factors = draw_factors(self._profile, config.seed)
        if not self._factors:
            raise ValueError(f"profile {profile} records no errors of its tables to draw from")
        fit = self._profile.fit_at(config.block_size or DEFAULT_BLOCK_SIZE) or self._profile.fit
        self._price_by(multiplied(fit, self._factors))

    @property
    def source(self) -> str:
        """The source of the profile, with a note that its error was drawn."""
        return f"{super().source}, within its held-out errors"

    def describe(self) -> dict[str, Any]:
        """The description of the profile, the factor of each table, and the tables without one."""
        tables = [key for key in ERRORS if _is_table(getattr(self._profile.fit, key))]
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
        if error is not None and _is_table(getattr(profile.fit, key)):
            factors[key] = _factor(error, random_stream(seed, f"cost error of {key}"))
    return factors


def multiplied(fit: Fit, factors: dict[str, float]) -> Fit:
    """The fit with the times of these tables multiplied."""
    tables = {key: _times(getattr(fit, key), factor) for key, factor in factors.items()}
    return msgspec.structs.replace(fit, **tables)


def _judged(error: Any) -> bool:
    return isinstance(error, dict) and isinstance(error.get("p95_percent"), int | float)


def _is_table(part: object) -> bool:
    return isinstance(part, Curve | Grid | MixedGrid)


def _factor(error: dict[str, Any], random: np.random.Generator) -> float:
    bias, deviation = error.get("bias_percent", 0.0), error["p95_percent"] / _NORMAL_P95
    drawn = float(random.normal(bias, deviation)) / 100
    return min(max(1 / max(1 + drawn, 1 / _MOST), _LEAST), _MOST)


def _times(table: T, factor: float) -> T:
    return msgspec.structs.replace(table, us=_multiplied(table.us, factor))


def _multiplied(times: Any, factor: float) -> Any:
    if isinstance(times, list):
        return [_multiplied(each, factor) for each in times]
    return times * factor
