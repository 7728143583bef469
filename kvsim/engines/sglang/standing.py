"""What SGLang 0.5.23 records about a request, and about the requests of a step."""

from __future__ import annotations

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core.request import Request
from kvsim.core.vectors import EMPTY
from kvsim.engines.sglang.node import NOWHERE, Node, Text


@mypyc_attr(free_list_len=1)
class Standing:
    """A request in the engine's own books (`Request.standing`)."""

    text: Text | None
    """What its pages hold, once anybody asked."""
    limit: i64
    """The most tokens it may generate: what its client announced, as far as there is room."""
    longest: i64
    """Its tokens when it has generated as many."""
    rank: i64
    """Its priority; smaller values go first."""
    served: bool
    """False if its prompt is too long. One token is then computed in its place."""
    entry: i64
    """Number of its last entry into the queue."""
    since: i64
    """Tokens that the engine had computed at that time, by its own count."""
    considered: i64
    """Its tokens when an admission was last tried."""
    prefix: i64
    """Tokens with KV before the chunk in flight."""
    end: i64
    """Tokens up to which its last chunk goes."""
    middle: i64
    """Chunks in flight that are not the last one of its prompt."""
    leaves: bool
    """Whether it has left the running batch, as its last token is in flight."""
    retracted: bool
    """Whether it lost its pages since its last prefill. Results in flight are then dropped."""

    node: Node
    """The node where its last lookup ended."""
    matched: i64
    """Of its tokens, without the last one, those that were found by its last lookup in the order
    of the queue."""
    work: i64
    """The tokens that remained to be computed then, at least 1."""
    late: bool
    """Whether it had better wait for what another one computes."""

    lock: Node | None
    """The node where its pages in the tree end."""
    cached: i64
    """Its leading pages that are in the tree."""
    counted: i64
    """Its pages for which the nodes have already counted it as a user."""
    pages: vec[i64]
    """Its pages from page `first` on; those of them that are in the tree are not up to date."""
    first: i64

    def __init__(self, request: Request, limit: i64, rank: i64, served: bool) -> None:
        self.limit, self.longest = limit, request.input_length + limit
        self.rank, self.served = rank, served
        self.text = None
        self.entry = self.since = self.considered = self.prefix = self.end = self.middle = 0
        self.matched = self.work = self.cached = self.counted = self.first = 0
        self.leaves = self.retracted = self.late = False
        self.node, self.lock, self.pages = NOWHERE, None, EMPTY


@mypyc_attr(free_list_len=1)
class Group:
    """The requests of a step. The running batch is a group, too: it lives on while they decode."""

    members: list[Request]
    extends: bool
    """Whether it computed prompts in its last step."""
    chunked: Request | None
    """The request whose prompt was unfinished when the group was made."""
    silent: bool
    """Whether no request in it may generate a token."""
    computed_tokens: i64
    """Tokens that it computed when it was made; later steps count them again."""

    def __init__(self, members: list[Request]) -> None:
        self.members, self.chunked = members, None
        self.extends, self.silent = False, True
        self.computed_tokens = 0

    def let_go(self, one: Request | None = None, other: Request | None = None) -> bool:
        """Removes requests that are over, and the given ones. Returns whether there were any."""
        members: list[Request] = self.members
        places: list[int] = []
        for place, each in enumerate(members):
            if each.finish_ns >= 0 or each is one or each is other:
                places.append(place)
        for place in reversed(places):
            del members[place]
        return len(places) > 0
