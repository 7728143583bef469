"""What a scheduler asks a KV connector, under the engine's own names.

```
 waiting    get_num_new_matched_tokens ─► (blocks are allocated) ─► update_state_after_alloc
 composed   build_connector_meta ─► Transfers ─► the worker copies ─► update_connector_output
 over       request_finished ─► whether its blocks are kept for a transfer
```

A connector decides; a worker lets time pass and says which of its transfers are over. A connector
of your own is a subclass of `Connector`. vLLM 0.33.0
`distributed/kv_transfer/kv_connector/v1/base.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvsim.core.plan import NOTHING_MOVED, Moved, Plan
from kvsim.core.request import Request


class Match(NamedTuple):
    """Tokens of a waiting request that a connector can load."""

    tokens: int = 0
    """Tokens behind those that are in blocks of the GPU already."""
    asynchronous: bool = False
    """Whether the request waits for the load in a queue; if not, its step does."""
    below: int = 0
    """Those of the tokens that came from a tier below the first one."""


class Job(NamedTuple):
    """Blocks that are copied together."""

    number: int
    request: Request | None
    """The request whose blocks they are; None for a job of several requests."""
    gpu: list[list[int]]
    """The GPU blocks of each group."""
    other: list[list[int]] | None
    """Their places in the tier, of each group; None: another engine holds them."""
    awaited: bool = True
    """Whether a request waits for the job."""
    within_step: bool = False
    """Whether the step cannot end before the job."""


class Transfers(NamedTuple):
    """What a step hands to the worker of a connector."""

    loads: list[Job]
    stores: list[Job]
    flush: list[int]
    """Numbers of jobs that must be over before the step computes."""
    sends: list[Request]
    """Ended requests whose blocks another engine reads from now on."""
    flush_all: bool = False
    """Whether all earlier transfers must be over before the step computes."""
    below: Sequence[Any] = ()
    """Copies between CPU memory and a tier below it (`storage.Below`)."""

    @property
    def begin(self) -> bool:
        """Whether any copy begins with the step."""
        return bool(self.loads or self.stores or self.below)


class Done(NamedTuple):
    """What a worker reports with the result of a step."""

    loads: list[Any]
    """Jobs, or whatever else the connector calls its transfers."""
    stores: list[Any]
    below: Sequence[Any] = ()
    """Copies between CPU memory and a tier below it."""


class Reported(NamedTuple):
    """Requests whose transfers are over."""

    received: list[Request]
    """Their KV has arrived."""
    sent: list[Request]
    """Their blocks have been read."""


NOTHING = Done([], [])
"""What a worker reports where no transfer is over."""
NO_TRANSFERS = Transfers([], [], [], [])
"""What a step hands over that moves nothing."""


class Connector:
    """A connector that moves nothing."""

    loads = False
    """Whether it can load into blocks at any time. With several batches in flight, blocks that one
    of them still writes are then released late."""
    stores_at_once = False
    """Whether a store begins with the step that asks for it, as its tokens were computed before."""
    capacity_blocks = 0
    """Number of blocks of the GPU that its tier has room for; 0: unknown."""
    delivers = False
    """Whether an output is worthless without the KV it was computed with, as where another engine
    continues the request: a preemption then discards outputs in flight."""

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> Match | None:
        """Returns what can be loaded behind the first `computed` tokens of a waiting request. None:
        it cannot be said yet, and the request is asked again in the next step."""
        return Match()

    def update_state_after_alloc(self, request: Request, local: int, match: Match) -> None:
        """Blocks were allocated for a waiting request: `local` tokens of them are hits, those of
        `match` behind them are to be loaded."""

    def build_connector_meta(self, plan: Plan) -> Transfers:
        """Returns what the worker does in a step that was composed; `Request.computed` does not
        count its tokens yet."""
        return NO_TRANSFERS

    def request_finished(self, request: Request) -> bool:
        """A request is over. Returns whether its blocks are kept until its transfer is reported."""
        return False

    def update_connector_output(self, done: Done) -> Reported:
        """Takes in what the worker reports."""
        return Reported([], [])

    def remarks(self) -> list[str]:
        """Returns what a reader of the result should know about this run, one line each."""
        return []

    def describe(self) -> dict[str, Any]:
        """Returns what it did, in plain values, for `meta.kv_offload` of the summary."""
        return {}

    @property
    def restless(self) -> bool:
        """Whether an engine without requests steps on until its transfers are over, because others
        follow from them."""
        return False

    @property
    def busy(self) -> bool:
        """Whether an engine without requests has to step on, because of its transfers."""
        return False


class Worker:
    """Copies what a connector decided. This one has nothing to copy."""

    def start(self, transfers: Transfers) -> None:
        """A step was composed."""

    def launch(self, transfers: Transfers, start_ns: int, idle: bool, next_ns: int) -> Moved:
        """A step begins at `start_ns`, or later, as it waits for transfers. Returns how long.

        `idle`: there is nothing to compute although requests wait, so that the engine does nothing
        before a transfer is over or, at `next_ns`, a request arrives.
        """
        return NOTHING_MOVED

    def collect(self, now_ns: int) -> Done:
        """Returns the transfers that the oldest step in flight reports as it ends."""
        return NOTHING

    def pause(self, now_ns: int) -> Done:
        """Returns the transfers that were over while the engine had nothing to do."""
        return self.collect(now_ns)

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way."""
        return False

    @property
    def unsent(self) -> bool:
        """Whether a transfer begins with the next step, even if that computes nothing."""
        return False


def note_tiers(request: Request) -> None:
    """Notes, of a request that takes part in a step for the first time, what was loaded for it."""
    if not request.num_preemptions and request.match is not None:
        loaded = min(request.match.tokens, request.cached_tokens)
        request.tier2_hit_tokens = min(request.match.below, loaded)
        request.tier1_hit_tokens = loaded - request.tier2_hit_tokens
