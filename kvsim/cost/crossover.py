"""Where swapping a request's KV cache out and in takes less time than recomputing it.

Both are priced as for `preemption_mode = auto` (`kvsim.cost`): a prompt step of its own
against copies over an idle link. The bandwidth at which both cost the same shows how much a link
would have to change for the other choice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from kvsim.cost import MeansPrices, make_cost
from kvsim.machine.hardware import Hardware, make_link
from kvsim.machine.memory import block_bytes, token_bytes
from kvsim.machine.models import Model
from kvsim.settings.config import RunConfig

LAYOUTS = ("layer", "cross")


class Crossing(NamedTuple):
    """Both prices of one request; times are nanoseconds."""

    tokens: int
    recompute_ns: int
    swap_ns: dict[str, int]
    """Time of swapping out and in, by layout."""
    break_even_gb_s: dict[str, float | None]
    """By layout: the link bandwidth at which both cost the same. None: the copies take longer at
    any bandwidth."""


class ModelCrossings(NamedTuple):
    """One model on one hardware."""

    name: str
    kind: str
    source: str
    """Source of the times of recomputing, as the cost model states it; `kind` is its kind."""
    token_bytes: int
    """Bytes of the KV of one token on one GPU; `block_bytes` are those of one block."""
    block_bytes: int
    link: dict[str, dict[str, Any]]
    """The link's own description, by layout."""
    crossings: list[Crossing]


def crossings(
    model: Model, hardware: Hardware, config: RunConfig, tokens: list[int], layouts: list[str]
) -> ModelCrossings:
    """Both prices for requests of these lengths, by copy layout.

    `config.cost` chooses the cost model of recomputing and the link, as in a run; `layouts` replace
    the layout of its link. Raises `ConfigError`.
    """
    cost = make_cost(config, model, hardware)
    size = block_bytes(model, config)
    prices, links = {}, {}
    for layout in layouts:
        settings = {**config.cost.get("link", {}), "layout": layout}
        link = make_link(model, hardware, replace(config, cost={"link": settings}), size)
        prices[layout], links[layout] = MeansPrices(cost, link), link.describe()
    block_tokens, found = size // token_bytes(model, config), []
    for length in tokens:
        blocks = -(-length // block_tokens)
        recompute_ns = next(iter(prices.values())).recompute_ns(length)
        swap_ns = {layout: each.swap_ns(blocks, 0) for layout, each in prices.items()}
        even = {layout: _break_even(recompute_ns, blocks, link) for layout, link in links.items()}
        found.append(Crossing(length, recompute_ns, swap_ns, even))
    return ModelCrossings(
        model.name,
        cost.kind,
        cost.source,
        token_bytes(model, config),
        size,
        links,
        found,
    )


def _break_even(recompute_ns: int, blocks: int, link: dict[str, Any]) -> float | None:
    """Bandwidth in GB/s at which the swap takes as long as the recompute.

    None: each piece takes at least the overhead of a copy, and all pieces together take longer than
    the recompute at any bandwidth.
    """
    # Out and in again.
    least_ns = 2 * blocks * link["pieces_per_block"] * link["copy_overhead_us"] * 1e3
    if least_ns >= recompute_ns:
        return None
    return float(2 * blocks * link["block_bytes"] / recompute_ns)
