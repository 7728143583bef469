"""What blocks hold, as numbers: who holds equal tokens after equal tokens has equal numbers.

A number is `base + d` for unit d of a stream, where streams give equal bases to what they share
(`kvsim.workload.keys`), so that consecutive units have consecutive numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import maxsize
from typing import Any, Final

from librt.vecs import append, vec
from mypy_extensions import i64

from kvsim.core import guard
from kvsim.core.request import Request
from kvsim.core.vectors import EMPTY, longer

WIDTH: Final = 1 << 24
"""Numbers from one base to the next: more than the units of the longest stream."""


class Numbering:
    """Numbers of the units of requests, equal where their tokens are."""

    unit: i64
    """Tokens of a unit."""
    _step: i64
    _shift: i64
    """Unit d goes by place `d * step + shift` of a stream."""
    _bases: dict[int, int]
    """Offset of a span, or key of a unit → its base, or its number."""
    _given: i64

    def __init__(self, unit: int, ahead: bool = False) -> None:
        """`ahead`: the number of a unit also stands for the token after it, by whose position it
        then goes."""
        self.unit = unit
        self._step, self._shift = (unit, unit) if ahead else (1, 0)
        self._bases = {}
        self._given = 0

    def extend(self, request: Request, units: i64) -> None:
        """Numbers the first `units` units of a request, whose tokens must be known."""
        contents = request.contents
        if len(contents) >= units:
            return
        assert request._stream is not None, "block identities are needed"
        runs: vec[i64] = self.reach(request._runs, request._stream, units)
        run: i64 = request._run
        step, shift = self._step, self._shift
        end: i64 = units * step + shift
        at: i64 = len(contents) * step + shift
        while at < end:
            while runs[run + 1] <= at:
                run += 2
            base: i64 = runs[run]
            stop: i64 = min(runs[run + 1], end)
            place: i64 = len(contents)
            contents = longer(contents, (stop - at + step - 1) // step)
            while at < stop:
                contents[place] = base + at
                place += 1
                at += step
        request.contents, request._runs, request._run = contents, runs, run

    def reach(self, runs: vec[i64], stream: Any, units: i64) -> vec[i64]:
        """`runs` of a stream for at least its first `units` units, whose tokens must be known.

        They are runs of consecutive numbers: of each, the number of a unit less its place, and
        where the run ends.
        """
        step, shift = self._step, self._shift
        if len(runs) and runs[len(runs) - 1] > (units - 1) * step + shift:
            return runs
        size: i64 = self.unit // step
        if hasattr(stream, "spans"):
            return self.runs(stream.spans(size), stream.shared_tokens)
        # A stream that gives its keys alone: each unit is a run of its own.
        unit: i64
        for unit in range(len(runs) // 2, units):
            at: i64 = unit * step + shift
            key = stream.keys(at, at + 1, size)[0]
            runs = append(append(runs, self._number(key) - at), at + 1)
        return runs

    def runs(self, spans: Iterable[tuple[int, int, int]], shared_tokens: i64) -> vec[i64]:
        """All units of a stream as `reach` has them. Those behind `shared_tokens` are in no other
        stream."""
        found: vec[i64] = EMPTY
        for first, last, offset in spans:
            begin: i64 = first
            # To keep it in the table of all would only fill memory.
            if begin * (self.unit // self._step) >= shared_tokens:
                self._given += 1
                return append(append(found, self._given * WIDTH), maxsize)
            found = append(append(found, self._number(offset)), last)
        return found

    def _number(self, key: int) -> i64:
        """The base of an offset, or the number of a key."""
        known = self._bases.get(key)
        if known is None:
            self._given += 1
            known = self._bases[key] = self._given * WIDTH
        return known


guard.keep(Numbering, closed="extend")
