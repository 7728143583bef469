"""Where a recomputed victim joins the waiting queue again.

Every engine puts it at the head, and so the oldest of several victims first: they are preempted
from the tail of the running queue. vLLM V1 under its priority policy keeps the waiting queue
sorted. Requests that were swapped out have a queue of their own.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

from kvsim.core.request import Request
from kvsim.errors import ConfigError
from kvsim.policies.named import callable_with, find_rule

Requeue = Callable[[deque[Request], Request], None]
"""Puts a victim into the waiting queue. Called once per victim, in order of preemption."""


def head(waiting: deque[Request], victim: Request) -> None:
    """At the head of the queue: the rule of vLLM 0.3.3, 0.6.3, V1 and nano-vllm."""
    waiting.appendleft(victim)


def tail(waiting: deque[Request], victim: Request) -> None:
    """At the end of the queue, like a request that has just arrived."""
    waiting.append(victim)


def arrival(waiting: deque[Request], victim: Request) -> None:
    """In order of arrival: after older waiting victims, before later arrivals."""
    insort(waiting, victim, key=_by_arrival)


def priority(waiting: deque[Request], victim: Request) -> None:
    """In order of (priority, arrival, id): vLLM V1's own rule under its priority policy."""
    insort(waiting, victim, key=_by_priority)


def priority_by_trace(waiting: deque[Request], victim: Request) -> None:
    """The same in releases in which requests of equal priority and arrival have no order."""
    insort(waiting, victim, key=lambda each: (each.priority, each.arrival_ns, each.index))


REQUEUE: dict[str, Requeue] = {
    "head": head,
    "tail": tail,
    "arrival": arrival,
    "priority": priority,
}
"""Values of the engines' argument `requeue`."""


def find_requeue(name: str | Requeue, /, **given: Any) -> Requeue:
    """Returns the rule called `name`: a key of `REQUEUE`, or `package.module:name` of a function or
    of a class that makes one from `given`.

    Raises `ConfigError` for an unknown name, and during the run if a user's rule loses a request.
    """
    requeue: Requeue = find_rule("requeue", REQUEUE, name, _guarded, **given)
    return requeue


def make_requeue(name: str | Requeue | None, own: str = "head", sorts: bool = False) -> Requeue:
    """Returns the requeue rule of an engine by name; None stands for its `own` rule.

    `sorts` says whether the waiting queue is kept in order of priority; only `priority` keeps that
    order. Raises `ConfigError` for an unknown name, and `ValueError` for a rule that the queue does
    not allow.
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
    """Wraps a user's rule and checks that it keeps the queue complete."""
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
    """Sort key of vLLM V1's waiting queue under its priority policy (`v1/request.py`, `__lt__`)."""
    return request.priority, request.arrival_ns, request.id
