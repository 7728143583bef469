"""Replays what a real router was shown, and says what kvsim's would have decided.

Each record is an operation, in the order in which the router saw them. For a decision, the replayed
record tells how the router stands before it, and its books after the *recorded* choice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from zlib import crc32

import xxhash

from kvsim.against.conform.cases import RouterRun
from kvsim.against.conform.step_log import Record
from kvsim.errors import TraceError
from kvsim.fleet import ROUTERS
from kvsim.fleet.routers import router as textbook
from kvsim.fleet.routers.dynamo import DynamoKv
from kvsim.fleet.routers.router import Asked, Choice, Router
from kvsim.fleet.routers.sglang import CacheAware
from kvsim.fleet.routers.vllm import DataParallel, PrefixAware, RoundRobin, Session

R = TypeVar("R", bound=Router)

_MEDIA = {None: "device", "CPU": "host", "DISK": "disk"}


class Written(NamedTuple):
    """Content of a recorded request."""

    parts: tuple[tuple[str, int], ...]
    """Labels, and how many tokens or characters of each."""
    literal: str | None = None
    """The text itself, where it is recorded."""

    @property
    def text(self) -> str:
        if self.literal is not None:
            return self.literal
        return "".join(_characters(label, length) for label, length in self.parts)

    def keys(self, block_size: int) -> list[Hashable]:
        tokens = b"".join(_tokens(label, length) for label, length in self.parts)
        # A token is 4 bytes.
        ends = range(4 * block_size, len(tokens) + 1, 4 * block_size)
        return [xxhash.xxh3_128_digest(tokens[:end]) for end in ends]


@lru_cache(4096)
def _characters(label: str, length: int) -> str:
    first, number = (0x4E00, 5000) if label.startswith("zh") else (ord("a"), 26)
    return "".join(chr(first + crc32(f"{label}:{j}".encode()) % number) for j in range(length))


@lru_cache(4096)
def _tokens(label: str, length: int) -> bytes:
    tokens = (crc32(f"{label}:{j}".encode()) % 32000 for j in range(length))
    return b"".join(token.to_bytes(4) for token in tokens)


_SILENT = ("track_output_blocks", "track_active_blocks")
"""Settings that decide nothing here: the front end reports output blocks or does not, and active
blocks count either way."""


class _Replay(Generic[R]):
    """One recorded run, played to a router."""

    policies: ClassVar[Mapping[str, Any]]
    """The router of each policy that a header may name."""

    def __init__(self, header: Record) -> None:
        self.header, self.names = header, header["workers"]
        settings = {key: value for key, value in header["config"].items() if key not in _SILENT}
        policy = self.policies[settings.pop("policy", "")]
        self.router: R = policy([str(name) for name in self.names], **settings)
        router: Any = self.router
        self._news: dict[str, Callable[[Record], None]] = {
            "first_token": lambda record: router.first_token(record["id"]),
            "free": lambda record: router.ended(record["id"]),
            "end": lambda record: router.ended(record["id"]),
            "output_block": lambda record: router.output_block(record["id"], record.get("decay")),
            "cleared": lambda record: router.cleared(record["worker"]),
            "worker_lost": lambda record: router.worker_lost(record["worker"]),
            "worker_added": lambda record: router.worker_added(record["worker"]),
            "snapshot": lambda record: router.snapshot([tuple(x) for x in record["engines"]]),
        }

    def play(self, records: Sequence[Record]) -> Iterator[Record]:
        """Returns the decisions, and what else can be compared."""
        for record in records:
            if record["op"] == "route":
                yield self.decision(record)
            else:
                yield self.told(record)

    def told(self, record: Record) -> Record:
        """Something else happened than a decision. Returns what can be compared."""
        self._news[record["op"]](record)
        return {"op": record["op"]}

    def decision(self, record: Record) -> Record:
        """Returns what the router decides; then books what the real one chose."""
        raise NotImplementedError

    def _chosen(self, record: Record, choice: Choice, names: Sequence[Any]) -> Any:
        """The recorded choice if it is one of those that kvsim's router draws from."""
        possible = [names[worker] for worker in choice.workers]
        return record["chosen"] if record["chosen"] in possible else possible[0]


class _Dynamo(_Replay[DynamoKv]):
    policies: ClassVar = {"": DynamoKv}

    def __init__(self, header: Record) -> None:
        super().__init__(header)
        self._alive = list(self.names)
        self._decays = header["config"].get("overlap_score_credit_decay", 0) > 0

    def told(self, record: Record) -> Record:
        if record["op"] in ("stored", "removed"):
            keys = _written(record["prompt"]).keys(self.router.block_size)
            tier, worker = _MEDIA[record.get("medium")], record["worker"]
            if record["op"] == "removed":
                self.router.removed(worker, [keys[i] for i in record["blocks"]], tier)
            else:
                first, last = record["blocks"]
                parent = keys[first - 1] if first else None
                self.router.stored(worker, parent, keys[first:last], tier)
            return {"op": record["op"]}
        told = super().told(record)
        if record["op"] == "worker_lost":
            self._alive.remove(record["worker"])
        elif record["op"] == "worker_added":
            self._alive = sorted([*self._alive, record["worker"]])
        return told

    def decision(self, record: Record) -> Record:
        router, everyone = self.router, self._alive
        asked = Asked(record["id"], record["isl"], _written(record["prompt"]))
        allowed = record.get("allowed", everyone)
        choice = router.choose(asked, allowed, 0)
        standings = router.weigh(asked, everyone)
        costs = {each.worker: each.cost for each in router.weigh(asked, allowed)}
        replayed = {
            "op": "route",
            "cand": [
                [
                    *(each.worker, each.overlap[0], each.prefill_tokens),
                    *(each.prefill_tokens + each.new_tokens, each.decode_blocks, each.requests),
                    None if self._decays else costs.get(each.worker),
                ]
                for each in standings
            ],
            "set": sorted(choice.workers),
            "chosen": self._chosen(record, choice, range(len(router.workers))),
            "cost": costs.get(record["chosen"]),
        }
        if any(any(each.overlap[1:]) for each in standings):
            replayed["tiers"] = [list(each.overlap[1:]) for each in standings]
        if record.get("reserve", True):
            router.sent(asked, record["chosen"], 0)
        state = "".join(
            f"{worker}:{len(router.caches[worker][0])},{books.blocks},{books.prefill_tokens},"
            f"{books.requests};"
            for worker in everyone
            for books in (router.books[worker],)
        )
        return {**replayed, "state": crc32(state.encode())}


class _Sglang(_Replay[CacheAware | textbook.RoundRobin | textbook.Uniform]):
    policies: ClassVar = {
        policy: ROUTERS[f"sglang-{policy}"]
        for policy in ("cache_aware", "round_robin", "random", "power_of_two")
    }

    def told(self, record: Record) -> Record:
        if record["op"] != "evict" or not isinstance(self.router, CacheAware):
            return super().told(record)
        self.router.tick()
        return {"op": "evict", "chars": list(self.router.tree.held)}

    def decision(self, record: Record) -> Record:
        router, body, order = self.router, record.get("body", {}), self.header["order"]
        text = body.get("text")
        if "input_ids" in body:
            text = " ".join(map(str, body["input_ids"]))
        asked = Asked(record["id"], 0, _written(record["text"], text))
        load = list(router.load) if isinstance(router, CacheAware) else record["load"]
        choice = router.choose(asked, order, 0)
        router.sent(asked, record["chosen"], 0)
        replayed = {
            "op": "route",
            "load": load,
            "chosen": self._chosen(record, choice, range(len(order))),
            "set": list(choice.workers),
        }
        if isinstance(router, CacheAware):
            replayed["branch"] = choice.why
            if choice.why != "imbalanced":
                replayed["match"] = router.matched
            held = "".join(
                f"{worker}:{characters},{load};"
                for worker, (characters, load) in enumerate(
                    zip(router.tree.held, router.load, strict=True)
                )
            )
            replayed["state"] = crc32(f"{held}{router.tree.stamp}".encode())
        return replayed


class _ProductionStack(_Replay[RoundRobin | Session | PrefixAware]):
    policies: ClassVar = {
        "roundrobin": RoundRobin,
        "session": Session,
        "prefixaware": PrefixAware,
    }

    def decision(self, record: Record) -> Record:
        router, names = self.router, self.names
        now_ns = round(record["t"] * 1e9)
        alive = [names.index(name) for name in record["alive"]]
        content = _written(record.get("text", []))
        asked = Asked(record["id"], 0, content, record.get("session"))
        rates = {names[worker]: rate for worker, rate in router.rates(now_ns).items()}
        choice = router.choose(asked, alive, now_ns)
        replayed = {
            "op": "route",
            "qps": rates,
            "chosen": self._chosen(record, choice, names),
        }
        if isinstance(router, PrefixAware):
            matched, holders = router.match(content.text, alive)
            replayed |= {"match": matched, "set": sorted(names[worker] for worker in holders)}
        router.sent(asked, names.index(record["chosen"]), now_ns)
        return replayed


class _DataParallel(_Replay[DataParallel]):
    policies: ClassVar = {"vllm_dp": DataParallel}

    def decision(self, record: Record) -> Record:
        router = self.router
        asked = Asked(record["id"], 0, Written(()), rank=record.get("rank"))
        choice = router.choose(asked, self.names, 0)
        replayed = {
            "op": "route",
            "snapshot": [list(loads) for loads in router.loads],
            "inflight": list(router.load),
            "chosen": self._chosen(record, choice, self.names),
        }
        router.sent(asked, record["chosen"], 0)
        return replayed


REPLAYS: Mapping[str, Callable[[Record], _Replay[Any]]] = {
    "dynamo": _Dynamo,
    "sglang": _Sglang,
    "production-stack": _ProductionStack,
    "vllm-dp": _DataParallel,
}
"""Routers of which decisions are recorded; the folders of their cases have these names."""


def replay(router: str, run: RouterRun) -> list[Record]:
    """Plays a run to kvsim's router; returns a record for each of the run's.

    Raises `TraceError` where a record lacks what it needs.
    """
    replayed: list[Record] = []
    try:
        for record in REPLAYS[router](run.header).play(run.records):
            replayed.append(record)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        where = f"{run.name}: record {len(replayed)}"
        raise TraceError(f"{where} is none of a {router} router: {error!r}") from None
    return replayed


def _written(parts: Sequence[Sequence[Any]], literal: str | None = None) -> Written:
    return Written(tuple((label, length) for label, length in parts), literal)
