"""A member of a cohort: its state when it joined, and its sequence as it is now."""

from __future__ import annotations

from typing import Any, Protocol

from kvsim.engine.request import Request, Sequence


class Steps(Protocol):
    """The counts of steps that members read from their cohort (`kvsim.fast.cohort.Cohort`)."""

    size: int
    composed: int
    settled: int
    composed_ns: int
    token_ns: int
    grown: int
    ahead: bool
    counts_composed: bool
    sitting: dict[Request, None]


class Member:
    """The state of a request when it joined the cohort."""

    __slots__ = ("cohort", "filled", "joined", "known", "last", "length", "place")

    def __init__(
        self,
        cohort: Steps,
        place: int,
        joined: int,
        last: int,
        filled: int,
        length: int,
        known: int,
    ) -> None:
        self.cohort = cohort
        self.place = place
        """Sort key of the members. It follows the order of the running queue."""
        self.joined = joined
        """Number of cohort steps composed before its first one."""
        self.last = last
        """Number of cohort steps composed when its last token is."""
        self.filled = filled
        """Number of its tokens that had a slot."""
        self.length = length
        """Number of its tokens that were known."""
        self.known = known
        """Number of its tokens that were known or in flight."""


def _slot(name: str) -> Any:
    """A slot of `Sequence`, read past the properties of its subclass."""
    return vars(Sequence)[name]


_LENGTH, _COMPUTED, _TABLE = _slot("length"), _slot("computed"), _slot("table")
_PLACEHOLDERS, _ACCESS_NS = _slot("placeholders"), _slot("access_ns")
LAST_TOKEN_NS = _slot("last_token_ns")
"""The slot that holds when a sequence got its newest token."""


class MemberSequence(Sequence):
    """The sequence of a member. What changes from step to step is computed when it is read.

    The slots hold the values from when the request joined, so a policy may keep a reference and
    read it at any time. Tokens of steps from before it joined are booked as usual.
    """

    __slots__ = ()

    @property
    def _settled(self) -> int:
        """Number of steps settled since it joined."""
        member: Member = self.member
        settled = member.cohort.settled - member.joined
        return settled if settled > 0 else 0

    @property
    def _composed(self) -> int:
        """Number of steps composed since it joined."""
        member: Member = self.member
        cohort = member.cohort
        last = member.last if self.request in cohort.sitting else cohort.composed
        return last - member.joined

    @property
    def _has_grown(self) -> bool:
        cohort = self.member.cohort
        return cohort.grown > 0 and self.request not in cohort.sitting

    @property
    def _coming(self) -> int:
        return self._composed - self._settled if self.member.cohort.ahead else 0

    @property
    def _computed_steps(self) -> int:
        return self._composed if self.member.cohort.counts_composed else self._settled

    length = property(
        lambda self: _LENGTH.__get__(self) + self._settled,
        lambda self, tokens: _LENGTH.__set__(self, tokens - self._settled),
    )
    computed = property(
        lambda self: _COMPUTED.__get__(self) + self._computed_steps,
        lambda self, tokens: _COMPUTED.__set__(self, tokens - self._computed_steps),
    )
    placeholders = property(
        lambda self: _PLACEHOLDERS.__get__(self) + self._coming,
        lambda self, tokens: _PLACEHOLDERS.__set__(self, tokens - self._coming),
    )
    last_token_ns = property(
        lambda self: self.member.cohort.token_ns if self._settled else LAST_TOKEN_NS.__get__(self),
        lambda self, time_ns: LAST_TOKEN_NS.__set__(self, time_ns),
    )
    access_ns = property(
        lambda self: self.member.cohort.composed_ns if self._composed else _ACCESS_NS.__get__(self)
    )
    filled = property(lambda self: self.member.filled + self._composed + self._has_grown)

    @property
    def table(self) -> list[int]:  # type: ignore[override]
        """Physical block ids. If blocks are only counted, a range of the right length."""
        held: Any = _TABLE.__get__(self)
        if not isinstance(held, range):
            return held  # type: ignore[no-any-return]
        blocks = -(-self.filled // self.member.cohort.size)
        return range(held.start, held.start + blocks)  # type: ignore[return-value]
