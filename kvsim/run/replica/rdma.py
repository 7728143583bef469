"""KV blocks that decode engines pull from prefill engines, as time passes.

```
 prefill   prompt ──┬─ keeps its blocks ─────────────────────────────┬─ releases them
 decode             └ allocates blocks ─ handshake ─ queue ─ transfer ┴─ computes the last token
```

The network of an engine sends one transfer at a time, and receives one at a time, each in the order
in which they are asked for. A transfer needs the sender and the receiver. vLLM 0.33.0
`distributed/kv_transfer/kv_connector/v1/nixl/pull_worker.py`, `base_worker.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import simpy

from kvsim.core.plan import NOTHING_MOVED, Moved
from kvsim.core.request import Request
from kvsim.engines.vllm_v1.connector import NOTHING, Done, Job, Transfers, Worker
from kvsim.machine.hardware import TransferTimes
from kvsim.run.connectors import Lease
from kvsim.run.replica.inbox import Mailbox
from kvsim.run.replica.time import Process


class Handover:
    """The blocks of one prompt on their way. Of the times, -1 means not yet."""

    def __init__(self, request: Request, keeper: Keeper, now_ns: int) -> None:
        self.request, self.keeper = request, keeper
        self.puller: Puller | None = None
        """Who will read the blocks."""
        self.lease_ns = now_ns + keeper.lease.duration_ns
        """When the lease runs out."""
        self.released = self.ran_out = False
        """Whether the blocks are released, and whether because the lease ran out."""
        self.asked_ns = self.met_ns = self.sent_ns = self.read_ns = -1
        """When the decode engine asked for the blocks, the handshake was over, the transfer began,
        and it was over."""
        self.moved_bytes = 0
        """Bytes read, on all GPUs together."""

    @property
    def instants(self) -> tuple[int, int, int, int]:
        """When the transfer was asked for, possible, begun and over."""
        return self.asked_ns, self.met_ns, self.sent_ns, self.read_ns


class Keeper(Worker):
    """The worker of a prefill engine: keeps blocks until they are read, or the lease runs out."""

    def __init__(self, env: simpy.Environment, lease: Lease, engine: Mailbox) -> None:
        self.lease = lease
        self.outward = simpy.Resource(env, capacity=1)
        """The sending half of its network."""
        self._env, self._engine = env, engine
        self._over: list[Request] = []

    def keep(self, request: Request) -> Handover:
        """A prompt was computed: its blocks are kept from now on."""
        handover = Handover(request, self, int(self._env.now))
        self._env.process(self._watch(handover))
        return handover

    def release(self, handover: Handover) -> None:
        """The blocks of a prompt are not needed any more."""
        if not handover.released:
            handover.released = True
            self._over.append(handover.request)
            self._engine.wake()

    def collect(self, now_ns: int) -> Done:
        if not self._over:
            return NOTHING
        over, self._over = self._over, []
        return Done([], over)

    def _watch(self, handover: Handover) -> Process:
        """Releases blocks when their lease runs out."""
        env = self._env
        while handover.lease_ns > env.now:
            yield env.timeout(handover.lease_ns - int(env.now))
            # Heartbeats may have prolonged it meanwhile; then it is waited for again.
            if handover.released:
                return
            if handover.puller is not None:
                handover.puller.beat_asleep(int(env.now))
        handover.ran_out = True
        self.release(handover)


class Puller(Worker):
    """The worker of a decode engine: reads the blocks of prompts that others computed."""

    def __init__(
        self,
        env: simpy.Environment,
        times: TransferTimes,
        lease: Lease,
        block_bytes: int,
        handovers: Mapping[int, Handover],
        engine: Mailbox,
    ) -> None:
        """`handovers`: those of all prompts, by the index of the request."""
        self._env, self._times, self._handovers = env, times, handovers
        self._interval_ns, self._block_bytes = lease.interval_ns, block_bytes
        self._engine = engine
        self._inward = simpy.Resource(env, capacity=1)
        self._met: dict[Keeper, simpy.Event] = {}
        """Engines that it knows, or will once the event has happened."""
        self._expected: dict[Handover, None] = {}
        """What it has not read yet."""
        self._beat_ns = -lease.interval_ns
        self._under_way = 0
        self._received: list[Any] = []

    def expect(self, handover: Handover) -> None:
        """The engine gets a request whose prompt another one computed."""
        handover.puller = self
        self._expected[handover] = None

    def forget(self, handover: Handover) -> None:
        """The request is over, or its blocks were read."""
        self._expected.pop(handover, None)

    def beat_asleep(self, now_ns: int) -> None:
        """An engine that only waits for transfers steps all the time, so its heartbeats go on."""
        if self._under_way and self._engine.asleep:
            every = self._interval_ns
            # When the last beat was due, of a series that began at `_beat_ns`.
            self._beat(now_ns - (now_ns - self._beat_ns) % every if every else now_ns)

    def _beat(self, now_ns: int) -> None:
        """Prolongs the leases of what is expected, if the last time is long ago."""
        if self._expected and now_ns - self._beat_ns >= self._interval_ns:
            self._beat_ns = now_ns
            for handover in self._expected:
                extended_ns = now_ns + handover.keeper.lease.extension_ns
                handover.lease_ns = max(handover.lease_ns, extended_ns)

    def start(self, transfers: Transfers) -> None:
        self._beat(int(self._env.now))

    def launch(self, transfers: Transfers, start_ns: int, idle: bool, next_ns: int) -> Moved:
        for job in transfers.loads:
            self._env.process(self._pull(job, start_ns))
        return NOTHING_MOVED

    def collect(self, now_ns: int) -> Done:
        if not self._received:
            return NOTHING
        received, self._received = self._received, []
        return Done(received, [])

    def _pull(self, job: Job, start_ns: int) -> Process:
        """Reads the blocks of a prompt once the step at `start_ns` begins. A job that nobody awaits
        only says that they are not needed."""
        assert job.request is not None
        yield self._env.timeout(start_ns - int(self._env.now))
        handover = self._handovers[job.request.index]
        if job.awaited:
            self._under_way += 1
            handover.moved_bytes = sum(map(len, job.gpu)) * self._block_bytes
            yield from self._read(handover)
            self._under_way -= 1
            self._received.append(job.request)
            self._engine.wake()
        self.forget(handover)
        handover.keeper.release(handover)

    def _read(self, handover: Handover) -> Process:
        env, keeper = self._env, handover.keeper
        handover.asked_ns = int(env.now)
        # Who comes while they shake hands waits for the same handshake.
        if keeper not in self._met:
            self._met[keeper] = env.timeout(self._times.handshake_ns)
        yield self._met[keeper]
        handover.met_ns = int(env.now)
        with keeper.outward.request() as sends, self._inward.request() as receives:
            yield sends & receives
            handover.sent_ns = int(env.now)
            yield env.timeout(self._times.transfer_ns(handover.moved_bytes))
        handover.read_ns = int(env.now)
