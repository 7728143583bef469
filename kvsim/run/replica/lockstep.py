"""Data-parallel ranks of a mixture of experts: their steps begin and end together.

```
 rank 0  compose ─┐               ┌─ step ──────────────► settle, compose ─┐
 rank 1  compose ─┼─ all are here ┼─ step ─────► waits ──► settle, compose ─┼─ ...
 rank 2  nothing ─┘               └─ dummy ────► waits ──► settle, nothing ─┘
```

The layers with experts need the tokens of all ranks, so a step takes as long as the slowest rank
needs. A rank that has nothing to do runs a dummy batch of one token; if all have nothing to do, all
sleep until a request arrives at one of them. Source: vLLM 0.33.0, v1/engine/core.py,
`DPEngineCoreProc.run_busy_loop`. Its ranks run dummy batches for up to `dp_sync_interval` steps
more before they sleep, which is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simpy

from kvsim.core.batch import Batch
from kvsim.core.host import Receiver, SimulatedTime
from kvsim.core.plan import Plan
from kvsim.run.replica.events import Link, Process


class Ranks:
    """The ranks of one engine."""

    def __init__(
        self, env: simpy.Environment, wakers: Sequence[Callable[[], None]], graph_tokens: int
    ) -> None:
        """`wakers`: for each rank, what ends its wait for a request. `graph_tokens` is the largest
        batch for which a CUDA graph is captured; 0 for none."""
        self._env, self._wakers, self._graph_tokens = env, wakers, graph_tokens
        self._number = len(wakers)
        self._here: list[tuple[RankTime, Plan]] = []
        """Who has composed the next step, and what."""
        self._met = env.event()
        """Happens when all have."""

    def meet(self, host: RankTime, plan: Plan) -> Process:
        """Waits until every rank has composed its next step. Returns how long the step takes in
        nanoseconds; None if no rank computes anything."""
        for wake in self._wakers:
            wake()
        self._here.append((host, plan))
        met = self._met
        self._conclude()
        return (yield met)

    def sleep(self, inbox: Receiver, until_ns: int) -> Process:
        """Waits until a request arrives at a rank, or another rank composes a step, at most until
        `until_ns`."""
        if not self._here:
            yield from inbox.wait(until_ns)

    def leave(self) -> None:
        """A rank has stopped; the others go on without it."""
        self._number -= 1
        self._conclude()

    def _conclude(self) -> None:
        if len(self._here) == self._number:
            (here, self._here), met = (self._here, []), self._met
            self._met = self._env.event()
            met.succeed(self._price(here))

    def _price(self, here: list[tuple[RankTime, Plan]]) -> int | None:
        """Returns how long the slowest rank needs.

        If all batches fit a CUDA graph, all are padded to the largest one (v1/worker/dp_utils.py,
        `_synchronize_dp_ranks`).
        """
        tokens = [max(plan.tokens, 1) for _, plan in here]
        padded = max(tokens, default=0) <= self._graph_tokens
        times = []
        for host, plan in here:
            if plan.computes:
                plan.rank_tokens = max(tokens) if padded else sum(tokens) / len(tokens)
                times.append(host.alone_ns(plan))
        return max(times, default=None)


class RankTime(SimulatedTime):
    """Simulated time of a rank."""

    def __init__(
        self,
        env: simpy.Environment,
        price: Callable[[Plan], int],
        link: Link,
        inbox: Receiver,
        ranks: Ranks,
    ) -> None:
        """See `SimulatedTime`; `ranks` are all ranks of the engine."""
        super().__init__(env, price, link, inbox)
        self.meets = True
        self._ranks = ranks
        self._alone_ns = 0
        """How long this rank needs for the step that all ranks have composed; 0 for a dummy
        batch."""
        self._any_computes = False
        """Whether any rank computes in this step."""

    def alone_ns(self, plan: Plan) -> int:
        """Returns how long this rank needs."""
        self._alone_ns = super().step_ns(plan)
        return self._alone_ns

    def meet(self, plan: Plan) -> Process:
        self._alone_ns = 0
        whole_ns = yield from self._ranks.meet(self, plan)
        self._any_computes = whole_ns is not None
        return (whole_ns or 0) - self._alone_ns

    def step_ns(self, plan: Plan) -> int:
        return self._alone_ns

    def takes_time(self, plan: Plan, in_flight: int) -> bool:
        return self._any_computes

    def goes_on(self, batch: Batch, plan: Plan) -> bool:
        return self._any_computes

    def sleep(self, until_ns: int) -> Process:
        yield from self._ranks.sleep(self.inbox, until_ns)
        self.now_ns = max(self.now_ns, int(self._env.now))
        return True
