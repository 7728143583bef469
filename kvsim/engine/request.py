"""A request during a simulation: what its client asked for, its state, and its costs so far.

```
          admit                  finish
WAITING ────────► RUNNING ──────────────► FINISHED
   ▲   ╲            │  ▲  ╲ preempt (recompute): back to WAITING
   │    ╲ ignore    │  │
 arrive  ► IGNORED  ▼  │ swap in
                  SWAPPED
```

A `Request` owns one or more `Sequence`s; there are several only after a fork (`n > 1`). Queues hold
requests, and block tables belong to sequences. The final output length is not stored here, because
policies see requests and must not see the future (`kvsim.engine.batch.Endings` knows it).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol

from kvsim.core.request import (
    ABORTED,
    DECODE,
    FINISHED,
    IGNORED,
    PLAIN,
    PREFILL,
    RUNNING,
    SWAPPED,
    WAITING,
    Options,
)

__all__ = [
    "ABORTED",
    "DECODE",
    "FINISHED",
    "IGNORED",
    "PLAIN",
    "PREFILL",
    "RUNNING",
    "SWAPPED",
    "WAITING",
    "Options",
    "Request",
    "Sequence",
]

Span = tuple[int, int, int]
"""Consecutive full blocks `first .. last - 1` of a stream. The key of block d is d * block_size +
`offset`. Neighbouring blocks have another offset."""


class Piece(NamedTuple):
    """Consecutive tokens of a stream, without the cache salt.

    Pieces of two streams with equal keys begin with the same token after the same tokens. They
    agree up to the end of the shorter one.
    """

    key: int
    """Key of the first token, computed as for a block of one token."""
    first: int
    """Position of the first token in the stream."""
    last: int
    """Position after the last token."""


class Stream(Protocol):
    """Identity of the blocks of one token stream (prompt, then output)."""

    @property
    def knows_tokens(self) -> bool:
        """Whether `contents` may tell more than `keys`."""
        ...

    def keys(self, first: int, last: int, block_size: int) -> Seq[int]:
        """Keys of the full blocks `first .. last - 1` of `block_size` tokens.

        Equal keys mean: the same tokens in this block *and* in everything before it.
        """
        ...

    def contents(self, first: int, last: int, block_size: int) -> Seq[int]:
        """Contents of the same blocks. Equal contents mean the same tokens, whatever precedes them.

        Where tokens are known only by their prefix, these are the keys.
        """
        ...

    def sample(self, index: int) -> Stream:
        """A stream (`index` > 0) with the same prompt and another output, for `n > 1`."""
        ...


class UnitStream(Stream, Protocol):
    """A stream whose blocks form groups, one for each hash id, that enter and leave the cache
    together."""

    def units(self, number: int, block_size: int) -> list[tuple[int, int]]:
        """Returns the first `number` full blocks as (identity of a group and of everything before
        it, number of blocks)."""
        ...


class SpannedStream(Stream, Protocol):
    """A stream in which most keys follow from the key before."""

    salt: int
    """Offset of every key; 0 without a salt."""

    def spans(self, block_size: int) -> list[Span]:
        """Returns all full blocks as spans, including those of tokens that do not exist yet. The
        keys may differ from those of `keys`, but they are equal in the same places."""
        ...

    @property
    def shared_tokens(self) -> int:
        """Returns a token count beyond which no block of this stream occurs in another stream."""
        ...

    @property
    def named_tokens(self) -> int:
        """Returns a token count beyond which nothing is said about the tokens of this stream."""
        ...

    def pieces(self, length: int) -> list[Piece]:
        """Returns the first `length` tokens in order, without the salt."""
        ...


class Sequence:
    """One token stream of a request, with its block table."""

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
        """Number of the sample within its request. The first sequence is the last sample."""
        self._stream: Any = stream
        """Private: it knows tokens that do not exist yet, so policies must not read it."""
        self.state = WAITING
        self.length = request.input_length
        """Number of known tokens: prompt and generated ones. The KV of the newest is not written
        yet."""
        self.computed = 0
        """Number of tokens whose KV exists."""
        self.prompt_stage = True
        """True until all known tokens have been computed once since (re-)admission."""
        self.table: list[int] = []
        """Physical block ids in token order; empty if it holds no blocks."""
        self.filled = 0
        """Number of tokens that have a slot in the table."""
        self.keys: list[int] = []
        """Keys of the leading full blocks, extended on demand."""
        self.spans: list[Span] = []
        """Its full blocks as spans, cached after the first use."""
        self.seen = 0
        """Number of leading blocks known to be computed (prefix caching)."""
        self.gap = False
        """True once an uncomputed block ended the count of `seen`."""
        self.access_ns = -1
        """When it was last scheduled since its table was allocated; -1 if it was not."""
        self.last_token_ns = -1
        """When its newest token was generated; -1 if there is none."""
        self.published = 0
        """Number of leading blocks that others can hit (managers with a prefix cache)."""
        self.placeholders = 0
        """Number of tokens sampled by steps in flight that the scheduler does not know yet."""
        self.member: Any = None
        """Its entry among the requests that decode together, for `kvsim.fast` only."""

    def block_keys(self, number: int, block_size: int) -> list[int]:
        """Returns the keys of the first `number` full blocks of known tokens.

        Every call must use the same block size.
        """
        keys = self.keys
        if len(keys) < number:
            stream = self.identities(number * block_size)
            assert stream is not None, "block identities are needed"
            keys.extend(stream.keys(len(keys), number, block_size))
        return keys if len(keys) == number else keys[:number]

    def block_spans(self, block_size: int) -> list[Span]:
        """Returns all full blocks as spans, including those of tokens that do not exist yet. For
        block managers only, not for policies.

        Every call must use the same block size.
        """
        if not self.spans:
            self.spans = self._stream.spans(block_size)
        return self.spans

    @property
    def shared_tokens(self) -> int:
        """Returns a token count beyond which no block of this sequence occurs in another stream."""
        shared: int = self._stream.shared_tokens
        return shared

    def identities(self, tokens: int) -> Stream | None:
        """Returns the stream that identifies its first `tokens` tokens, all of which must be known;
        None if there is none."""
        assert tokens <= self.length, "a token that does not exist yet has no identity"
        stream: Stream | None = self._stream
        return stream

    def child(self, sample: int) -> Sequence:
        """Returns a further sample (`n > 1`) with the same tokens so far and no blocks."""
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
        "extra",
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
        "options",
        "prefix_pos",
        "priority",
        "reason",
        "recached_tokens",
        "recomputed_tokens",
        "released_ns",
        "sampled_tokens",
        "sequences",
        "session",
        "swapped_in_blocks",
        "swapped_out_blocks",
        "tier1_hit_tokens",
        "tier2_hit_tokens",
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
        options: Options = PLAIN,
        extra: dict[str, Any] | None = None,
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
        """Most tokens that its client allows it to generate; None for as many as fit."""
        self.ignore_eos = ignore_eos
        """Whether it generates `max_new_tokens` tokens, whatever the model samples."""
        self.options = options
        self.extra = {} if extra is None else extra
        """What the trace says of it beyond what engines know, and notes of policies."""
        self.sequences: list[Sequence] = [Sequence(self, stream, n - 1)]
        self.released_ns = -1
        """When the client wanted to send it. Here and in all times below, -1 means not yet."""
        self.client_queue_ns = 0
        """Time before `arrival_ns` spent waiting for one of the `max_concurrency` slots."""
        self.arrival_ns = -1
        """When the engine received it. Latencies count from here."""
        self.first_scheduled_ns = -1
        self.first_token_ns = -1
        self.finish_ns = -1
        self.reason = ""
        """Why it was rejected; empty if it completed or is still running."""
        self.sampled_tokens = 0
        """Number of tokens generated so far by all samples together, where there are several."""
        self.num_preemptions = 0
        self.cached_tokens = 0
        """Prompt tokens that prefix hits saved from computation at the first admission."""
        self.tier1_hit_tokens = self.tier2_hit_tokens = 0
        """Of `cached_tokens`, those loaded from the tier in CPU memory and from that below it."""
        self.recached_tokens = 0
        """Tokens that prefix hits saved from computation at later admissions."""
        self.lost_tokens = 0
        """Most tokens whose KV a single recompute preemption discarded."""
        self.recomputed_tokens = 0
        """Number of tokens whose KV was computed, lost to a preemption, and computed again."""
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self.blocked_steps = 0
        """Number of scheduling calls that refused it at the head of the queue."""

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far by all samples."""
        if self.n > 1:
            return self.sampled_tokens
        return self.sequences[0].length - self.input_length
