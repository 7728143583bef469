"""Pairs the requests of two runs of the same trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvsim.results import phases
from kvsim.results.phases import Floats, Ints, ints


class Pairs(NamedTuple):
    """The requests that both runs completed."""

    number: int
    only_first: int
    """Number of requests that the first run alone completed."""
    only_other: int
    same_arrivals: bool
    """Whether both engines received every pair at the same time."""
    first_ns: dict[str, Floats]
    """Durations of the pairs in the first run, with the keys of `phases.durations_ns`."""
    other_ns: dict[str, Floats]
    first_rows: Ints
    """Positions of the pairs in the columns of the first run; `other_rows` are those in the other
    run."""
    other_rows: Ints

    def differences_ns(self, kind: str) -> Floats:
        """Other minus first, one per pair for which both are defined."""
        return phases.defined(self.other_ns[kind] - self.first_ns[kind])


def pair(first: Mapping[str, Any], other: Mapping[str, Any]) -> Pairs | None:
    """Pairs by position in the trace; None if the runs had different requests, or one had more."""
    mine, theirs = (np.argsort(ints(requests["index"])) for requests in (first, other))
    for name in ("index", "id", "input_length", "output_length"):
        if not np.array_equal(np.asarray(first[name])[mine], np.asarray(other[name])[theirs]):
            return None
    done, also = phases.completed(first)[mine], phases.completed(other)[theirs]
    both = done & also
    mine, theirs = mine[both], theirs[both]
    arrivals = ints(first["arrival_ns"])[mine], ints(other["arrival_ns"])[theirs]
    return Pairs(
        number=len(mine),
        only_first=int((done & ~also).sum()),
        only_other=int((also & ~done).sum()),
        same_arrivals=bool(np.array_equal(*arrivals)),
        first_ns={kind: ns[mine] for kind, ns in phases.durations_ns(first).items()},
        other_ns={kind: ns[theirs] for kind, ns in phases.durations_ns(other).items()},
        first_rows=mine,
        other_rows=theirs,
    )
