"""A request while it is served: what its client asked for, its state, and its costs so far.

```
          admit                  finish
WAITING ────────► RUNNING ──────────────► FINISHED
   ▲   ╲            │
 arrive  ► IGNORED  ▼ preempt: back to WAITING
```

Policies read everything here and write nothing but `extra`. How long the output becomes is known
to the mechanism alone.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from librt.vecs import vec
from mypy_extensions import i64

from kvsim.core import guard
from kvsim.core.vectors import EMPTY

WAITING: Final = 0
RUNNING: Final = 1
SWAPPED: Final = 2
FINISHED: Final = 3
IGNORED: Final = 4
"""States of a request. IGNORED means that the engine ended it before it was complete."""

PREFILL: Final = "prefill"
DECODE: Final = "decode"
"""Parts that an engine can have in a prefill/decode split."""

ABORTED: Final = "aborted"
"""Reason of a request that ended because its client gave it up."""

UNLOADED: Final = 0
LOADING: Final = 1
LOADED: Final = 2
"""Whether a connector loads into the blocks of a waiting request. LOADED: the load has been
reported, and the request has not been looked at since."""


class Options(NamedTuple):
    """What a client asks for beside tokens."""

    lora: str = ""
    """Name of its adapter; empty: the model itself."""
    skip_reading_prefix_cache: bool = False
    """Whether all of its prompt is computed, as for the log probabilities of a prompt."""
    grammar_ready_ns: int = 0
    """When the grammar of its output is compiled. It is not scheduled before."""
    kv_transfer: str = ""
    """What this engine does of it in a prefill/decode split: `PREFILL`, `DECODE` or all."""


PLAIN: Final = Options()


class Table:
    """The blocks of a request in one KV cache group, in token order; 0 where it holds none."""

    blocks: vec[i64]
    registered: i64
    """Number of leading entries that the prefix cache was told of, or passed over for good."""
    trimmed: i64
    """Number of leading entries whose blocks were given back, as nothing reads them any more."""
    known: bool
    """Whether it has adopted hits or registered a block."""
    grown: bool
    """Of a group of states: whether blocks were added since the hits were adopted."""
    export_tokens: i64
    """Of a group of states: tokens of the state that the chunk saves on its way; 0: none."""
    export_place: i64
    """The entry of the block of that state."""

    def __init__(self) -> None:
        self.blocks = EMPTY
        self.registered = self.trimmed = 0
        self.known = self.grown = False
        self.export_tokens = self.export_place = 0


class Request:
    """One request of the trace inside one run, with its one sequence of tokens.

    Instants are in nanoseconds since the start of the run; -1: not yet.
    """

    index: i64
    """Its place in the trace."""
    id: str
    input_length: i64
    """Tokens of its prompt."""
    priority: i64
    """Lower is served first."""
    session: str | None
    max_new_tokens: int | None
    """Most tokens that its client allows it to generate; None for as many as fit."""
    ignore_eos: bool
    """Whether it generates `max_new_tokens` tokens, whatever the model samples."""
    options: Options
    extra: dict[str, Any]
    """What the trace says of it beyond what engines know: its tags, its `deadline_s`, and its own
    keys and columns (`x_NAME`) by NAME. A place for notes of policies, too."""

    state: i64 = WAITING
    length: i64 = 0
    """Known tokens: prompt and generated ones. The KV of the newest is not written yet."""
    computed: i64 = 0
    """Tokens whose KV exists, or will when the steps in flight are over."""
    placeholders: i64 = 0
    """Tokens sampled by steps in flight that the scheduler does not know yet."""
    in_flight: i64 = 0
    """Tokens that steps in flight compute."""
    stale: i64 = 0
    """The part of `in_flight` from before a preemption."""
    drops_stale: bool = False
    """Whether the outputs of those are thrown away."""
    drafts: i64 = 0
    """Drafts that its next step verifies."""
    mid_prompt: bool = False
    """Whether known tokens were left over by its last step."""
    prompt_stage: bool = True
    """Whether some of its known tokens were not computed yet since it was last admitted."""
    resumes_at: i64 = 0
    """Number of the scheduling call that may give it a token again."""
    batch: i64 = 0
    """Number of the last step with tokens that it took part in."""
    filled: i64 = 0
    """Tokens that have a slot."""
    seen: i64 = 0
    """Tokens whose KV was found, or loaded, when its tables were begun."""
    gap: bool = False
    """Whether a block without KV ended them."""
    published: i64 = 0
    """Units of content that the prefix cache was told of."""
    next_unit: i64 = 0
    """Tokens at which the prefix cache has more to hear of; 0: unknown."""
    keyed: i64 = 0
    """Units of content that look-ups may ask for; only where these are made late."""
    room: i64 = 0
    """Tokens for which all its tables have blocks."""
    leaves: i64 = 0
    """Computed tokens from which on some table has blocks that nothing reads any more; 0: unknown.
    """
    junction: i64 = 0
    """Where some groups knew a longer prefix than all agreed on, at the last look-up; 0: nowhere.
    """
    tables: list[Table]
    """One for each KV cache group; none if it holds no blocks."""
    access_ns: i64 = -1
    """When it was last scheduled since its tables were begun."""

    load: i64 = UNLOADED
    held: bool = False
    """Whether the connector could not say yet what it can load."""
    match: Any
    """What was loaded, or is being loaded, for its last admission."""
    passed_over: bool = False
    """Whether it runs and got no slot, because blocks are released late."""

    n: i64
    """Samples drawn from its prompt."""
    sample: i64
    """Number of this sample. A request is its own first sequence, which is the last sample."""
    forked: list[Request]
    """The other samples, once they were drawn: each is a `Request` for its tokens and blocks, while
    this one has the figures of all."""
    sampled_tokens: i64 = 0
    """Tokens generated so far by all samples together, where there are several."""
    prefix_pos: i64
    """Leading prompt tokens that the client declares to be shared (vLLM 0.3.3 only)."""
    _forked_from: Request | None

    standing: Any
    """What the engine keeps of it in books of its own; None: nothing."""

    released_ns: i64 = -1
    """When the client wanted to send it."""
    client_queue_ns: i64 = 0
    """Time before `arrival_ns` spent waiting for one of the `max_concurrency` slots."""
    arrival_ns: i64 = -1
    """When the engine received it. Latencies count from here."""
    first_scheduled_ns: i64 = -1
    first_token_ns: i64 = -1
    last_token_ns: i64 = -1
    finish_ns: i64 = -1
    reason: str
    """Why it was rejected; empty if it completed or is still running."""
    num_preemptions: i64 = 0
    cached_tokens: i64 = 0
    """Prompt tokens that prefix hits saved from computation at the first admission."""
    tier1_hit_tokens: i64 = 0
    tier2_hit_tokens: i64 = 0
    """Of `cached_tokens`, those loaded from the tier in CPU memory and from that below it."""
    recached_tokens: i64 = 0
    """Tokens that prefix hits saved from computation at later admissions."""
    lost_tokens: i64 = 0
    """Most tokens whose KV a single preemption discarded."""
    recomputed_tokens: i64 = 0
    """Tokens whose KV was computed, lost to a preemption, and computed again."""
    swapped_out_blocks: i64 = 0
    swapped_in_blocks: i64 = 0
    blocked_steps: i64 = 0
    """Scheduling calls that refused it at the head of the queue."""

    contents: vec[i64]
    """Numbers of what its leading units of tokens are, extended on demand."""
    _stream: Any
    _runs: vec[i64]
    """What `contents` is made of (`kvsim.core.contents.Numbering.reach`), and where the run is in
    it that was used last."""
    _run: i64
    _end: i64

    def __init__(
        self,
        index: int,
        id: str,
        input_length: int,
        stream: Any = None,
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
        self.index, self.id, self.input_length = index, id, input_length
        self.priority, self.session = priority, session
        self.max_new_tokens, self.ignore_eos, self.options = max_new_tokens, ignore_eos, options
        self.extra = {} if extra is None else extra
        self.reason = ""
        self.match = self.standing = None
        self.n, self.sample, self.forked = n, n - 1, []
        self.prefix_pos, self._forked_from = prefix_pos, None
        self._end = 0
        self.begin(stream, input_length)

    def begin(self, stream: Any, input_length: i64) -> None:
        """Gives a new request its prompt of `input_length` tokens, which `stream` identifies."""
        self.input_length = self.length = input_length
        self.tables = []
        self._stream = stream
        self.contents = self._runs = EMPTY
        self._run = 0

    def __repr__(self) -> str:
        return f"<Request {self.id}: {self.computed} of {self.length} tokens>"

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, by all samples."""
        if self.n > 1:
            return self.sampled_tokens
        return self.length - self.input_length

    @property
    def sequences(self) -> list[Request]:
        """Its sequences of tokens: the request itself, and the samples that were forked from it."""
        return [self, *self.forked]

    def in_state(self, state: i64) -> list[Request]:
        """Its sequences in this state."""
        found: list[Request] = [self] if self.state == state else []
        sequence: Request
        for sequence in self.forked:
            if sequence.state == state:
                found.append(sequence)
        return found

    def width(self) -> i64:
        """The most sequences that it may come to have (vLLM 0.6.3 `sequence.py`,
        `SequenceGroup.get_max_num_running_seqs`)."""
        if self.n > len(self.forked) + 1:
            return self.n
        found: i64 = self.state <= SWAPPED
        sequence: Request
        for sequence in self.forked:
            found += sequence.state <= SWAPPED
        return found

    def saved(self, before: i64, end: i64) -> i64:
        """Of its tokens `before .. end`, those that were found or loaded; its last known token is
        always computed."""
        if self.seen == 0:
            return 0
        return max(0, min(self.seen, min(self.length, end) - 1) - before)

    def identities(self, tokens: int) -> Any:
        """What identifies its first `tokens` tokens, all of which must be known; None where no
        other request has one of them. For executors, which make real tokens of it."""
        assert tokens <= self.length, "a token that does not exist yet has no identity"
        return self._stream

    @property
    def request(self) -> Request:
        """The request to which it belongs as a sequence: itself, or the one it was forked from."""
        owner: Request | None = self._forked_from
        return self if owner is None else owner

    def child(self, sample: int) -> Request:
        """A further sample with the same tokens so far, and no blocks."""
        request: Request = self.request
        stream = None if self._stream is None else self._stream.sample(sample + 1)
        made: Request = Request(request.index, request.id, request.input_length, stream)
        made.state, made.length, made.computed = RUNNING, self.length, self.computed
        made.sample, made.prompt_stage, made._forked_from = sample, False, request
        made.contents = self.contents[0 : len(self.contents)]
        return made

    @property
    def table(self) -> list[int]:
        """The block ids of its first KV cache group."""
        return list(self.tables[0].blocks) if self.tables else []


def _noted(request: Request, extra: Any) -> Any:
    """The notes on a request in place of others."""
    return dict(extra)


guard.keep(Table, "blocks")
guard.keep(Request, "tables contents forked", "begin child", extra=_noted)
