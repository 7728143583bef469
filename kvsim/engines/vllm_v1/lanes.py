"""Copies over one link as time passes: who follows whom, and who shares the bandwidth.

```
 stores  ── GPU to CPU ──►  ┐
 loads   ◄─ CPU to GPU ───  ├ the copies of a lane follow each other; lanes of one direction share
 within  ◄─ CPU to GPU ───  ┘ its bandwidth, and two directions have less than twice that of one
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_FULL = 2000
"""Speed of a copy that is alone on its link. Shares of it are whole numbers, so that times are."""


class Lane(Generic[T]):
    """Copies that follow each other."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, T]] = deque()
        """(nanoseconds alone on the link, copy) of those that have not begun."""
        self._left = 0
        self._over: deque[tuple[int, T]] = deque()
        """(end in nanoseconds, copy) of those that are over and were not taken out."""
        self.copies: deque[T] = deque()
        """Those that are not over, in order."""
        self.finished = 0
        """Number of copies that are over."""
        self.busy_ns = 0
        """Time with a copy under way."""

    def submit(self, copy: T, alone_ns: int) -> None:
        """A copy is asked for that takes `alone_ns` where it is alone on the link."""
        if not self.copies:
            self._left = alone_ns * _FULL
        else:
            self._waiting.append((alone_ns, copy))
        self.copies.append(copy)

    def take(self, now_ns: int) -> list[T]:
        """Takes out the copies that are over at a time."""
        done = []
        while self._over and self._over[0][0] <= now_ns:
            done.append(self._over.popleft()[1])
        return done

    def due_ns(self, speed: int) -> int:
        """Returns how long the copy under way takes still at a speed."""
        return -(-self._left // speed)

    def go_on(self, speed: int, ns: int, now_ns: int) -> None:
        """Copies for so long, until `now_ns`, at most to the end of the copy under way."""
        self.busy_ns += ns
        self._left -= speed * ns
        if self._left <= 0:
            self._over.append((now_ns, self.copies.popleft()))
            self.finished += 1
            if self._waiting:
                self._left = self._waiting.popleft()[0] * _FULL


class Lanes(Generic[T]):
    """The lanes of a link. Time passes only in `advance`."""

    def __init__(self, directions: Sequence[Sequence[Lane[T]]], both_ways: float = 1.0) -> None:
        """`both_ways`: speed of each direction while both copy, as a share of that of one alone."""
        self._directions = directions
        self._both = round(_FULL * both_ways / 2) * 2
        self.now_ns = 0

    def advance(self, until_ns: int) -> None:
        """Lets time pass. What is submitted later must not begin before `until_ns`."""
        while speeds := self._speeds():
            ns = min(lane.due_ns(speed) for lane, speed in speeds)
            if self.now_ns + ns > until_ns:
                break
            self._pass(speeds, ns)
        if until_ns > self.now_ns:
            self._pass(speeds, until_ns - self.now_ns)

    def next_ns(self) -> float:
        """Returns when the next copy is over, if no other is submitted; infinite: never."""
        due = (lane.due_ns(speed) for lane, speed in self._speeds())
        return self.now_ns + min(due, default=float("inf"))

    def _pass(self, speeds: list[tuple[Lane[T], int]], ns: int) -> None:
        self.now_ns += ns
        for lane, speed in speeds:
            lane.go_on(speed, ns, self.now_ns)

    def _speeds(self) -> list[tuple[Lane[T], int]]:
        """Returns the lanes that copy, and how fast."""
        busy = [[lane for lane in lanes if lane.copies] for lanes in self._directions]
        number = sum(map(bool, busy))
        if not number:
            return []
        whole = _FULL if number == 1 else self._both
        return [(lane, whole // len(lanes)) for lanes in busy for lane in lanes]
