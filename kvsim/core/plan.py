"""What one engine step does: composed by a scheduler, priced by a cost model, then settled."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from librt.vecs import append, extend, vec
from mypy_extensions import i64

from kvsim.core import guard
from kvsim.core.request import Request
from kvsim.core.vectors import zeros

RECOMPUTE: Final = "recompute"
SWAP: Final = "swap"
"""The two ways to preempt a request."""

SLOTS: Final = 1
TOKENS: Final = 2
BLOCKS: Final = 3
WATERMARK: Final = 4
SWAPPED_OUT: Final = 5
PREEMPTED: Final = 6
LORAS: Final = 7
"""Why the head of the waiting queue was refused (`Plan.blocked`): indexes into
`kvsim.core.schema.BLOCKED`."""


class Prefill(NamedTuple):
    """The part of a request's known tokens that a step takes on."""

    request: Request
    scheduled: int
    """Tokens of the chunk, prefix hits included."""
    cached: int
    """Tokens of the chunk whose KV is already there: they are not computed."""
    computed_before: int
    """Tokens computed before the chunk."""
    samples: bool
    """Whether the chunk reaches the end of the known tokens, so that a token is produced."""
    charged: int
    """The part of `scheduled` that is charged to `max_num_batched_tokens`."""


class Move(NamedTuple):
    """The part of a request in a step, for connectors."""

    request: Request
    tokens: int
    """Tokens that the step computes for it, drafts included."""
    drafts: int
    """Drafts among them that are verified."""
    resumed: bool
    """Whether it was admitted in this step."""


class Moved(NamedTuple):
    """What a step spends besides computing, in nanoseconds."""

    copy_ns: int = 0
    """On the link."""
    wait_ns: int = 0
    """Waiting for the link, or for loads."""
    flush_ns: int = 0
    """Waiting for stores of blocks that it reuses."""
    rank_wait_ns: int = 0
    """Waiting for the slowest of the ranks that step together."""


NOTHING_MOVED: Final = Moved()


class Plan:
    """One step: the batch in order, as columns, and the sums that a cost model needs.

    The scheduler fills it; policies and cost models only read it. It is used again once its step is
    settled.
    """

    num_requests: i64 = 0
    """Requests in the batch."""
    places: list[Request]
    """They, and behind them some of an earlier step: to grow a list in each step takes time. A
    scheduler may lend a list of its own instead, which nobody changes as long as the plan has it:
    before it may `add` again, it needs another one."""
    num_continued: i64 = 0
    """Those among them that ran before; the others were admitted."""
    scheduled: vec[i64]
    """Of each, the tokens that the step computes, drafts included."""
    drafts: vec[i64]
    """Of each, the drafts among them."""
    _drafted: bool
    """Whether there may be any."""
    yields: vec[i64]
    """Of each, 1 if the step yields a token for it."""

    num_chunks: i64 = 0
    """Requests that compute known tokens, but for those of which only the newest is left."""
    num_repairs: i64 = 0
    """Those among them that are parts of requests that decode: they compute lost KV of a sample
    again."""
    chunk_places: vec[i64]
    """Their places in the batch; -1 for a repair."""
    chunk_tokens: vec[i64]
    """Tokens that each computes."""
    chunk_context: vec[i64]
    """Tokens before those."""
    chunk_cached: vec[i64]
    """Tokens that a hit saved."""
    prefill_tokens: i64 = 0
    cached_tokens: i64 = 0

    decode_seqs: i64 = 0
    """Sequences that compute their newest token."""
    decode_lengths: vec[i64]
    """Their lengths, the token of the step included."""
    context_tokens: i64 = 0
    """The sum of these lengths."""
    draft_tokens: i64 = 0
    """Drafts that the step verifies behind the newest tokens of decoding sequences: so many
    tokens more go through the linear layers, and get logits."""
    samples: i64 = 0
    """Positions for which logits are computed."""
    batched_tokens: i64 = 0
    """Tokens charged to `max_num_batched_tokens`."""
    blocked: i64 = 0
    """Why the head of the waiting queue was refused: `SLOTS` and those below; 0: it was not."""
    rank_tokens: float | None
    """Mean tokens of the ranks that share experts, padding included; None: all have as many as
    this one."""

    preempted: list[tuple[Request, str]]
    """Preempted requests in order, with how each was preempted."""
    ghosts: list[tuple[Request, int]]
    """Preempted requests that stay in the batch, with their tokens, in releases that have them."""
    ignored: list[Request]
    """Requests that the engine gave up; they never run again."""
    swapped_in: list[Request]
    """Requests whose blocks come back from the CPU."""
    copies: list[tuple[int, int]]
    """Copies on write, as (source, target) blocks."""
    swaps_out: list[tuple[int, int]]
    """(GPU block, CPU block) pairs that are copied before the step computes."""
    swaps_in: list[tuple[int, int]]
    """(CPU block, GPU block) pairs that are copied after these."""
    finished: list[Request]
    """Requests that are over since the last step was composed, in order."""
    transfers: Any
    """What the worker of the connector does (`connector.Transfers`)."""
    waits: bool = False
    """Whether transfers of KV go with the step, so that it takes place even if it computes nothing,
    and may wait for them (`Scheduler.waits`)."""
    drafter_ns: i64 = 0
    """How much longer the step takes because drafts are made at its end."""

    waiting: i64 = 0
    """Requests in the waiting queue once it was composed."""
    running: i64 = 0
    swapped: i64 = 0
    """Requests with their blocks on the CPU."""
    used_blocks: i64 = 0
    cached_blocks: i64 = 0
    free_blocks: i64 = 0
    """Blocks in a table, in none with content, and in none without."""
    empty_slots: i64 = 0
    """Slots of used blocks without a token."""
    cpu_used_blocks: i64 = 0
    """Blocks of the CPU in a table."""
    stranded_blocks: i64 = 0
    """Free blocks that no admission can use."""
    gauges: tuple[int, ...]
    """Further columns of its row."""
    flying: bool = False
    """Whether its step is in flight."""
    start_ns: i64 = 0
    end_ns: i64 = 0
    moved: Moved

    def __init__(self, max_num_seqs: int) -> None:
        self.preempted, self.ignored, self.finished = [], [], []
        self.places, self.ghosts, self.swapped_in = [], [], []
        self.copies, self.swaps_out, self.swaps_in = [], [], []
        self.scheduled, self.drafts = zeros(max_num_seqs), zeros(max_num_seqs)
        self.yields, self.decode_lengths = zeros(max_num_seqs), zeros(max_num_seqs)
        self.chunk_places, self.chunk_tokens = zeros(max_num_seqs), zeros(max_num_seqs)
        self.chunk_context, self.chunk_cached = zeros(max_num_seqs), zeros(max_num_seqs)
        self._drafted = False
        self.clear()

    def clear(self) -> None:
        """Begins a new step."""
        # These may be in the hands of those who look on.
        if self.preempted:
            self.preempted = []
        if self.ghosts:
            self.ghosts = []
        if self.ignored:
            self.ignored = []
        if self.finished:
            self.finished = []
        if self.swapped_in:
            self.swapped_in = []
        if self.copies:
            self.copies = []
        if self.swaps_out:
            self.swaps_out = []
        if self.swaps_in:
            self.swaps_in = []
        self.num_requests = self.num_repairs = self.swapped = 0
        self.cpu_used_blocks = self.stranded_blocks = 0
        self.num_continued = self.num_chunks = self.prefill_tokens = self.cached_tokens = 0
        self.decode_seqs = self.context_tokens = self.draft_tokens = self.samples = 0
        self.batched_tokens = self.blocked = self.drafter_ns = 0
        # Without drafts, `add` leaves that column alone.
        if self._drafted:
            self.drafts, self._drafted = zeros(len(self.drafts)), False
        self.rank_tokens = None
        self.transfers, self.waits = None, False
        self.start_ns = self.end_ns = self.waiting = self.running = 0
        self.used_blocks = self.cached_blocks = self.free_blocks = self.empty_slots = 0
        self.gauges = ()
        self.moved = NOTHING_MOVED

    def add(self, request: Request, tokens: i64, drafts: i64) -> None:
        """Puts a request into the batch, at its end."""
        at: i64 = self.num_requests
        if at == len(self.scheduled):
            self._extend()
        self.scheduled[at] = tokens
        if drafts or self._drafted:
            self.drafts[at] = drafts
            self._drafted = True
        requests: list[Request] = self.places
        if at < len(requests):
            requests[at] = request
        else:
            requests.append(request)
        self.num_requests = at + 1

    def remove(self, request: Request) -> i64:
        """Takes a request out of the batch, if it is there. Returns its tokens; 0: it was not."""
        k: i64
        at: i64 = 0
        while at < self.num_requests and self.places[at] is not request:
            at += 1
        if at == self.num_requests:
            return 0
        tokens: i64 = self.scheduled[at]
        del self.places[at]
        self.num_requests -= 1
        for k in range(at, self.num_requests):
            self.scheduled[k], self.drafts[k] = self.scheduled[k + 1], self.drafts[k + 1]
        return tokens

    def add_chunk(self, place: i64, tokens: i64, context: i64, cached: i64) -> None:
        """The request at a place of the batch computes a chunk of known tokens."""
        k: i64 = self.num_chunks
        if k == len(self.chunk_places):
            self._extend()
        self.chunk_places[k], self.chunk_tokens[k] = place, tokens
        self.chunk_context[k], self.chunk_cached[k] = context, cached
        self.num_chunks = k + 1
        self.prefill_tokens += tokens
        self.cached_tokens += cached

    def add_decode(self, length: i64) -> None:
        """The next sequence of the batch computes its newest token."""
        seqs: i64 = self.decode_seqs
        if seqs == len(self.decode_lengths):
            self.decode_lengths = append(self.decode_lengths, 0)
        self.decode_lengths[seqs] = length
        self.add_decodes(1, length, 0)

    def add_decodes(self, seqs: i64, context_tokens: i64, drafts: i64) -> None:
        """So many sequences more, whose lengths are in `decode_lengths`, compute their newest
        token, and the drafts behind it."""
        self.decode_seqs += seqs
        self.context_tokens += context_tokens
        self.draft_tokens += drafts
        self.samples += seqs + drafts

    def add_repair(self, tokens: i64) -> None:
        """The next request of the batch, which decodes, computes lost KV of a sample again."""
        self.add_chunk(-1, tokens, 0, 0)
        self.num_repairs += 1

    def _extend(self) -> None:
        """Makes room for more than `max_num_seqs` requests, of which some engines run more."""
        more: i64 = len(self.scheduled)
        self.scheduled = extend(self.scheduled, zeros(more))
        self.drafts = extend(self.drafts, zeros(more))
        self.yields = extend(self.yields, zeros(more))
        self.chunk_places = extend(self.chunk_places, zeros(more))
        self.chunk_tokens = extend(self.chunk_tokens, zeros(more))
        self.chunk_context = extend(self.chunk_context, zeros(more))
        self.chunk_cached = extend(self.chunk_cached, zeros(more))
        self.decode_lengths = extend(self.decode_lengths, zeros(more))

    # -- for cost models and those who look on ---------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        """The batch: requests that ran before, then those admitted from place `num_continued` on,
        in a list of its own."""
        return self.places[: self.num_requests]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(tokens to compute, tokens before them) of each chunk."""
        return [(self.chunk_tokens[k], self.chunk_context[k]) for k in range(self.num_chunks)]

    @property
    def tokens(self) -> int:
        """Tokens that the model computes, drafts included."""
        return self.decode_seqs + self.draft_tokens + self.prefill_tokens

    @property
    def swaps(self) -> bool:
        """Whether blocks are swapped."""
        return len(self.swaps_out) > 0 or len(self.swaps_in) > 0

    @property
    def computes(self) -> bool:
        """Whether the model runs in this step."""
        return self.num_requests > 0

    @property
    def empty(self) -> bool:
        """Whether the step changed nothing at all."""
        return not (self.num_requests or self.ignored or self.preempted)

    @property
    def copied_blocks(self) -> int:
        """Blocks copied on the GPU (copy-on-write)."""
        return len(self.copies)

    @property
    def moves(self) -> list[Move]:
        """The batch in order, entry by entry."""
        k: i64
        found: list[Move] = []
        for k in range(self.num_requests):
            admitted: bool = k >= self.num_continued
            found.append(Move(self.places[k], self.scheduled[k], self.drafts[k], admitted))
        return found

    @property
    def prefills(self) -> list[Prefill]:
        """The chunks, with their requests."""
        k: i64
        found: list[Prefill] = []
        for k in range(self.num_chunks):
            place: i64 = self.chunk_places[k]
            if place < 0:
                continue
            tokens: i64 = self.chunk_tokens[k]
            cached: i64 = self.chunk_cached[k]
            before: i64 = self.chunk_context[k] - cached
            found.append(
                Prefill(
                    self.places[place], tokens + cached, cached, before,
                    self.yields[place] > 0, self.scheduled[place],
                )
            )  # fmt: skip
        return found

    @property
    def decodes(self) -> list[Request]:
        """The requests of the batch that compute their newest token."""
        chunked = {self.chunk_places[k] for k in range(self.num_chunks)}
        return [request for k, request in enumerate(self.requests) if k not in chunked]

    @property
    def entries(self) -> list[tuple[Request, int, bool]]:
        """The whole batch in order, as (request, tokens that it takes on, whether it samples)."""
        return [
            (request, self.scheduled[k], self.yields[k] > 0)
            for k, request in enumerate(self.requests)
        ]

    def lengths(self) -> list[int]:
        """The length of each decoding sequence, including its token of this step."""
        return [self.decode_lengths[k] for k in range(self.decode_seqs)]

    def longest(self, number: int) -> list[int]:
        """The `number` greatest of `lengths`, in descending order."""
        most: i64 = min(number, self.decode_seqs)
        if most <= 0:
            return []
        lengths, found = self.decode_lengths, zeros(most)
        k: i64
        least: i64 = 0
        for k in range(self.decode_seqs):
            length: i64 = lengths[k]
            # Few are asked for, so each is put in its place among those found so far.
            if length > least:
                at: i64 = most - 1
                while at > 0 and found[at - 1] < length:
                    found[at] = found[at - 1]
                    at -= 1
                found[at] = length
                least = found[most - 1]
        return [found[k] for k in range(most)]


guard.keep(
    Plan,
    "requests scheduled drafts yields chunk_places chunk_tokens chunk_context chunk_cached"
    " decode_lengths preempted ignored finished ghosts swapped_in copies swaps_out swaps_in",
    "places clear add remove add_chunk add_decode add_decodes add_repair",
)
