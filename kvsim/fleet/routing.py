"""Sums up a router's decisions: what was lost and why, what was chance, and how even the load was.

Of the prompt tokens of all requests that were sent and later admitted:

* `cached_tokens` were in the cache of the chosen replica when the router decided, `best_tokens` in
  that of the best eligible one. The difference is the *regret*; every decision's regret has one
  cause (`kvsim.core.schema.CAUSES`), so the parts add up to it.
* `luck_tokens` are those that a replica drawn at random would have had: the mean over the eligible
  ones. `affinity_tokens` are what the choice added, so the two add up to `cached_tokens`.
* `hit_tokens` were found at the first admission. `waiting_tokens`, what requests gained or lost
  while they waited for it, is the difference to `cached_tokens`.
* `duplicate_tokens` were cached in more than one replica, counted once for each further one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.schema import CAUSES
from kvsim.core.sums import added
from kvsim.results.statistics import ratio

Ints = NDArray[np.int64]
Columns = Mapping[str, Any]


def of_admitted(decisions: Columns, requests: Columns) -> dict[str, Ints]:
    """Returns the decisions about requests that were admitted later, with the tokens of their
    prompts and those that hit."""
    columns = {name: np.asarray(requests[name]) for name in ("input_length", "num_cached_tokens")}
    admitted = np.asarray(requests["first_scheduled_ns"]) >= 0
    return {name: column[admitted] for name, column in {**decisions, **columns}.items()}


def regrets(decisions: Columns) -> dict[str, tuple[int, int]]:
    """Returns cause → decisions with it, and the tokens that they lost."""
    lost = decisions["best_tokens"] - decisions["cached_tokens"]
    which = [decisions["cause"] == code for code in range(1, len(CAUSES))]
    return {
        cause: (int(mask.sum()), int(lost[mask].sum()))
        for cause, mask in zip(CAUSES[1:], which, strict=True)
    }


def sent_to(each: Sequence[Columns]) -> dict[str, Any]:
    """Returns the requests to all replicas, one replica after the other, with what `in_flight`
    needs. In a prefill/decode split, those of the clients are in two of them."""
    names = "arrival_ns", "finish_ns"
    columns = {name: np.concatenate([requests[name] for requests in each]) for name in names}
    numbers = [len(requests["arrival_ns"]) for requests in each]
    return {**columns, "replica": np.repeat(np.arange(len(each)), numbers)}


def in_flight(requests: Columns, replicas: int) -> tuple[Ints, Ints]:
    """Returns instants, and for each replica the requests that it has from each instant on until
    the next."""
    sent = np.asarray(requests["arrival_ns"]) >= 0
    begin, end = (np.asarray(requests[name])[sent] for name in ("arrival_ns", "finish_ns"))
    replica = np.asarray(requests["replica"])[sent]
    over = end >= 0
    instants, places = np.unique(np.concatenate((begin, end[over])), return_inverse=True)
    changes = np.zeros((replicas, len(instants)), dtype=np.int64)
    np.add.at(changes, (replica, places[: len(begin)]), 1)
    np.add.at(changes, (replica[over], places[len(begin) :]), -1)
    return instants, changes.cumsum(axis=1)


def load_imbalance(requests: Columns, replicas: int) -> float | None:
    """Returns the requests in flight of the busiest replica, whichever it is, over those of the
    mean replica, both averaged over time: 1 if the load is always even."""
    instants, counts = in_flight(requests, replicas)
    spans = np.diff(instants).astype(float)
    # One by one: how a product of vectors adds depends on the processor.
    most, mean = (
        added((each[:-1] * spans).tolist()) for each in (counts.max(axis=0), counts.mean(axis=0))
    )
    return ratio(most, mean)


def routing_figures(decisions: Columns, requests: Columns) -> dict[str, Any]:
    """Returns the figures of this module; `requests` are those of the whole fleet, in the order of
    the trace."""
    noted = of_admitted(decisions, requests)
    prompt, hit = (int(noted[name].sum()) for name in ("input_length", "num_cached_tokens"))
    cached, best, together = (
        int(noted[name].sum()) for name in ("cached_tokens", "best_tokens", "eligible_tokens")
    )
    luck = float((noted["eligible_tokens"] / noted["eligible"]).sum())
    lost = regrets(noted)
    return {
        "decisions": len(noted["request"]),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "best_tokens": best,
        "regret_tokens": {cause: tokens for cause, (_, tokens) in lost.items()},
        "regret_decisions": {cause: number for cause, (number, _) in lost.items()},
        "regret_share": ratio(best - cached, prompt),
        "luck_tokens": luck,
        "affinity_tokens": cached - luck,
        "affinity_share": ratio(cached - luck, prompt),
        "hit_tokens": hit,
        "waiting_tokens": hit - cached,
        "duplicate_tokens": together - best,
        "duplicate_share": ratio(together - best, prompt),
    }
