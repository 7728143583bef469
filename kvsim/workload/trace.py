"""A request trace in memory: every reader produces it, and everything else consumes it.

```
Trace ── header facts, notes of the reader, sha256
  └─ rows: in file order, sorted by arrival
        └─ content: None | HashContent | TokenContent | SegmentContent | ParentContent
```
The field names are those of the native format (`kvsim_trace` version 1); times are integer
nanoseconds from the start of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Runs = tuple[tuple[int, int], ...]
"""Ids as runs `(start, count)`: `start, start + 1, ...`, concatenated."""


@dataclass(slots=True)
class HashContent:
    """Anonymised block ids of the prompt, and of the blocks that fill during decode. Do not change
    it; as every row of a long trace has one, it is not frozen (`Row`).

    `output[j]` is block `input_length // block_size + j` of the stream (prompt, then output).
    """

    prompt: Runs
    output: Runs = ()


@dataclass(slots=True, frozen=True)
class TokenContent:
    """Real token ids: exactly `input_length` and, if known, `output_length` of them."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] | None = None


@dataclass(slots=True, frozen=True)
class SegmentContent:
    """Named shared segments `(name, length)` at the start of the prompt; the rest is unique."""

    segments: tuple[tuple[str, int], ...]


@dataclass(slots=True, frozen=True)
class ParentContent:
    """The first `keep` tokens of the stream of row `parent` (an index); the rest is unique."""

    parent: int
    keep: int


Content = HashContent | TokenContent | SegmentContent | ParentContent


@dataclass(slots=True)
class Row:
    """One request of a trace. Do not change it; a frozen one takes four times as long to make."""

    index: int
    """Position in the file, from 0; it breaks ties everywhere."""
    id: str
    line: int
    """Line in the uncompressed file, for messages."""
    arrival_ns: int | None
    """Recorded arrival, from the start of the trace; None if the trace has no times."""
    input_length: int
    output_length: int
    content: Content | None = None
    """None: unique content, which shares nothing with other rows, except rows that name it as
    `parent`."""
    after: int = -1
    """Index of the row whose completion releases this one in session replay, or -1."""
    delay_ns: int = 0
    """Think time between that completion and this release."""
    session: str | None = None
    turn: int | None = None
    scope: str | None = None
    """Namespace of hash ids or segment names; None: the common namespace."""
    salt: str | None = None
    """Part of every block key: nothing is shared across salts."""
    model: str | None = None
    priority: int = 0
    """Lower numbers are served first, as in vLLM."""
    deadline_ns: int | None = None
    max_new_tokens: int | None = None
    """Tokens that its client allows it to generate, as it says when it sends it; None: unsaid."""
    ignore_eos: bool = False
    """Whether it generates as many, whatever the model says."""
    lora: str | None = None
    """Name of its adapter; None: the model itself."""
    abort_after_ns: int | None = None
    """Its client gives it up so long after it was sent; None: it waits for the end."""
    accepted_drafts: tuple[int, ...] = ()
    """With speculative decoding: how many drafts the model accepts in each of its steps."""
    tags: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None
    """What its own keys or columns say (`x_NAME`), by NAME."""
    observed: dict[str, Any] | None = None
    """Measurements of a real system; no policy sees them."""


@dataclass(slots=True)
class Trace:
    """A whole trace and its origin."""

    path: str
    format: str
    """The reader's name (`kvsim.workload.READERS`)."""
    sha256: str
    """Digest of the uncompressed bytes."""
    rows: Sequence[Row]
    """Maybe kept as columns (`kvsim.workload.columns`)."""
    block_size: int | None = None
    """Tokens per hash id; None if rows have no hash ids."""
    hash_kind: Literal["prefix", "content"] | None = None
    partial_hash: bool | None = None
    """True: a prompt has `ceil(L / block_size)` ids; False: `floor`."""
    hash_scope: Literal["global", "session"] = "global"
    origin: str | None = None
    """Absolute time of arrival 0, ISO 8601, if the source has one."""
    source: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the reader dropped or changed, and other notes for the user, one line each."""
