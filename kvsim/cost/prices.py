"""Prices of recomputing and of swapping, for a rule that chooses between them."""

from __future__ import annotations

from kvsim.core.plan import Plan
from kvsim.cost import Cost, make_cost
from kvsim.machine.hardware import Hardware
from kvsim.machine.link import LinkTimes, make_link
from kvsim.machine.memory import block_bytes
from kvsim.machine.models import Model
from kvsim.settings.config import RunConfig


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
