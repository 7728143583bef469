"""Says why two runs of several replicas differ: by request, by replica, and by decision."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np

from kvsim.fleet.folder import FleetRun
from kvsim.report.explanation import Explanation, explain_requests
from kvsim.report.routing import REPLICA_HEAD, replica_rows
from kvsim.results.numerals import MISSING, count, plural, seconds

NamedFleet = tuple[str, FleetRun]


def explain_fleets(first: NamedFleet, other: NamedFleet) -> Explanation:
    """Compare the second run with the first, request by request; the first divergent decision is
    that of a router."""
    explanation = explain_requests(
        (first[0], first[1].summary, first[1].requests),
        (other[0], other[1].summary, other[1].requests),
    )
    if not explanation.waterfalls:
        return explanation
    return explanation._replace(divergence_words=_divergence_words(first, other))


def _divergence_words(first: NamedFleet, other: NamedFleet) -> list[str]:
    """Which request was the first one to go elsewhere, and how many did."""
    if first[1].handovers is not None or other[1].handovers is not None:
        return ["A prefill/decode split makes two decisions about each request; none is compared."]
    chosen = [run.requests["replica"] for _, run in (first, other)]
    # Both have the requests of one trace, one of them perhaps more.
    number = min(map(len, chosen))
    (elsewhere,) = np.nonzero(np.asarray(chosen[0][:number]) != np.asarray(chosen[1][:number]))
    if not len(elsewhere):
        return ["Both routers sent every request to the same replica."]
    times_ns = np.asarray(first[1].decisions["time_ns"])[elsewhere]
    place = int(elsewhere[np.argmin(times_ns)])
    return [
        f"{count(len(elsewhere))} of {plural(number, 'request')} went to another replica."
        f" Request {first[1].requests['id'][place]} was the first of them.",
        *(f"{name}: {_decision_words(run, place)}" for name, run in (first, other)),
    ]


def _decision_words(run: FleetRun, place: int) -> str:
    """Where a request was sent, when, and what was known there."""
    noted: dict[str, Any] = {name: int(column[place]) for name, column in run.decisions.items()}
    if noted["replica"] < 0:
        return "it was sent to nobody."
    return (
        f"at {seconds(noted['time_ns'] / 1e9)} to replica {noted['replica']} with"
        f" {plural(noted['in_flight'], 'request')} in flight (idlest replica:"
        f" {noted['least_in_flight']}) and {plural(noted['cached_tokens'], 'token')} of its"
        f" prompt cached (most: replica {noted['best_replica']}, {count(noted['best_tokens'])})."
    )


REPLICA_DIFF_HEAD = ("replica", *REPLICA_HEAD)


def replica_differences(first: FleetRun, other: FleetRun) -> list[list[str]]:
    """A row for each replica of either run, with the columns `REPLICA_DIFF_HEAD`: the figure in
    both runs, once where they are equal."""
    nothing = [MISSING] * len(REPLICA_HEAD)
    pairs = zip_longest(replica_rows(first.summary), replica_rows(other.summary), fillvalue=nothing)
    return [
        [str(i), *(a if a == b else f"{a} → {b}" for a, b in zip(*pair, strict=True))]
        for i, pair in enumerate(pairs)
    ]
