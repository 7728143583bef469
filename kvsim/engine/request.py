"""A request while it is being simulated: what its client says, its standing, what it has cost.

```
          admit                  finish
WAITING ────────► RUNNING ──────────────► FINISHED
   ▲   ╲            │  ▲  ╲ preempt (recompute): back to WAITING
   │    ╲ ignore    │  │
 arrive  ► IGNORED  ▼  │ swap in
                  SWAPPED
```

A `Request` owns 1..n `Sequence`s (more than one only after a fork, `n > 1`). Queues hold requests;
block tables belong to sequences. How long an output becomes is written nowhere here: policies see
requests, and must not see the future (`kvsim.engine.batch.Endings` knows it).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol, cast

WAITING, RUNNING, SWAPPED, FINISHED, IGNORED = range(5)
"""States of a sequence; IGNORED: ended by the engine without completing."""


Span = tuple[int, int, int]
"""Consecutive full blocks `first .. last - 1` of a stream and an offset: the key of block d is
d * block_size + offset. The blocks next to them have another offset."""


class Piece(NamedTuple):
    """Consecutive tokens of a stream, without regard to salts.

    Pieces of two streams with equal keys begin with the same token after the same tokens. They
    agree up to the end of the shorter one.
    """

    key: int
    """Key of the first token, as of a block of one token."""
    first: int
    """Position of the first token in the stream."""
    last: int
    """Position after the last token."""


class Stream(Protocol):
    """Identity of the blocks of one token stream (prompt, then output)."""

    def keys(self, first: int, last: int, block_size: int) -> Seq[int]:
        """Keys of the full blocks `first .. last - 1` of `block_size` tokens.

        Equal keys mean: the same tokens in this block *and* in everything before it.
        """
        ...

    def contents(self, first: int, last: int, block_size: int) -> Seq[int]:
        """Contents of the same blocks: equal ones mean the same tokens, whatever is before them.

        Their keys, where tokens are known by their prefix only.
        """
        ...

    def sample(self, index: int) -> Stream:
        """A stream (`index` > 0) with the same prompt and another output, for `n > 1`."""
        ...


class UnitStream(Stream, Protocol):
    """A stream whose blocks come in groups that come and go together: those of a hash id."""

    def units(self, number: int, block_size: int) -> list[tuple[int, int]]:
        """The first `number` full blocks as (identity of a group and of all before it, blocks)."""
        ...


class SpannedStream(Stream, Protocol):
    """A stream most of whose keys follow from the key before."""

    salt: int
    """Offset of every key; 0 without a salt."""

    def spans(self, block_size: int) -> list[Span]:
        """All full blocks in spans, those of tokens that do not exist yet included. Their keys may
        be others than those of `keys`, but they are equal where those are."""
        ...

    @property
    def shared_tokens(self) -> int:
        """Tokens behind which no block of it ends that another stream has, too."""
        ...

    def pieces(self, length: int) -> list[Piece]:
        """The first `length` tokens, in order, without regard to the salt."""
        ...


class Sequence:
    """One token stream of a request and its block table."""

    __slots__ = (
        "_stream",
        "access_ns",
        "computed",
        "filled",
        "gap",
        "keys",
        "last_token_ns",
        "length",
        "member",
        "placeholders",
        "prompt_stage",
        "published",
        "request",
        "sample",
        "seen",
        "spans",
        "state",
        "table",
    )

    def __init__(self, request: Request, stream: Stream | None, sample: int = 0) -> None:
        self.request = request
        self.sample = sample
        """Number of the sample of its request; the first sequence is the last sample."""
        self._stream = stream
        """Not for policies: it knows tokens that do not exist yet."""
        self.state = WAITING
        self.length = request.input_length
        """Known tokens: prompt and generated, the newest included, whose KV is not written yet."""
        self.computed = 0
        """Tokens whose KV exists."""
        self.prompt_stage = True
        """True until all known tokens have been computed once since (re-)admission."""
        self.table: list[int] = []
        """Physical block ids, in token order; empty: holds nothing."""
        self.filled = 0
        """Tokens that have a slot in the table."""
        self.keys: list[int] = []
        """Keys of the leading full blocks, extended when needed."""
        self.spans: list[Span] = []
        """Its full blocks in spans, once they were asked for."""
        self.seen = 0
        """Leading blocks known to be computed (prefix caching)."""
        self.gap = False
        """True once a block that is not computed ended the count of `seen`."""
        self.access_ns = -1
        """When it was last scheduled since its table was allocated; -1: not yet."""
        self.last_token_ns = -1
        """When its newest generated token came to exist; -1: there is none."""
        self.published = 0
        """Leading blocks of the table that others can hit (managers with a prefix cache)."""
        self.placeholders = 0
        """Tokens sampled by steps in flight, not known to the scheduler yet."""
        self.member: Any = None
        """Its place among those that decode together; the mechanism's own (`kvsim.fast`)."""

    def block_keys(self, number: int, block_size: int) -> list[int]:
        """The keys of the first `number` full blocks of known tokens.

        Always to be asked with the same block size.
        """
        keys = self.keys
        if len(keys) < number:
            stream = self.identities(number * block_size)
            assert stream is not None, "block identities are needed"
            keys.extend(stream.keys(len(keys), number, block_size))
        return keys if len(keys) == number else keys[:number]

    def block_spans(self, block_size: int) -> list[Span]:
        """All its full blocks in spans, those of tokens that do not exist yet included: for the
        books alone, not for policies.

        Always to be asked with the same block size.
        """
        if not self.spans:
            self.spans = cast(SpannedStream, self._stream).spans(block_size)
        return self.spans

    @property
    def shared_tokens(self) -> int:
        """Tokens behind which no block of it ends that another stream has, too."""
        return cast(SpannedStream, self._stream).shared_tokens

    def identities(self, tokens: int) -> Stream | None:
        """What names its first `tokens` tokens, which must be known; None: nothing does."""
        assert tokens <= self.length, "a token that does not exist yet has no identity"
        return self._stream

    def child(self, sample: int) -> Sequence:
        """A further sample (`n > 1`) that has the same tokens so far; it holds no blocks yet."""
        stream = None if self._stream is None else self._stream.sample(sample + 1)
        twin = Sequence(self.request, stream, sample)
        twin.state = RUNNING
        twin.length = self.length
        twin.computed = self.computed
        twin.prompt_stage = False
        twin.keys = list(self.keys)
        return twin


class Request:
    """One request of the trace inside one run."""

    __slots__ = (
        "arrival_ns",
        "blocked_steps",
        "cached_tokens",
        "client_queue_ns",
        "finish_ns",
        "first_scheduled_ns",
        "first_token_ns",
        "id",
        "ignore_eos",
        "index",
        "input_length",
        "lost_tokens",
        "max_new_tokens",
        "n",
        "num_preemptions",
        "prefix_pos",
        "priority",
        "reason",
        "recached_tokens",
        "recomputed_tokens",
        "released_ns",
        "routing_key",
        "sampled_tokens",
        "sequences",
        "session",
        "swapped_in_blocks",
        "swapped_out_blocks",
    )

    def __init__(
        self,
        index: int,
        id: str,
        input_length: int,
        stream: Stream | None = None,
        *,
        n: int = 1,
        priority: int = 0,
        session: str | None = None,
        prefix_pos: int = 0,
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
        routing_key: str | None = None,
    ) -> None:
        self.index = index
        self.id = id
        self.input_length = input_length
        self.n = n
        self.priority = priority
        self.session = session
        self.prefix_pos = prefix_pos
        """Leading prompt tokens that the client declares to be shared (vLLM 0.3.3 only)."""
        self.max_new_tokens = max_new_tokens
        """The most tokens that its client lets it generate; None: as many as there is room for."""
        self.ignore_eos = ignore_eos
        """Whether it generates so many, whatever the model says."""
        self.routing_key = routing_key
        """Requests with the same key are better served together (SGLang's `routing-key` only)."""
        self.sequences: list[Sequence] = [Sequence(self, stream, n - 1)]
        self.released_ns = -1
        """When the client wanted to send it; -1: not yet, as for all times below."""
        self.client_queue_ns = 0
        """Wait for one of the client's `max_concurrency` slots, before `arrival_ns`."""
        self.arrival_ns = -1
        """When the engine got it; latencies count from here."""
        self.first_scheduled_ns = -1
        self.first_token_ns = -1
        self.finish_ns = -1
        self.reason = ""
        """Empty: completed (or still under way); otherwise why it was rejected."""
        self.sampled_tokens = 0
        """Tokens generated so far by all samples together, where there are several."""
        self.num_preemptions = 0
        self.cached_tokens = 0
        """Prompt tokens whose computation a prefix hit saved at the first admission."""
        self.recached_tokens = 0
        """Tokens whose computation prefix hits saved at later admissions, after preemptions."""
        self.lost_tokens = 0
        """Most tokens whose KV a recompute preemption threw away."""
        self.recomputed_tokens = 0
        """Tokens whose KV was computed, lost to a preemption, and computed again."""
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self.blocked_steps = 0
        """Scheduling calls in which it stood at the head of the queue and was refused."""

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, of all samples."""
        if self.n > 1:
            return self.sampled_tokens
        return self.sequences[0].length - self.input_length
