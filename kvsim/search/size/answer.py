"""Searches for the answer, looks for cliffs near it, and collects the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvsim.explain.certainty.estimates import paired
from kvsim.search.size.cliffs import Cliff, Tried, find_cliff
from kvsim.search.size.knobs import LASTING
from kvsim.search.size.search import (
    Laboratory,
    boundary,
    find_beside,
    find_best,
    find_boundary,
    sharpen,
)

LEVEL = 0.05
"""Error probability of statements that name a confidence."""

LONGER = 4
"""Factor by which the load is extended to test that a rate lasts."""
MOST_REQUESTS = 200_000
"""Most requests of an extended load."""

_SHARES = (-0.2, -0.1, -0.05, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Distances from an answer that a table of its neighbourhood shows, if they were tried."""
_WINDOW = 0.25
_MOST_ROWS = 12


class Answer(NamedTuple):
    """What a search found."""

    value: float | None
    """None if no tried value keeps the objectives, or no run finishes."""
    meets: bool
    cliffs: tuple[Cliff, ...]
    as_good: tuple[float, ...]
    """If the best value is sought: tried values without a significant difference from it."""
    varies: tuple[str, ...]
    """What differs from seed to seed, in words."""
    held: int = 0
    """Requests of the longer load on which it was tried, too; 0 if there was none."""
    too_short: float | None = None
    """Without a value: the one farthest to the safe side that holds for the shorter load only."""


class Search(NamedTuple):
    """A search and what it found."""

    lab: Laboratory
    found: Answer


def answer(lab: Laboratory, varies: Sequence[str]) -> Answer:
    """Search, and refine the jumps of the bounded figures, which may move the answer."""
    best = lab.knob.goal == "best"
    value = find_best(lab) if best else find_boundary(lab)
    metrics = lab.objectives.metrics
    for metric in metrics:
        sharpen(lab, metric)
    if not best and value != boundary(lab)[0]:
        value = find_boundary(lab)
    cliffs = (find_cliff(lab.ascending, metric, lab.knob.grain) for metric in metrics)
    return Answer(
        value,
        value is not None and lab.tried[value].meets,
        tuple(cliff for cliff in cliffs if cliff is not None),
        _as_good(lab, value) if best and value is not None else (),
        tuple(varies),
    )


def searched(lab: Laboratory, varies: Sequence[str]) -> Search:
    """The search as its knob asks for it. `varies`: what differs from seed to seed, in words."""
    if lab.knob.key in LASTING:
        return lasting_answer(lab, varies)
    return Search(lab, answer(lab, varies))


def lasting_answer(lab: Laboratory, varies: Sequence[str]) -> Search:
    """The answer that also holds under a longer load, and the laboratory that found it.

    A short load hides a queue that grows: it ends before the queue is long. So the search itself
    sends the trace `LONGER` times over, and the answer is tried on a load `LONGER` times as long
    again. Where it breaks the objectives there, it is moved until it does not.
    """
    rough = find_boundary(lab, ())
    longest = len(lab.trace.rows) * LONGER**2
    if rough is None or longest > MOST_REQUESTS:
        return Search(lab, answer(lab, varies))
    lab = lab.longer(LONGER, rough)
    found = answer(lab, varies)
    if found.value is None or not found.meets:
        return Search(lab, found)
    longer = lab.longer(LONGER, found.value)
    value = find_beside(longer, found.value)
    lab.look([value])
    if longer.tried[value].meets and lab.tried[value].meets:
        return Search(lab, found._replace(value=value, held=longest))
    return Search(lab, found._replace(value=None, meets=False, held=longest, too_short=value))


def neighbourhood(lab: Laboratory, value: float | None) -> Tried:
    """The tried values near an answer; all, thinned out, without an answer or for a best one."""
    tried = lab.ascending
    if value is None or lab.knob.goal == "best":
        return tried[:: 1 + len(tried) // (2 * _MOST_ROWS)]
    reach = max(_WINDOW * abs(value), lab.knob.grain)
    near = [each for each in tried if abs(each[0] - value) <= reach]
    place = [v for v, _ in near].index(value)
    picked = {v for v, _ in near[max(place - 1, 0) : place + 2]}
    for share in _SHARES:
        picked.add(min(near, key=lambda each: abs(each[0] - value * (1 + share)))[0])
    return [each for each in near if each[0] in picked]


def _as_good(lab: Laboratory, value: float) -> tuple[float, ...]:
    """Finished values without a significant paired difference to the best, ascending."""
    best = _loads(lab, value)
    return tuple(
        other
        for other, configuration in lab.ascending
        if other != value
        and configuration.meets == lab.tried[value].meets
        and _alike(best, _loads(lab, other))
    )


def _loads(lab: Laboratory, value: float) -> Any:
    return np.array([lab.objectives.load(record) for record in lab.tried[value].records])


def _alike(best: Any, other: Any) -> bool:
    if not np.isfinite(other).all():
        return False
    if len(best) == 1:
        return bool(best[0] == other[0])
    return paired(best, other, whole=False, percentile=True).p > LEVEL
