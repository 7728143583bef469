"""Simulated time: SimPy's clock, engines on a pipeline, and ranks in lock step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy
from simpy.events import EventPriority

from kvsim.core.batch import Batch
from kvsim.core.host import NEVER_NS, Receiver, SimulatedTime
from kvsim.core.plan import Plan
from kvsim.core.schema import STAGE_COLUMNS
from kvsim.cost import checked_prices
from kvsim.cost.estimates import StagedCost

Process = Generator[simpy.Event, Any, Any]

AFTER_ARRIVALS = EventPriority(2)
"""SimPy priority of the engine's events: after all other events of the same instant."""


class Clock(simpy.Environment):
    """Simulated time. Engines ask before each step what happens next."""

    def __init__(self) -> None:
        super().__init__()
        self.events = self._queue
        """What is due, as a heap of tuples that begin with their time."""

    def peek(self) -> int:
        """When the next event happens; `NEVER_NS`: none does. SimPy's own raises and catches an
        error for an empty queue."""
        return int(self._queue[0][0]) if self._queue else NEVER_NS

    def later(self, delay_ns: int) -> Later:
        """An event of the engine, `delay_ns` from now."""
        return Later(self, delay_ns)


class Later(simpy.Event):
    """An event of the engine, `delay_ns` from now."""

    def __init__(self, env: simpy.Environment, delay_ns: int) -> None:
        # As SimPy's own `Timeout` does it, without a call of `Event.__init__`.
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None
        env.schedule(self, priority=AFTER_ARRIVALS, delay=delay_ns)


def woken(wake: simpy.Event, until_ns: int) -> simpy.Event:
    """Returns an event that happens with `wake`, or when it is `until_ns` without it."""
    env = wake.env
    return wake if until_ns >= NEVER_NS else wake | env.timeout(until_ns - env.now)


class PipelineTime(SimulatedTime):
    """Simulated time of an engine whose GPUs are the stages of a pipeline: they work on several
    steps at once, each on one at a time.

    ```
    stage 0   step 0 │ step 1 │ step 2 │ step 3 ...
    stage 1          │ step 0 │ step 1 │ step 2 ...
    ```
    A stage begins with a step when its host's part is over, the activations have arrived, and those
    of the step before have left. The first stage also waits for the tokens of the step that was
    composed as many calls before as there are stages: its requests may be in this step again. Steps
    that compute nothing take a place in the queue of the engine, and are over with the step before
    them. Source: vLLM 0.33.0, `v1/engine/core.py` `step_with_batch_queue`,
    `v1/worker/gpu_worker.py` `execute_model`, `v1/worker/gpu/pp_utils.py`
    `get_prev_sampled_outputs`.
    """

    def __init__(
        self,
        env: simpy.Environment,
        cost: StagedCost,
        transfer_ns: Callable[[int], int],
        inbox: Receiver,
    ) -> None:
        super().__init__(env, checked_prices(cost).step_ns, transfer_ns, inbox)
        self.gauged, self.records_empty = STAGE_COLUMNS, False
        self._cost = cost
        self._free_ns = [0] * cost.number
        """When each stage has computed its last step."""
        self._sent_ns = [0] * cost.number
        """When each stage has sent the activations of that step; the last one sends none."""
        self._known_ns = deque([0] * cost.number, cost.number)
        """When the tokens of the last calls are known; 0 where there are none."""
        self._over_ns = 0
        """When the last step that computes anything is over."""
        self._gauges = (0, 0)

    def composes(self, batch: Batch) -> bool:
        """Whether any request is in progress; if not, the pipeline is drained."""
        return len(batch) > 0

    def takes_time(self, plan: Plan, in_flight: int) -> bool:
        """Whether a step takes a place in the queue: also an empty one, while others compute."""
        return not plan.empty or self._over_ns > self.now_ns

    def goes_on(self, batch: Batch, plan: Plan) -> bool:
        return plan.computes or (len(batch) > 0 and self._over_ns > self.now_ns)

    def step_ns(self, plan: Plan) -> int:
        return super().step_ns(plan) if plan.computes else 0

    def gauges(self) -> tuple[int, ...]:
        return self._gauges

    def runs(self, plan: Plan, now_ns: int, after_ns: int, lasts_ns: int) -> tuple[int, int, int]:
        free, sent = self._free_ns, self._sent_ns
        begin_ns = max(now_ns, free[0])
        arrive_ns = self._known_ns[0]
        if not plan.computes:
            end_ns = max(begin_ns, after_ns)
            self._known_ns.append(0)
            self._gauges = 0, end_ns - begin_ns
            return begin_ns, end_ns, free[0]
        host_ns, stages_ns, send_ns = self._cost.passage(plan, lasts_ns)
        for stage, stage_ns in enumerate(stages_ns):
            ready_ns = max(now_ns, free[stage]) + host_ns
            # `sent` is that of the step before: its activations leave before the stage computes
            # again.
            free[stage] = max(ready_ns, arrive_ns, sent[stage]) + stage_ns
            arrive_ns = sent[stage] = free[stage] + send_ns
        self._over_ns = end_ns = sent[-1] = free[-1]
        self._known_ns.append(end_ns if plan.samples else 0)
        sends_ns = send_ns * (len(stages_ns) - 1)
        self._gauges = sends_ns, end_ns - begin_ns - lasts_ns - sends_ns
        return begin_ns, end_ns, free[0]


class Ranks:
    """The data-parallel ranks of a mixture of experts: their steps begin and end together.

    ```
     rank 0  compose ─┐               ┌─ step ──────────────► settle, compose ─┐
     rank 1  compose ─┼─ all are here ┼─ step ─────► waits ──► settle, compose ─┼─ ...
     rank 2  nothing ─┘               └─ dummy ────► waits ──► settle, nothing ─┘
    ```

    The layers with experts need the tokens of all ranks, so a step takes as long as the slowest
    rank needs. A rank that has nothing to do runs a dummy batch of one token; if all have nothing
    to do, all sleep until a request arrives at one of them. Source: vLLM 0.33.0,
    v1/engine/core.py, `DPEngineCoreProc.run_busy_loop`. Its ranks run dummy batches for up to
    `dp_sync_interval` steps more before they sleep, which is not simulated.
    """

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
        # Where a rank has composed, this one goes on at once, with a dummy batch.
        if not self._here:
            yield from inbox.wait(until_ns)

    def leave(self) -> None:
        """A rank has stopped; the others go on without it."""
        self._number -= 1
        self._conclude()

    def _conclude(self) -> None:
        if len(self._here) == self._number:
            (here, self._here), met = (self._here, []), self._met
            # There before the ranks go on, which may meet again at once.
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
        transfer_ns: Callable[[int], int],
        inbox: Receiver,
        ranks: Ranks,
    ) -> None:
        """See `SimulatedTime`; `ranks` are all ranks of the engine."""
        super().__init__(env, price, transfer_ns, inbox)
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
