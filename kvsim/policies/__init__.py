"""The rules in which engines differ, each chosen by name with an argument of a manager or
scheduler.

In go requests, blocks and tables, to be read. Out comes a choice: a victim, a place in the queue, a
block to evict; the mechanism (`kvsim.core`) carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvsim.policies.eviction import make_eviction
from kvsim.policies.order import make_idle_order
from kvsim.policies.requeue import find_requeue
from kvsim.policies.tables import make_full_hit, make_growth, make_hits_save, make_publish_at

RULES: dict[str, Callable[..., Any]] = {
    "growth": make_growth,
    "idle_order": make_idle_order,
    "eviction": make_eviction,
    "publish_at": make_publish_at,
    "hits_save": make_hits_save,
    "full_hit": make_full_hit,
    "requeue": find_requeue,
}
"""Argument → the function that makes a rule from its name and the values it may be given."""


def ready(args: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """Replaces the rule names in a user's arguments by rules. A rule's constructor receives those
    values of `given` that it names. Raises `ConfigError`."""
    return {
        key: RULES[key](value, **given) if key in RULES and value is not None else value
        for key, value in args.items()
    }
