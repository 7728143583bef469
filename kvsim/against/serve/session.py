"""The engine of `kvsim run`, for requests that come while it runs.

```
 send(row) ──► arrival at its time ──► mailbox ──► Serving: loop, scheduler, blocks
 cancel(entry) ──► given up at its time ──────────────────┘   │ a step is over
 Entry: tokens so far, how it ended ◄────── listeners ◄───────┘
```
Nothing here knows of HTTP or of the wall clock: who drives it calls `step` while `next_ns` is due.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import msgspec

from kvsim.against.serve.kv_events import Content, KVEventsConfig
from kvsim.against.serve.watch import Entry, Step, Steps, filler
from kvsim.core.host import NEVER_NS
from kvsim.core.loop import Listeners
from kvsim.core.request import Request
from kvsim.errors import ConfigError, EngineStopped
from kvsim.machine.hardware import FRONT_END
from kvsim.run.assembly import Parts
from kvsim.run.offload import role_of
from kvsim.run.replica.inbox import Mailbox
from kvsim.run.replica.time import Clock
from kvsim.run.result import Outcome, Result
from kvsim.run.serving import Serving
from kvsim.run.simulation import assembled
from kvsim.settings.config import RunConfig
from kvsim.settings.server.arguments import Argument
from kvsim.workload.clients import Requests
from kvsim.workload.keys import streams
from kvsim.workload.streams import TokenStream
from kvsim.workload.trace import Row, TokenContent, Trace

_STREAMS = 1 << 32
"""More requests than a session has."""
_SALT = 0x9E3779B97F4A7C15F39D
"""Distance of the keys of two salts: more than all keys of one, and odd."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a server."""

    speed: float = 1.0
    """Simulated seconds in a second of the wall clock; infinite: as fast as possible."""
    hold: int = 0
    """The time stands still until so many requests have come."""
    mean_output_tokens: float = 256.0
    """Of answers that no client made as long as `max_tokens`."""
    stream_interval: int = 1
    """Tokens from one event of a stream to the next, after the first."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The path of each, by the name with which clients ask for it."""
    kv_events: KVEventsConfig | None = None

    @property
    def virtual(self) -> bool:
        """Whether nobody waits for the wall clock."""
        return self.speed == inf


class Said(msgspec.Struct):
    """What flags, or the command line of a real server, say of the front."""

    model: str | None = None
    served_model_name: list[str] | str | None = None
    host: str | None = None
    port: int | None = None
    stream_interval: int | None = None
    lora_modules: list[str] = []
    kv_events_config: dict[str, Any] | str | None = None

    @property
    def name(self) -> str | None:
        """The name by which clients ask for the model."""
        names = self.served_model_name
        return (names if isinstance(names, str) else names and names[0]) or self.model


def said_in(arguments: Iterable[Argument], **flags: Any) -> Said:
    """Flags that have a value count more. Raises `ConfigError`."""
    given = {each.name: each.value for each in arguments}
    given |= {name: value for name, value in flags.items() if value not in (None, "", [])}
    try:
        return msgspec.convert(given, Said, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"vllm serve: {error}; give it as the real server takes it") from None


def adapters_of(modules: Sequence[str]) -> dict[str, str]:
    """The path of each adapter by its name, of `name=path` or JSON. Raises `ConfigError`."""
    found: dict[str, str] = {}
    for each in modules:
        try:
            given = json.loads(each) if each[:1] == "{" else {}
            name, path = (given["name"], given["path"]) if given else each.split("=", 1)
        except (ValueError, KeyError):
            raise ConfigError(
                f"--lora-modules: {each!r} is not name=path, or JSON of both"
            ) from None
        found[str(name)] = str(path)
    return found


class Asked:
    """Whose keys were asked for last, which is how the tokens of stored blocks are found."""

    def __init__(self) -> None:
        self.last: tuple[LiveStream, int] | None = None
        """The stream, and where the last block that was asked for ends, in blocks."""

    def of(self, keys: Sequence[int], block_size: int) -> Content:
        """The tokens of the last blocks that were asked for, as many as keys."""
        assert self.last is not None
        stream, end = self.last
        return stream.content(end - len(keys), end, block_size)


class LiveStream(TokenStream):
    """The tokens of a request, whose output is made up when it comes, and shown to nobody."""

    __slots__ = ("_asked", "_lora", "_salt")

    def __init__(
        self, asked: Asked, row: Row, output: Sequence[int], salt: int, numbers: dict[int, int]
    ) -> None:
        assert isinstance(row.content, TokenContent)
        prompt, place = row.content.prompt, {"row": row.index, "rows": _STREAMS}
        super().__init__(prompt, output, **place, salt=salt, numbers=numbers)
        self._asked, self._salt, self._lora = asked, row.salt, row.lora

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        self._asked.last = self, last
        return super().keys(first, last, block_size)

    def content(self, first: int, last: int, block_size: int) -> Content:
        """That of some of its blocks."""
        tokens = self._tokens[first * block_size : last * block_size]
        return Content(tokens, self._salt, self._lora)


class _Growing(Requests):
    """Requests of rows that become more."""

    def grow(self) -> Request:
        """Returns the request of a new row."""
        self._held.append(None)
        self._over.append(0)
        self.output_lengths.append(self.rows[-1].output_length)
        return self[len(self) - 1]


class _GivenUp:
    """Requests whose clients are gone (`kvsim.run.serving.Departures`)."""

    next_ns = NEVER_NS
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
        self.stopped: EngineStopped | None = None
        self.asked = Asked()
        self._records = records
        self._env = Clock()
        self._rows: list[Row] = []
        self._streams: list[LiveStream | None] = []
        self._salts: dict[tuple[str | None, str | None], int] = {(None, None): 0}
        self._numbers: dict[int, int] = {}
        self._given_up = _GivenUp()
        self._left_early: set[int] = set()
        """Requests whose clients left before they arrived."""
        self._mailbox = Mailbox(self._env, self._env.peek, self._told)
        config = self.parts.config
        self._requests = _Growing(self._rows, self._streams, ignore_eos=config.ignore_eos)
        self._serving = Serving(
            self._env,
            self.parts,
            self._requests,
            self._mailbox,
            listeners=Listeners(watcher=self.steps),
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
    def next_ns(self) -> int:
        """When something happens next; `NEVER_NS`: not before a request comes."""
        return int(self._env.peek()) if self.stopped is None else NEVER_NS

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

    def send(self, row: Row) -> Entry:
        """A request for token ids arrives at its time, which is not before now."""
        content, at_ns = row.content, row.arrival_ns
        assert isinstance(content, TokenContent) and at_ns is not None
        row = replace(row, index=len(self._rows))
        text, output = filler(row.index, row.output_length)
        kept = replace(content, output=tuple(output)) if self._records else None
        # A server runs for days: without records, no prompt stays.
        self._rows.append(replace(row, content=kept))
        salt = -_SALT * self._salts.setdefault((row.lora, row.salt), len(self._salts))
        stream = LiveStream(self.asked, row, output, salt, self._numbers)
        self._streams.append(stream if self.parts.blocks.needs_keys else None)
        request = self._requests.grow()
        entry = self.steps.entries[row.index] = Entry(request, text)
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
        while self.next_ns < NEVER_NS:
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
        if request.index in self._left_early:
            self._leaves(request)

    def _leaves(self, request: Request) -> None:
        if request.arrival_ns < 0:
            self._left_early.add(request.index)
            return
        self._given_up.now.append(request)
        self._mailbox.wake()

    def _told(self, ended: Iterable[Request]) -> None:
        """Clients hear of ends when a step is settled; their tokens can go now."""
        for request in ended:
            self._streams[request.index] = None


_OF_CLIENTS = ("request_rate", "max_concurrency", "num_prompts", "workload")


def _parts_of(config: RunConfig) -> Parts:
    """The objects of an engine that is to serve live. Raises `ConfigError`."""
    if role_of(config) or config.data_parallel_size > 1 or config.n > 1:
        raise ConfigError(
            "serve: one engine, not the side of a prefill/decode split, ranks or samples; leave"
            " kv_role, --data-parallel-size and --n out"
        )
    if FRONT_END in config.cost:
        raise ConfigError("cost.front_end: this server is a front end itself; leave it out")
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
