"""What blocks hold, as numbers: who holds equal tokens after equal tokens has equal numbers.

A number is `base + d` for unit d of a stream, where streams give equal bases to what they share
(`kvsim.workload.keys`), so that consecutive units have consecutive numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import maxsize
from typing import Any, Final

from librt.vecs import append
from mypy_extensions import i64

from kvsim.core import guard
from kvsim.core.request import Request
from kvsim.core.vectors import longer

WIDTH: Final = 1 << 24
"""Numbers from one base to the next: more than the units of the longest stream."""


class Numbering:
    """Numbers of the units of requests, equal where their tokens are."""

    unit: i64
    """Tokens of a unit."""
    ahead: bool
    """Whether the number of a unit also stands for the token after it."""
    _bases: dict[int, int]
    _given: i64

    def __init__(self, unit: int, ahead: bool = False) -> None:
        self.unit, self.ahead = unit, ahead
        self._bases = {}
        self._given = 0

    def extend(self, request: Request, units: i64) -> None:
        """Numbers the first `units` units of a request, whose tokens must be known."""
        if len(request.contents) >= units:
            return
        if not request._spans:
            stream = request._stream
            assert stream is not None, "block identities are needed"
            if not hasattr(stream, "spans"):
                self._extend_by_keys(request, units)
                return
            request._spans = stream.spans(1 if self.ahead else self.unit)
        contents = request.contents
        # With `ahead`, a unit goes by the position of the token behind it.
        step: i64 = self.unit if self.ahead else 1
        shift: i64 = self.unit if self.ahead else 0
        end: i64 = units * step + shift
        at: i64 = len(contents) * step + shift
        while at < end:
            while request._until <= at:
                self._next_span(request)
            base: i64 = request._base
            stop: i64 = min(request._until, end)
            place: i64 = len(contents)
            contents = longer(contents, (stop - at + step - 1) // step)
            while at < stop:
                contents[place] = base + at
                place += 1
                at += step
        request.contents = contents

    def _next_span(self, request: Request) -> None:
        """The next units to be numbered are those of the next span."""
        first, last, offset = request._spans[request._span]
        begin: i64 = first
        begin *= 1 if self.ahead else self.unit
        private: i64 = min(request._stream.shared_tokens, WIDTH)
        request._span += 1
        request._until = last
        request._base = self._base(offset, begin >= private, request)

    def number(self, key: int) -> i64:
        """The number of a single key of a stream."""
        return self._base(key, False, None)

    def runs_of(self, stream: Any) -> list[tuple[int, int]]:
        """`runs` of a stream; none if it gives its keys one by one."""
        if not hasattr(stream, "spans"):
            return []
        return self.runs(stream.spans(self.unit), stream.shared_tokens)

    def runs(
        self, spans: Iterable[tuple[int, int, int]], shared_tokens: int
    ) -> list[tuple[int, int]]:
        """All units of a stream, as (base, last): the number of a unit before `last`, and not
        before that of the run before, is `base` plus its place. Units behind `shared_tokens` are in
        no other stream."""
        found: list[tuple[int, int]] = []
        base: i64
        for first, last, offset in spans:
            if first * int(self.unit) >= shared_tokens:
                self._given += 1
                base = self._given * WIDTH
                return [*found, (base, maxsize)]
            base = self._base(offset, False, None)
            found.append((base, last))
        return found

    def _base(self, offset: int, private: bool, request: Request | None) -> i64:
        """The base of an offset. That of a private one is kept with its request alone."""
        # In no other stream: to keep it in the table of all would only fill memory.
        if private and request is not None:
            if request._private == 0:
                self._given += 1
                request._private = self._given * WIDTH
            return request._private
        known = self._bases.get(offset)
        if known is None:
            self._given += 1
            known = self._bases[offset] = self._given * WIDTH
        return known

    def _extend_by_keys(self, request: Request, units: i64) -> None:
        """The same for a stream without spans, key by key."""
        stream, contents, unit = request._stream, request.contents, self.unit
        done: i64 = len(contents)
        for place in range(done, units):
            if self.ahead:
                key = stream.keys((place + 1) * unit, (place + 1) * unit + 1, 1)[0]
            else:
                key = stream.keys(place, place + 1, unit)[0]
            contents = append(contents, self.number(key))
        request.contents = contents


guard.keep(Numbering, closed="extend number")
