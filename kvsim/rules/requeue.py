"""Where a request that was preempted by recompute joins the waiting queue again.

Every engine puts it at the head, and so the oldest of several victims first: they are preempted
from the tail of the running queue. vLLM V1 under its priority policy keeps the waiting queue
sorted. Requests that were swapped out have a queue of their own.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

from kvsim.engine.named import callable_with, find_rule
from kvsim.engine.request import Request
from kvsim.errors import ConfigError

Requeue = Callable[[deque[Request], Request], None]
"""Puts a victim into the waiting queue; called once for each, in order of preemption."""


def head(waiting: deque[Request], victim: Request) -> None:
    """In front of everybody: the rule of vLLM 0.3.3, 0.6.3, V1 and nano-vllm."""
    waiting.appendleft(victim)


def tail(waiting: deque[Request], victim: Request) -> None:
    """Behind everybody, like a request that has just arrived."""
    waiting.append(victim)


def arrival(waiting: deque[Request], victim: Request) -> None:
    """Where its arrival puts it: after older victims that wait, before later arrivals."""
    insort(waiting, victim, key=_by_arrival)


def priority(waiting: deque[Request], victim: Request) -> None:
    """By (priority, arrival, id): vLLM V1's own rule under its priority policy."""
    insort(waiting, victim, key=_by_priority)


REQUEUE: dict[str, Requeue] = {
    "head": head,
    "tail": tail,
    "arrival": arrival,
    "priority": priority,
}
"""Names of the engines' argument `requeue`."""


def find_requeue(name: str | Requeue, /, **given: Any) -> Requeue:
    """The rule that `name` stands for: of `REQUEUE`, or `package.module:name`, a function or a
    class that makes one of `given`.

    Raises `ConfigError`, also later, where an outsider's rule loses a request.
    """
    requeue: Requeue = find_rule("requeue", REQUEUE, name, _guarded, **given)
    return requeue


def make_requeue(name: str | Requeue | None, own: str = "head", sorts: bool = False) -> Requeue:
    """The rule of an engine that `name` stands for; None: its `own`.

    `sorts`: whether the waiting queue is kept in order of priority, which only `priority` respects.
    Raises `ConfigError` for an unknown name, and `ValueError` for a rule that does not go with the
    queue.
    """
    requeue = find_requeue(own if name is None else name)
    if requeue is REQUEUE[own] or (requeue is priority) == sorts:
        return requeue
    if sorts:
        raise ValueError(
            "requeue: only priority keeps the order of --scheduling-policy priority; leave it out,"
            " or use --scheduling-policy fcfs"
        )
    raise ValueError("requeue: priority needs --scheduling-policy priority; use head or arrival")


def _guarded(label: str, requeue: Requeue) -> Requeue:
    """A rule from outside, which is not trusted to keep the queue whole."""
    callable_with(label, requeue, "waiting", "victim")

    def put(waiting: deque[Request], victim: Request) -> None:
        expected = {*waiting, victim}
        requeue(waiting, victim)
        if len(waiting) != len(expected) or set(waiting) != expected:
            raise ConfigError(
                f"{label} left {len(waiting)} requests in the waiting queue instead of"
                f" {len(expected)}; put in the victim once, and take nobody out"
            )

    return put


def _by_arrival(request: Request) -> tuple[int, int]:
    return request.arrival_ns, request.index


def _by_priority(request: Request) -> tuple[int, int, str]:
    """Order of vLLM V1's waiting queue under its priority policy (`v1/request.py`, `__lt__`)."""
    return request.priority, request.arrival_ns, request.id
