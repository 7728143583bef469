"""Notes what each routing decision chose from: what the replicas' caches really had of the prompt,
what the router took them to have, and why the best one was not chosen."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from kvsim.core.blocks import BlockManager
from kvsim.core.request import Request
from kvsim.core.schema import CAUSES, ROUTING
from kvsim.fleet.routers.router import Asked, Choice, Router
from kvsim.workload.keys import SpanStream, TokenStream


class Decisions:
    """Lets a router decide, and notes the columns of `kvsim.core.schema.ROUTING`.

    It sees the caches of the engines; the router does not. It changes no decision.
    """

    def __init__(
        self,
        router: Router,
        blocks: Sequence[BlockManager],
        prompts: Sequence[SpanStream | TokenStream] | None,
        requests: int,
    ) -> None:
        """`blocks`: the block manager of each replica; `prompts`: what they know prompts by."""
        self._router, self._blocks, self._prompts = router, blocks, prompts
        self._columns = {column.name: array("q", [-1]) * requests for column in ROUTING.columns}

    def route(
        self,
        request: Request,
        asked: Asked,
        alive: Sequence[int],
        now_ns: int,
        in_flight: Sequence[int],
    ) -> int:
        """Returns the replica that the router chooses. `in_flight`: requests of each replica."""
        cached = self._cached(request, alive)
        expected = self._router.expected(asked, alive, now_ns)
        chosen, choice = self._router.route(asked, alive, now_ns)
        best, cause = _judged(cached, expected, chosen, choice, self._router.index_limit_tokens)
        row = {
            "time_ns": now_ns,
            "replica": chosen,
            "cached_tokens": cached[chosen],
            "best_replica": best,
            "best_tokens": cached[best],
            "cause": CAUSES.index(cause),
            "eligible": len(alive),
            "eligible_tokens": sum(cached.values()),
            "candidates": len(choice.workers),
            "in_flight": in_flight[chosen],
            "least_in_flight": min(in_flight[replica] for replica in alive),
        }
        if expected is not None:
            row |= {"expected_tokens": expected[chosen], "best_expected_tokens": expected[best]}
        for name, value in row.items():
            self._columns[name][request.index] = value
        return chosen

    def columns(self) -> dict[str, np.ndarray]:
        """Returns one row per request of the trace."""
        columns = {name: np.array(values) for name, values in self._columns.items()}
        return columns | {"request": np.arange(len(columns["request"]))}

    def _cached(self, request: Request, alive: Sequence[int]) -> dict[int, int]:
        """Prompt tokens that each replica's cache has."""
        if self._prompts is None:
            return dict.fromkeys(alive, 0)
        prompt = self._prompts[request.index]
        cached = {}
        for replica in alive:
            # It keeps the numbers that one pool gave its contents.
            own = Request(request.index, request.id, request.input_length, prompt)
            cached[replica] = self._blocks[replica].cached_tokens(own)
        return cached


def _judged(
    cached: Mapping[int, int],
    expected: Mapping[int, int] | None,
    chosen: int,
    choice: Choice,
    limit: int | None,
) -> tuple[int, str]:
    """The best replica, and why it was not chosen: a name of `CAUSES`."""
    most = max(cached.values())
    if cached[chosen] == most:
        return chosen, ""
    best_ones = [replica for replica, tokens in cached.items() if tokens == most]
    if expected is None:
        return best_ones[0], "no_index"
    best = max(best_ones, key=expected.__getitem__)
    if limit is not None and min(expected[best], expected[chosen]) >= limit:
        return best, "index_cap"
    if expected[best] <= expected[chosen]:
        return best, "stale_index"
    return best, "tie" if best in choice.workers else "load"
