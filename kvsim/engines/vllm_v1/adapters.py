"""How many LoRA adapters may run together (vLLM 0.33.0 `v1/core/sched/scheduler.py`, `max_loras`).

A waiting request whose adapter finds no place is passed over: those behind it may be admitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsim.core.request import Request


class AdapterSlots:
    """The adapters of one scheduling call."""

    def __init__(self, max_loras: int | None) -> None:
        """None: there is no limit."""
        self._most = max_loras
        self._used: set[str] = set()
        self.refuses = False
        """Whether a request was passed over in this scheduling call."""
        self._passed: set[Request] = set()
        """Requests that were passed over at least once."""

    def begin(self, running: Iterable[Request]) -> None:
        """Admissions begin beside these running requests."""
        self.refuses = False
        if self._most is not None:
            self._used = {request.options.lora for request in running} - {""}

    def admits(self, request: Request) -> bool:
        """Whether the adapter of a waiting request has a place."""
        lora = request.options.lora
        used = self._used
        if self._most is None or not lora or lora in used or len(used) < self._most:
            return True
        self.refuses = True
        self._passed.add(request)
        return False

    def remarks(self) -> list[str]:
        """What a reader of a result should know of the limit, one line each."""
        if not self._passed:
            return []
        return [
            f"max_loras: {len(self._passed):,} requests were passed over, because"
            f" {self._most} other adapters ran already; requests behind them may go first"
        ]

    def admitted(self, request: Request) -> None:
        """A request was admitted."""
        if self._most is not None and request.options.lora:
            self._used.add(request.options.lora)
