"""The engine of `kvsim run`, for requests that come while it runs.

```
 send(ask, at) ──► arrival at its time ──► mailbox ──► Serving: loop, scheduler, blocks
 cancel(entry) ──► given up at its time ──────────────────┘   │ a step is over
 Entry: tokens so far, how it ended ◄────── listeners ◄───────┘
```
Nothing here knows of HTTP or of the wall clock: who drives it calls `step` while `next_ns` is due.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from kvsim.against.serve.kv_events import Content
from kvsim.against.serve.watch import Entry, Step, Steps
from kvsim.against.serve.words import filler
from kvsim.core.batch import Batch
from kvsim.core.request import Request
from kvsim.errors import ConfigError, EngineStopped
from kvsim.fleet.dispatch import Mailbox
from kvsim.run.assembly import Parts
from kvsim.run.features.offload import role_of
from kvsim.run.replica.events import Clock
from kvsim.run.result import Outcome, Result
from kvsim.run.serving import Serving
from kvsim.run.simulation import assembled
from kvsim.settings.config import RunConfig
from kvsim.workload.clients import Requests
from kvsim.workload.keys import TokenStream, streams
from kvsim.workload.trace import Row, TokenContent, Trace

_STREAMS = 1 << 32
"""More requests than a session has."""
_SALT = 0x9E3779B97F4A7C15F39D
"""Distance of the keys of two salts: more than all keys of one, and odd."""


class Ask(NamedTuple):
    """What a client asks for."""

    id: str
    prompt: Sequence[int]
    output_length: int
    """Tokens that it will get."""
    max_tokens: int | None = None
    """Tokens that it allows."""
    ignore_eos: bool = False
    priority: int = 0
    salt: str | None = None
    lora: str | None = None
    """Name of its adapter."""


class Asked:
    """Whose keys were asked for last, which is how the tokens of stored blocks are found."""

    def __init__(self) -> None:
        self.ask: Ask | None = None
        self.tokens: Sequence[int] = ()
        """Those up to the end of the last block that was asked for."""

    def of(self, keys: Sequence[int], block_size: int) -> Content:
        """The tokens of the last blocks that were asked for, as many as keys."""
        assert self.ask is not None
        tokens = self.tokens[-len(keys) * block_size :]
        return Content(tokens, self.ask.salt, self.ask.lora)


class LiveStream(TokenStream):
    """The tokens of a request, whose output is made up when it comes, and shown to nobody."""

    __slots__ = ("_ask", "_asked")

    def __init__(
        self,
        asked: Asked,
        ask: Ask,
        output: Sequence[int],
        index: int,
        salt: int,
        numbers: dict[int, int],
    ) -> None:
        super().__init__(ask.prompt, output, row=index, rows=_STREAMS, salt=salt, numbers=numbers)
        self._asked, self._ask = asked, ask

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        self._asked.ask, self._asked.tokens = self._ask, self._tokens[: last * block_size]
        return super().keys(first, last, block_size)


class _Growing(Requests):
    """Requests of rows that become more."""

    def __init__(self, rows: Sequence[Row], streams: Any, *, ignore_eos: bool) -> None:
        super().__init__(rows, streams, ignore_eos=ignore_eos)

    def grow(self) -> Request:
        """Returns the request of a new row."""
        self._held.append(None)
        self._over.append(0)
        return self[len(self) - 1]


class _GivenUp:
    """Requests whose clients are gone (`kvsim.run.serving.Departures`)."""

    next_ns = inf
    """Who gives up wakes the engine."""

    def __init__(self) -> None:
        self.now: list[Request] = []

    def begins(self, request: Request) -> None:
        """A request was sent."""

    def over(self, now_ns: int) -> list[Request]:
        """Takes out the requests that are given up."""
        gone, self.now = self.now, []
        return gone


class Session:
    """One engine at work, and its clients."""

    def __init__(self, config: RunConfig, *, records: bool = False) -> None:
        """`records`: keep what `result` needs of every request. Raises `ConfigError` for settings
        that cannot be served live."""
        self.parts = _parts_of(config)
        self.steps = Steps()
        self.steps.listeners.append(self._forget)
        self.stopped: EngineStopped | None = None
        self.asked = Asked()
        self._records = records
        self._env = Clock()
        self._rows: list[Row] = []
        self._streams: list[LiveStream | None] = []
        self._lengths = array("q")
        self._salts: dict[tuple[str | None, str | None], int] = {(None, None): 0}
        self._numbers: dict[int, int] = {}
        self._given_up = _GivenUp()
        self._mailbox = Mailbox(self._env, self._env.peek, self._told)
        config = self.parts.config
        self._requests = _Growing(self._rows, self._streams, ignore_eos=config.ignore_eos)
        self._serving = Serving(
            self._env,
            self.parts,
            self._rows,
            self._requests,
            self._mailbox,
            self._lengths.__getitem__,
            refused={},
            watcher=self.steps,
            departures=self._given_up,
        )
        self._env.process(self._serving.run())
        self.batch = self._serving.batch
        self.step()  # The engine falls asleep.

    # -- for whoever drives it -------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """The simulated time."""
        return int(self._env.now)

    @property
    def next_ns(self) -> float:
        """When something happens next; infinite: not before a request comes."""
        return self._env.peek() if self.stopped is None else inf

    def step(self) -> None:
        """Lets the next event happen. An engine that stops ends all requests with an error."""
        try:
            self._env.step()
        except EngineStopped as stop:
            self.stopped = stop
            left = [*self.steps.entries.values()]
            for entry in left:
                entry.reason, entry.error = "error", str(stop)
            self.steps.tell(self.batch, Step(self.now_ns, ended=left))

    def send(self, ask: Ask, at_ns: int, wake: Callable[[], None] | None = None) -> Entry:
        """A request arrives at `at_ns`, not before now. `wake` is called when it has changed."""
        index = len(self._rows)
        words, output = filler(index, ask.output_length)
        salt = self._salts.setdefault((ask.lora, ask.salt), len(self._salts))
        kept = TokenContent(tuple(ask.prompt), tuple(output)) if self._records else None
        self._rows.append(
            Row(
                index,
                ask.id,
                0,
                at_ns,
                len(ask.prompt),
                ask.output_length,
                kept,
                salt=ask.salt,
                lora=ask.lora,
                priority=ask.priority,
                max_new_tokens=ask.max_tokens,
                ignore_eos=ask.ignore_eos,
            )
        )
        self._lengths.append(ask.output_length)
        self._streams.append(
            LiveStream(self.asked, ask, output, index, -_SALT * salt, self._numbers)
            if self.parts.blocks.needs_keys
            else None
        )
        request = self._requests.grow()
        entry = self.steps.entries[index] = Entry(request, words, wake)
        self._at(at_ns, lambda: self._arrives(request))
        return entry

    def cancel(self, entry: Entry, at_ns: int) -> None:
        """A client gives its request up. Engines that do not end requests early serve it on."""
        if entry.request.index in self.steps.entries:
            self._at(at_ns, lambda: self._leaves(entry.request))

    def close(self) -> None:
        """All clients are gone, and the engine settles what it has begun."""
        for entry in [*self.steps.entries.values()]:
            self.cancel(entry, self.now_ns)
        while self.steps.entries and self.next_ns < inf:
            self.step()

    def result(self, command: str = "") -> Result:
        """What the engine did, as `kvsim run` tells it. The session is over."""
        assert self._records, "nothing was kept"
        content = repr(
            [(row.arrival_ns, row.input_length, row.output_length) for row in self._rows]
        )
        digest = hashlib.sha256(content.encode()).hexdigest()
        trace = Trace("kvsim serve", "served", digest, self._rows)
        now_ns = self._serving.now_ns
        ended: Outcome = self._serving.outcome(now_ns, self.stopped)
        self._requests.streams = streams(trace)
        indexes = self._serving.archive.missing()
        made = self._serving.result(trace, ended, indexes, [], command)
        self._serving.archive.let_rows_go()
        return made

    # --------------------------------------------------------------------------------------------

    def _at(self, at_ns: int, happens: Callable[[], None]) -> None:
        timer = self._env.timeout(max(0, at_ns - self.now_ns))
        timer.callbacks.append(lambda event: happens())

    def _arrives(self, request: Request) -> None:
        request.released_ns = request.arrival_ns = self.now_ns
        self._mailbox.put(request)

    def _leaves(self, request: Request) -> None:
        self._given_up.now.append(request)
        self._mailbox.wake()

    def _forget(self, batch: Batch, step: Step) -> None:
        for entry in step.ended:
            self._streams[entry.request.index] = None

    def _told(self, ended: Iterable[Request]) -> None:
        """Clients hear of the ends of requests when a step is settled."""


_OF_CLIENTS = ("request_rate", "max_concurrency", "num_prompts", "workload")


def _parts_of(config: RunConfig) -> Parts:
    """The objects of an engine that is to serve live. Raises `ConfigError`."""
    if role_of(config) or config.data_parallel_size > 1 or config.n > 1:
        raise ConfigError(
            "serve: one engine, not the side of a prefill/decode split, ranks or samples; leave"
            " kv_role, --data-parallel-size and --n out"
        )
    for key in _OF_CLIENTS:
        if getattr(config, key) is not None:
            raise ConfigError(f"{key}: clients decide what they send, and when; leave it out")
    parts = assembled(config, [Row(0, "0", 0, 0, 1, 1)])
    if parts.future.oracles:
        raise ConfigError(
            f"{parts.future.oracles[0]}: sees the future, which nobody knows while requests still"
            " come; choose another policy"
        )
    return parts
