"""Where a request that was preempted by recompute joins the waiting queue again.

Every engine puts it at the head, and so the oldest of several victims first: they are preempted
from the tail of the running queue. vLLM V1 under its priority policy keeps the waiting queue
sorted. Requests that were swapped out have a queue of their own.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable

from kvsim.blocks.tables import named
from kvsim.engine.request import Request

Requeue = Callable[[deque[Request], Request], None]
"""Puts a victim into the waiting queue; called once for each, in order of preemption."""


def head(waiting: deque[Request], victim: Request) -> None:
    """In front of everybody: the rule of vLLM 0.3.3, 0.6.3, V1 and nano-vllm."""
    waiting.appendleft(victim)


def tail(waiting: deque[Request], victim: Request) -> None:
    """Behind everybody, like a request that has just arrived."""
    waiting.append(victim)


def arrival(waiting: deque[Request], victim: Request) -> None:
    """Where its arrival puts it: behind older victims that wait, before later arrivals."""
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


def make_requeue(name: str | None, own: str = "head", sorts: bool = False) -> Requeue:
    """The rule that `name` stands for; None: the engine's `own`.

    `sorts`: whether the waiting queue is kept in order of priority, which only `priority` respects.
    Raises `ValueError` for an unknown name and for a rule that does not go with the queue.
    """
    rule = named("requeue", REQUEUE, own if name is None else name)
    if name in (None, own) or (rule is priority) == sorts:
        return rule
    if sorts:
        raise ValueError(
            f"requeue: {name} would spoil the order of --scheduling-policy priority; leave it out,"
            " or use --scheduling-policy fcfs"
        )
    raise ValueError("requeue: priority needs --scheduling-policy priority; use head or arrival")


def _by_arrival(request: Request) -> tuple[int, int]:
    return request.arrival_ns, request.index


def _by_priority(request: Request) -> tuple[int, int, str]:
    """Order of vLLM V1's waiting queue under its priority policy (`v1/request.py`, `__lt__`)."""
    return request.priority, request.arrival_ns, request.id
