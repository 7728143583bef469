"""Prices a step: how many nanoseconds the modelled engine needs for a plan.

In go plans (`kvsim.core.plan`), and profiles, data sheets or constants. Out come nanoseconds, what
they consist of, and the words that say how far they are to be trusted.

A cost model is a small class with a name in `COSTS`, or a user's own `package.module:Class`. Swap
copies between GPU and CPU are priced on the link (`kvsim.machine.hardware`).
"""

from __future__ import annotations

from operator import index
from typing import Any, Protocol, runtime_checkable

from kvsim.core.plan import Plan
from kvsim.cost.formulas import ConstantCost, RooflineCost
from kvsim.cost.profile import refuse_special
from kvsim.cost.table import TableCost, UncertainCost, profile_for
from kvsim.errors import ConfigError
from kvsim.machine.hardware import LINKS, Hardware, LinkTimes, make_link
from kvsim.machine.memory import block_bytes
from kvsim.machine.models import Model
from kvsim.settings.config import RunConfig
from kvsim.settings.library import construct

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
    name, args = _chosen(config, model, hardware)
    if not isinstance(name, str):
        raise ConfigError(f"cost: model: expected a name of {', '.join(COSTS)}, got {name!r}")
    cost = construct("cost", COSTS, name, args, model=model, hardware=hardware, config=config)
    if not isinstance(cost, Cost):
        raise ConfigError(
            f"cost: {name} is not a cost model; give it step_ns(plan), describe(), kind and"
            " source, as kvsim.cost.Cost says"
        )
    return cost


def _chosen(config: RunConfig, model: Model, hardware: Hardware) -> tuple[Any, dict[str, Any]]:
    """The name of the cost model, and its arguments."""
    args = {key: value for key, value in config.cost.items() if key not in ("model", *LINKS)}
    name = config.cost.get("model")
    if "profile" not in args and (name == "table" or (name is None and not args)):
        shipped = profile_for(model, hardware, config)
        if shipped is not None:
            args["profile"] = shipped
        elif name == "table":
            refuse_special(model)
    if name is None:
        name = "table" if "profile" in args else "roofline"
    return name, args


def checked_prices(cost: Cost) -> Cost | Checked:
    """What to ask for prices: the cost model, or a check of one that is a user's own."""
    ours = type(cost).__module__.startswith("kvsim.")
    return cost if ours else Checked(cost)


class Checked:
    """The prices of a cost model. Raises `ConfigError` for those that are not whole nanoseconds, at
    least 0."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def step_ns(self, plan: Plan) -> int:
        """`Cost.step_ns`."""
        ns: Any = self._cost.step_ns(plan)
        try:
            whole = index(ns)
        except TypeError:
            whole = -1
        if whole < 0:
            kind = type(self._cost)
            raise ConfigError(
                f"cost: {kind.__module__}:{kind.__qualname__} priced a step at {ns!r}; return whole"
                " nanoseconds, 0 or more"
            )
        return whole


class MeansPrices:
    """Prices by the cost model and the link of a run; implements `kvsim.policies.victims.Prices`.

    `cost` should be a separate instance of the cost model, because prices asked here must not count
    as steps of the run.
    """

    def __init__(self, cost: Cost, link: LinkTimes) -> None:
        self._cost, self._link = cost, link

    def recompute_ns(self, tokens: int) -> int:
        """Nanoseconds of a step that computes `tokens` tokens as one prompt, and nothing else.

        Engines that separate prompts from decodes run such a step. Where chunks share steps with
        decodes, it is an upper bound.
        """
        if tokens == 0:
            return 0
        plan = Plan(1)
        plan.add_chunk(0, tokens, 0, 0)
        plan.samples = 1
        return self._cost.step_ns(plan)

    def swap_ns(self, blocks: int, queued_blocks: int) -> int:
        """Nanoseconds of copying blocks out and in, after `queued_blocks` on the link."""
        link = self._link
        return link.transfer_ns(queued_blocks) + 2 * link.transfer_ns(blocks)


def make_prices(config: RunConfig, model: Model, hardware: Hardware) -> MeansPrices | None:
    """Prices for a run with `preemption_mode` `auto`; None for other modes, which need none."""
    if config.preemption_mode != "auto":
        return None
    link = make_link(model, hardware, config, block_bytes(model, config))
    return MeansPrices(make_cost(config, model, hardware), link)
