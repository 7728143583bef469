"""Columns of the log of a router's decisions."""

from __future__ import annotations

from functools import partial

from kvsim.core.schema.column import Column, Source, Table

_decision = partial(Column, source=Source.ROUTING, null=True)

_CAUSES = (
    ("", "nothing: no eligible replica had more of the prompt than the chosen one"),
    ("load", "the router knew the better replica, and load or another rule decided against it"),
    ("stale_index", "its index took the chosen replica to have as much, or more"),
    ("index_cap", "its index ends before the prompts differ (`Router.index_limit_tokens`)"),
    ("tie", "the better replica was in the draw, and was not drawn"),
    ("no_index", "the router keeps no index of prompts"),
)
CAUSES = tuple(name for name, _ in _CAUSES)
"""Names of the values of a decision's column `cause`."""

ROUTING = Table(
    "routing",
    "One row per request of the trace, as its router decided; null: it was sent to nobody. Cached"
    " tokens are those that an admission at that moment would find in the engine's real cache,"
    " which no router sees. `best_tokens - cached_tokens` is the regret of a decision.",
    (
        Column("request", "", "its `index` in the trace", Source.ROUTING),
        _decision("time_ns", "ns", "when the router decided"),
        _decision("replica", "", "the chosen one"),
        _decision("cached_tokens", "tokens", "of its prompt, in the cache of the chosen replica"),
        _decision("best_replica", "", "an eligible one with the most; the chosen one if it has"),
        _decision("best_tokens", "tokens", "cached there"),
        _decision("cause", "", "why the chosen replica had less than the best", codes=_CAUSES),
        _decision("expected_tokens", "tokens", "cached, as the router took the chosen one to have"),
        _decision("best_expected_tokens", "tokens", "the same of the best replica"),
        _decision("eligible", "replicas", "that could be chosen"),
        _decision("eligible_tokens", "tokens", "cached in all of them together"),
        _decision("candidates", "replicas", "among which the router drew"),
        _decision("in_flight", "requests", "sent to the chosen replica before, and not over"),
        _decision("least_in_flight", "requests", "the fewest of an eligible replica"),
    ),
)
