"""How many LoRA adapters may run together (vLLM 0.33.0 `v1/core/sched/scheduler.py`, `max_loras`).

A waiting request whose adapter finds no place is passed over: those behind it may be admitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsim.engine.request import Request


class LoraSlots:
    """The adapters of one scheduling call."""

    def __init__(self, max_loras: int | None) -> None:
        """None: there is no limit."""
        self._most = max_loras
        self._used: set[str] = set()

    def begin(self, running: Iterable[Request]) -> None:
        """Admissions begin beside these running requests."""
        if self._most is not None:
            self._used = {request.options.lora for request in running} - {""}

    def admits(self, request: Request) -> bool:
        """Whether the adapter of a waiting request has a place."""
        lora = request.options.lora
        return self._most is None or not lora or lora in self._used or len(self._used) < self._most

    def admitted(self, request: Request) -> None:
        """A request was admitted."""
        if self._most is not None and request.options.lora:
            self._used.add(request.options.lora)
