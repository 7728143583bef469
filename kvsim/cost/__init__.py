"""Prices a step: how many nanoseconds the modelled engine needs for a plan.

A cost model is a small class with a name in `COSTS`, or a user's own `package.module:Class`. Swap
copies between GPU and CPU are priced on the link (`kvsim.machine.link`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvsim.cost.checked import Checked
from kvsim.cost.constant import ConstantCost
from kvsim.cost.profile import refuse_special
from kvsim.cost.roofline import RooflineCost
from kvsim.cost.shipped import profile_for
from kvsim.cost.table import TableCost
from kvsim.cost.uncertain import UncertainCost
from kvsim.errors import ConfigError
from kvsim.machine.hardware import Hardware
from kvsim.machine.link import LINKS
from kvsim.machine.models import Model
from kvsim.settings.config import RunConfig
from kvsim.settings.library import construct

if TYPE_CHECKING:
    from kvsim.core.plan import Plan

__all__ = [
    "COSTS",
    "ConstantCost",
    "Cost",
    "RooflineCost",
    "TableCost",
    "make_cost",
]


@runtime_checkable
class Cost(Protocol):
    """The interface of a cost model. It only reads the plan."""

    @property
    def kind(self) -> str:
        """The kind of figures: constant, roofline, estimated, measured or scaled."""
        ...

    @property
    def source(self) -> str:
        """One line that names the source of the figures; it labels every result."""
        ...

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds from dispatch to the tokens of `plan`; at least 0."""
        ...

    def describe(self) -> dict[str, Any]:
        """Figures and sources in plain values, for the provenance of a result."""
        ...


COSTS: dict[str, type[Cost]] = {
    "constant": ConstantCost,
    "roofline": RooflineCost,
    "table": TableCost,
    "uncertain": UncertainCost,
}


def make_cost(config: RunConfig, model: Model, hardware: Hardware) -> Cost:
    """The cost model of `[cost]`: `model` names it, the other keys are its arguments.

    Without a `model`, or for `table` without a profile, a shipped profile of the hardware prices
    the run, scaled if need be; if there is none, the roofline does. `profile` alone means `table`,
    other arguments alone mean `roofline`. The subtables `LINKS` price copies and are skipped. A
    constructor receives `model`, `hardware` and `config` if it names them. Raises `ConfigError`.
    """
    args = {key: value for key, value in config.cost.items() if key not in ("model", *LINKS)}
    name = config.cost.get("model")
    if "profile" not in args and (name == "table" or (name is None and not args)):
        shipped = profile_for(model, hardware, config)
        if name == "table" and shipped is None:
            refuse_special(model)
        args |= {} if shipped is None else {"profile": shipped}
    if name is None:
        name = "table" if "profile" in args else "roofline"
    if not isinstance(name, str):
        raise ConfigError(f"cost: model: expected a name of {', '.join(COSTS)}, got {name!r}")
    cost = construct("cost", COSTS, name, args, model=model, hardware=hardware, config=config)
    if not isinstance(cost, Cost):
        raise ConfigError(
            f"cost: {name} is not a cost model; give it step_ns(plan), describe(), kind and"
            " source, as kvsim.cost.Cost says"
        )
    return cost


def checked_prices(cost: Cost) -> Cost | Checked:
    """What to ask for prices: the cost model, or a check of one that is a user's own."""
    ours = type(cost).__module__.startswith("kvsim.")
    return cost if ours else Checked(cost)
