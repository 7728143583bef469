"""Notes for the ledger what a connector makes requests wait for, and what it loaded for them."""

from __future__ import annotations

from kvsim.engine.batch import Batch
from kvsim.engine.request import Request
from kvsim.engines.vllm_v1_features.connector import Match
from kvsim.engines.vllm_v1_features.live import Live
from kvsim.records import transitions


def looked_up(batch: Batch, request: Request, live: Live, match: Match | None) -> None:
    """A connector was asked what it can load for a waiting request; None: it cannot say yet."""
    held = match is None
    if held != live.held and not request.num_preemptions:
        live.held = held
        batch.note(request, transitions.HELD if held else transitions.LOOKED_UP)


def load_begins(batch: Batch, request: Request, match: Match) -> None:
    """A connector loads into the blocks of a waiting request."""
    again = request.num_preemptions > 0
    kind = transitions.RELOADING if again else transitions.LOADING
    batch.note(request, kind, match.tokens)


def load_is_over(batch: Batch, request: Request) -> None:
    """The load of a waiting request was reported."""
    again = request.num_preemptions > 0
    kind = transitions.RELOADED if again else transitions.LOADED
    batch.note(request, kind, time_ns=batch.now_ns)


def passed_over(batch: Batch, request: Request, live: Live) -> None:
    """A running request gets no slot, because blocks are released late."""
    if not live.passed_over:
        live.passed_over = True
        batch.note(request, transitions.PASSED_OVER)


def goes_on(batch: Batch, request: Request, live: Live) -> None:
    """A running request gets its slot."""
    if live.passed_over:
        live.passed_over = False
        batch.note(request, transitions.CONTINUED)


def admitted(request: Request, match: Match) -> None:
    """A request takes part in a step for the first time; `match` was loaded for it before."""
    if not request.num_preemptions:
        loaded = min(match.tokens, request.cached_tokens)
        request.tier2_hit_tokens = min(match.below, loaded)
        request.tier1_hit_tokens = loaded - request.tier2_hit_tokens
