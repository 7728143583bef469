"""Step logs, record by record: of any run, of a replay on the unit clock, and where two differ.

The unit clock is a host whose every step takes one second, as in the conformance corpus. It has no
event loop and no cost model: what remains is every decision.
"""

from __future__ import annotations

import json
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from sys import maxsize
from typing import Any, NamedTuple, TextIO
from zlib import crc32

import xxhash

from kvsim.core.batch import Batch
from kvsim.core.blocks import BlockManager
from kvsim.core.host import Host, Waiting
from kvsim.core.loop import Listeners, Loop
from kvsim.core.plan import SWAP, Plan
from kvsim.core.request import ABORTED, RUNNING, Request
from kvsim.core.scheduler import Scheduler
from kvsim.engines.nano import NanoTables
from kvsim.engines.vllm_063.blocks import Naive
from kvsim.errors import EngineStopped
from kvsim.settings.library import signature
from kvsim.writing import replacing

Record = dict[str, Any]


def step_record(batch: Batch, plan: Plan, step: int, time: float, added: int) -> Record:
    """The record of a step just composed; `finish_record` completes it."""
    blocks: Any = batch.blocks
    return {
        "step": step,
        "time": time,
        "added": added,
        "prefill": [
            [p.request.id, p.charged, p.cached, p.computed_before, int(p.samples)]
            for p in plan.prefills
        ],
        "decode": _ids(plan.decodes),
        "preempted": [[request.id, means] for request, means in plan.preempted],
        "swapped_out": [request.id for request, means in plan.preempted if means == SWAP],
        "swapped_in": _ids(plan.swapped_in),
        "ignored": _ids(plan.ignored),
        "waiting": len(batch.waiting),
        "running": len(batch.running),
        "swapped": len(batch.swapped),
        "free_gpu_blocks": blocks.gpu.free,
        "free_cpu_blocks": blocks.cpu.free,
        "batched_tokens": plan.batched_tokens,
        "blocks_to_copy": len(plan.copies),
        "blocks_to_swap_in": len(plan.swaps_in),
        "blocks_to_swap_out": len(plan.swaps_out),
        "q": [queue_digest(q) for q in (batch.waiting, batch.running, batch.swapped)],
        "bt": _table_digest(blocks, plan),
    }


def finish_record(record: Record, batch: Batch, ended: Iterable[Request]) -> Record:
    """Add what output processing did."""
    record["finished"] = [request.id for request in ended if not request.reason]
    blocks: Any = batch.blocks
    record["free_gpu_blocks_end"] = blocks.gpu.free
    return record


def _ids(requests: Iterable[Any]) -> list[str]:
    return [request.id for request in requests]


def queue_digest(queue: Iterable[Any]) -> int:
    """Returns the digest of the ids in a queue, in order."""
    return crc32(",".join(_ids(queue)).encode())


def _table_digest(blocks: BlockManager, plan: Plan) -> int:
    digest = 0
    below = isinstance(blocks, (NanoTables, Naive))  # The engine counts its blocks from 0.
    for request, _, _ in plan.entries:
        for sequence in request.sequences:
            if sequence.state == RUNNING:
                for group, table in enumerate(blocks.tables(sequence)):
                    label = f"{request.id}#{group}" if group else request.id
                    ids = ",".join([str(block - below) for block in table])
                    digest = crc32(f"{label}={ids};".encode(), digest)
    return digest


@contextmanager
def open_step_log(path: str) -> Iterator[StepLog]:
    """The step log of a run, in a file that appears under its name only when the run is over.
    Raises `OutputError` where it cannot be written."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
        yield StepLog(file)


class StepLog:
    """A watcher of a replica that writes a record of each step; `time` is in simulated seconds."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._record: Record = {}
        self._step = 0

    def begin(self) -> None:
        """Start over: what was written belongs to an attempt that was given up."""
        self._file.seek(0)
        self._file.truncate()
        self._step = 0

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """Take down a step that has just been composed."""
        self._record = step_record(batch, plan, self._step, now_ns / 1e9, arrived)

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        """Complete the record and write it."""
        finish_record(self._record, batch, ended)
        self._file.write(json.dumps(self._record, separators=(",", ":")) + "\n")
        self._step += 1

    def stopped(self, outcome: Mapping[str, Any]) -> None:
        """The run is over; if the engine died or got stuck, the last record says so."""
        if outcome["kind"] != "finished":
            text = outcome["rule"] or outcome["kind"]
            record = {"step": self._step, "time": outcome["time_s"], "error": text}
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


MEANINGS: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("meanings.toml").read_text("utf-8")
)
"""Field of a record → what a difference in it means. In order of cause: the first one that differs
is the one to look at."""


class Divergence(NamedTuple):
    """The first record in which two logs differ."""

    record: int
    step: int | None
    fields: dict[str, tuple[Any, Any]]
    """Differing field → the values of the two logs, in order of cause."""

    def __str__(self) -> str:
        field, (a, b) = next(iter(self.fields.items()))
        meaning = MEANINGS.get(field, "the records differ")
        others = ", ".join(list(self.fields)[1:])
        also = f"; also {others}" if others else ""
        step = "" if self.step is None else f", step {self.step}"
        return f"record {self.record}{step}: {meaning} ({field}: {a} | {b}{also})"


def first_divergence(one: list[Record], other: list[Record]) -> Divergence | None:
    """The first difference; None where the logs are equal.

    Extra fields do no harm. Of an error record only step, time and kind count.
    """
    for number, (a, b) in enumerate(zip_longest(one, other)):
        fields = _differences(a, b)
        if fields:
            return Divergence(number, (a or b or {}).get("step"), fields)
    return None


def error_kind(record: Record | None) -> str | None:
    """`deadlock`, `max_steps` or `engine error`; None for a step."""
    if record is None or "error" not in record:
        return None
    text = str(record["error"])
    if text.startswith("deadlock"):
        return "deadlock"
    return text if text == "max_steps" else "engine error"


def _differences(a: Record | None, b: Record | None) -> dict[str, tuple[Any, Any]]:
    if a == b:
        return {}
    if a is None or b is None:
        missing = "the log ends"
        return {"error": (missing if a is None else "a step", missing if b is None else "a step")}
    if error_kind(a) != error_kind(b):
        return {"error": (a.get("error", "a step"), b.get("error", "a step"))}
    unequal = {key for key in (a.keys() & b.keys()) - {"error"} if a[key] != b[key]}
    different = {key: (a[key], b[key]) for key in (*MEANINGS, *a) if key in unequal}
    if ("drain" in a) != ("drain" in b):
        different["drain"] = ("drain" in a, "drain" in b)
    return different


END = 32000
"""The token that ends a sequence."""


class RuleStream:
    """A prompt of known tokens, continued by the test corpus's rule for generated tokens.

    Output token k of label L is `crc32("L:k") mod 32000`; where samples have lengths of their own,
    the last one is `END`. Keys are chained xxh128 digests.
    """

    knows_tokens = True

    def __init__(
        self,
        label: str,
        prompt: Sequence[int],
        sample: int | None = None,
        lengths: Sequence[int] | None = None,
        salt: str = "",
    ) -> None:
        """Streams with different salts share no key."""
        self._id = label
        self._lengths = lengths
        self._end = lengths[sample or 0] - 1 if lengths else -1
        """Number of the output token that is `END`; -1: none."""
        self._label = label if sample is None else f"{label}/{sample}"
        self._prompt = prompt
        self._tokens = list(prompt)
        self._keys: dict[int, list[int]] = {}
        """Block size → keys so far."""
        self._salt = salt.encode()
        self._digests: dict[int, bytes] = {}

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        """Keys of full blocks `first .. last - 1`."""
        keys = self._keys.setdefault(block_size, [])
        digest = self._digests.get(block_size, self._salt)
        while len(keys) < last:
            digest = xxhash.xxh128_digest(digest + self._block(len(keys), block_size))
            keys.append(int.from_bytes(digest, "little"))
        self._digests[block_size] = digest
        return keys[first:last]

    def contents(self, first: int, last: int, block_size: int) -> list[int]:
        """Identities of the tokens in blocks `first .. last - 1`, whatever is before them."""
        return [xxhash.xxh128_intdigest(self._block(i, block_size)) for i in range(first, last)]

    def _block(self, index: int, block_size: int) -> bytes:
        """The tokens of a full block, spelled out."""
        tokens, start = self._tokens, len(self._prompt)
        end = (index + 1) * block_size
        for k in range(len(tokens) - start, end - start):
            token = crc32(f"{self._label}:{k}".encode()) % 32000
            tokens.append(END if k == self._end else token)
        return repr(tokens[end - block_size : end]).encode()

    def sample(self, index: int) -> RuleStream:
        """The stream of the corpus's sample `index - 1`."""
        return RuleStream(self._id, self._prompt, index - 1, self._lengths, self._salt.decode())


STUCK_STEPS = 50
"""Number of consecutive empty steps, with no arrival left, that counts as a deadlock."""

STEP_NS = 1_000_000_000


def _request(index: int, row: dict[str, Any]) -> Request:
    n, tokens = int(row.get("n", 1)), row["prompt_token_ids"]
    salt = "\n".join((row.get("lora", ""), row.get("cache_salt", "")))
    lengths = row.get("output_lens")
    return Request(
        index,
        row["id"],
        len(tokens),
        RuleStream(row["id"], tokens, n - 1 if n > 1 else None, lengths, salt),
        n=n,
        priority=row.get("priority", 0),
        prefix_pos=row.get("prefix_pos") or 0,
    )


def corpus_requests(
    trace: list[dict[str, Any]], made: Callable[[int, dict[str, Any]], Request] = _request
) -> list[tuple[float, Request]]:
    """(arrival, request) of a conformance trace, in order of arrival, ties in file order. `made`:
    the request of a row, by its number."""
    requests = []
    for index, row in enumerate(trace):
        request = made(index, row)
        request.arrival_ns = round(row["arrival"] * 1e9)
        requests.append((row["arrival"], request))
    return sorted(requests, key=lambda entry: entry[0])


def build(kind: Callable[..., Any], config: Mapping[str, Any], **given: Any) -> Any:
    """An object of a case: its constructor gets what it names, of what is given and of the case's
    settings. Raises `LookupError` where it needs more."""
    settings = {**config, **given}
    named = signature(kind).parameters.values()
    needed = (each.name for each in named if each.name in settings or each.default is each.empty)
    return kind(**{name: settings[name] for name in needed})


def seconds(time_ns: int) -> float:
    """A time as records have it."""
    return time_ns / 1e9


DID = ("prefill", "decode", "ignored", "preempted")
"""Fields of a record, all empty where a step did nothing at all."""
SERVED = ("added", "prefill", "decode", "finished")
"""Those that are empty where no request arrived, ran or finished (a preemption does not count)."""


def replay(
    scheduler: Scheduler,
    blocks: BlockManager,
    trace: list[dict[str, Any]],
    max_steps: int = 1_000_000,
    audit_every: int = 0,
) -> Iterator[Record]:
    """The step log of a run; an engine that dies or gets stuck ends it with an error record.

    `audit_every`: check the books after every so many steps and at the end, 0: never.
    """
    lengths = [row.get("output_lens") for row in trace]
    most = [max(row.get("output_lens") or [row["output_len"]]) for row in trace]
    batch = Batch(blocks, most.__getitem__, scheduler.longest_sequence, lengths.__getitem__)
    clock = UnitClock(batch, corpus_requests(trace), max_steps, DID)
    return played(clock, scheduler, batch, audit_every)


class LogClock(Host):
    """A host of a recorded case, which writes its step log; it is the watcher of its loop, too."""

    def __init__(
        self, arrivals: list[tuple[float, Request]], max_steps: int, busy: tuple[str, ...]
    ) -> None:
        """`busy`: fields of a record, all empty in steps that count towards a deadlock."""
        super().__init__()
        self.patience_steps = maxsize
        self._arrivals = deque(arrivals)
        self._max_steps, self._busy = max_steps, busy
        self._number = self._idle_steps = self._in_flight = 0
        self._ended = False
        self._record: Record = {}
        self._records: list[Record] = []

    def time_s(self) -> float:
        """The time of a record that is written now."""
        raise NotImplementedError

    def take_records(self) -> list[Record]:
        """Takes out the records written since the last call."""
        records, self._records = self._records, []
        return records

    def end(self, error: str) -> None:
        """Ends the log early with an error record."""
        self._records.append({"step": self._number, "time": self.time_s(), "error": error})
        self._ended = True

    def step_ns(self, plan: Plan) -> int:
        """One second."""
        self._in_flight += 1
        return STEP_NS

    def begin(self) -> None:
        """A run begins."""

    def _due(self, now_s: float) -> list[Request]:
        """Takes out the requests that have arrived by then."""
        found = []
        while self._arrivals and self._arrivals[0][0] <= now_s:
            found.append(self._arrivals.popleft()[1])
        return found

    def _end_if_stuck(self, record: Record) -> None:
        """Ends the log after the most steps, or after many idle ones with no arrival left."""
        self._idle_steps = 0 if any(record[key] for key in self._busy) else self._idle_steps + 1
        if self._number >= self._max_steps:
            self.end("max_steps")
        elif self._idle_steps >= STUCK_STEPS and not self._arrivals:
            self.end("deadlock")


def played(
    clock: LogClock, scheduler: Scheduler, batch: Batch, audit_every: int
) -> Iterator[Record]:
    """The records of a run on a clock, as they are written."""
    steps = Loop(clock, scheduler, batch, listeners=Listeners(clock)).run()
    try:
        for number, _ in enumerate(steps, 1):
            if audit_every and number % audit_every == 0:
                batch.audit()
            yield from clock.take_records()
        if audit_every:
            batch.audit()
    except EngineStopped as stop:
        clock.end(stop.rule)
    yield from clock.take_records()


class UnitClock(LogClock):
    """A host that takes down what is decided, and its time.

    Every composed step takes its time, even one that does nothing, so that time goes on while
    everybody waits. When nothing is left to compose, the last step is *drained*.
    """

    def __init__(
        self,
        batch: Any,
        arrivals: list[tuple[float, Any]],
        max_steps: int,
        busy: tuple[str, ...],
    ) -> None:
        super().__init__(arrivals, max_steps, busy)
        self._batch = batch
        self._settles = False
        """Whether a step is being settled; then time passes."""
        self._passing_ns = 0
        self._news = False

    def time_s(self) -> float:
        return seconds(self.now_ns + self._passing_ns)

    # -- a host ----------------------------------------------------------------------------------

    def arrived(self) -> list[Any] | None:
        """Returns the requests that have arrived until now. If the engine is idle, time jumps to
        the next arrival."""
        self.now_ns += self._passing_ns
        self._passing_ns = 0
        arrivals, busy = self._arrivals, self.unfinished() or self._in_flight
        if self._ended or not (arrivals or busy):
            return None
        if not busy:
            # Steps begin at whole seconds.
            second = -(-arrivals[0][0] // 1)
            self.now_ns = max(self.now_ns, round(second) * STEP_NS)
        return self._due(seconds(self.now_ns))

    def wait(self, until_ns: int) -> Waiting:
        """A step is settled at the time at which the last one was composed; then time goes on."""
        yield
        self._in_flight -= 1
        self._settles = True

    def composes(self, batch: Any) -> bool:
        """Whether to compose another step. If the step in flight will leave no request, it is
        drained first."""
        if self.unfinished() or self.has_news:
            return True
        self._record = {
            "step": self._number,
            "time": seconds(self.now_ns),
            "drain": True,
            "ignored": [request.id for request in batch.ended],
        }
        return False

    def takes_time(self, plan: Any, in_flight: int) -> bool:
        """Every step does."""
        return True

    def goes_on(self, batch: Any, plan: Any) -> bool:
        """Whether a step takes time: also one that does nothing, as long as there are requests."""
        return plan.computes or self.unfinished()

    def unfinished(self) -> bool:
        """Whether the engine has something to do."""
        return len(self._batch) > 0

    @property
    def has_news(self) -> bool:
        """Whether requests finished that the engine's workers have not been told of: they hear of
        it with the next composed step."""
        return self._news

    # -- a watcher -------------------------------------------------------------------------------

    def composed(self, batch: Any, plan: Any, now_ns: int, arrived: int) -> None:
        """Take down a step that has just been composed."""
        # Those that were refused when they came are in no plan, and the log does not count them as
        # added.
        away = [request for request in batch.ended if request.reason not in ("", ABORTED)]
        refused = [request.id for request in away if request not in plan.ignored]
        added = arrived - len(refused)
        self._record = step_record(batch, plan, self._number, seconds(now_ns), added)
        self._record["ignored"] = refused + self._record["ignored"]

    def settled(self, batch: Any, ended: list[Any]) -> None:
        """Complete the record; end the log where the engine is stuck."""
        if self._settles:
            self._settles, self._passing_ns = False, STEP_NS
        record = finish_record(self._record, batch, ended)
        self._records.append(record)
        self._news = bool(record["finished"])
        self._number += 1
        if "drain" not in record:
            self._end_if_stuck(record)
