"""A step of vLLM V1 with features: what it does for each request beyond its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvsim.engine.plan import Plan
from kvsim.engine.request import Request


class Move(NamedTuple):
    """The part of a request in a step."""

    request: Request
    tokens: int
    """Tokens that the step computes for it, drafts included."""
    drafts: int = 0
    """Drafts among them that are verified."""
    padded: bool = False
    """Whether its drafts are placeholders without content, which are never accepted."""
    resumed: bool = False
    """Whether it was admitted in this step."""


class FeaturePlan(Plan):
    """A plan with the moves of the batch, and the transfers that go with it."""

    __slots__ = ("drafter_ns", "finished", "moves", "transfers", "waits")

    def __init__(self) -> None:
        super().__init__()
        self.waits = False
        self.drafter_ns = 0
        self.moves: list[Move] = []
        """The batch in order."""
        self.finished: list[Request] = []
        """Requests that are over since the last step was composed, in order."""
        self.transfers: Any = None
        """What the worker of the connector does (`connector.Transfers`)."""
