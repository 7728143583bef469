"""Tries what may be different about a server, and says how much of the misfit each would remove.

A setting is tried with its likely values. A price has a number, which is fitted by running the
replay again until predictions are on average neither too high nor too low. The right correction
then fits every figure; a wrong one trades errors of one figure for errors of another. So what
counts is the misfit that is left, the mean distance of the logarithms of predicted and measured
figures. A price is only preferred to a setting where it leaves clearly less: prices can bend to
what a wrong setting does. Where one correction is not enough, pairs are tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import log
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from kvsim.against.check.suspects import Belief, Bench, Suspect, suspects
from kvsim.against.matched import FITTED, STATISTICS, Matched
from kvsim.errors import ConfigError
from kvsim.results.statistics import describe

EXPLAINED = 0.03
"""A misfit that is left by more than this is not explained."""
_MOST_RUNS = 6
"""Replays of a search."""
_BALANCED = 2e-4
_STEPS = (0.04, 0.01, 0.003)
_CLEARLY = 0.75
"""A price that leaves no less than this share of what a setting leaves is not preferred to it."""
_EXPLAINS, _REFINES = 0.67, 0.5
"""A pair is not preferred to one correction if it leaves more than this share of what that leaves;
the latter where that one explains the misfit: a second correction has to halve it."""
_ENOUGH = EXPLAINED / 2
"""A misfit that no pair has to explain: the noise of a run leaves as much."""
_KEPT = 3
"""So many pairs are fitted together."""
_FEW_RUNS = 3
_FINEST = 0.01
"""Share of a number to which it is fitted together with another."""


class Found(NamedTuple):
    """A correction, fitted; or two together, with their names, words and remedies joined."""

    name: str
    value: Any
    """A setting, a factor, milliseconds, blocks, or a share; of two corrections, a list."""
    words: str
    remedy: str
    misfit: float
    """What is left with it."""


class _Tried(NamedTuple):
    suspect: Suspect
    x: Any
    belief: Belief
    found: Found

    @property
    def rank(self) -> float:
        """The misfit that counts in a comparison."""
        return self.found.misfit / (1.0 if self.suspect.setting else _CLEARLY)


def errors(pairs: Matched) -> dict[str, float]:
    """The logarithm of predicted by measured, of each statistic of each latency that has both."""
    found = {}
    for kind in FITTED:
        measured, predicted = (describe(side) for side in pairs.pairs(kind))
        for name in STATISTICS:
            one, other = measured[name], predicted[name]
            if one and other:
                found[f"{name}_{kind}_ms"] = log(other / one)
    return found


def misfit(pairs: Matched) -> float:
    """The mean size of `errors`."""
    return _mean({key: abs(error) for key, error in errors(pairs).items()})


def corrections(bench: Bench) -> list[Found]:
    """Corrections that leave less misfit than the replay has, the best first."""
    tried = sorted(_all(bench, Belief()), key=lambda each: each.rank)
    found = [each.found for each in tried if each.found.misfit < misfit(bench.base.pairs)]
    if tried and tried[0].found.misfit > _ENOUGH:
        both = _pair(bench, tried)
        most = _EXPLAINS if tried[0].found.misfit > EXPLAINED else _REFINES
        if both is not None and both.misfit < most * tried[0].found.misfit:
            found.insert(0, both)
    return found


def _all(bench: Bench, belief: Belief, without: str = "", runs: int = _MOST_RUNS) -> list[_Tried]:
    """Each suspect at its best, on top of what is believed, but for one."""
    others = [each for each in suspects(bench, belief) if each.name != without]
    found = (_at_best(bench, each, belief, runs) for each in others)
    return [each for each in found if each is not None]


def _at_best(
    bench: Bench, suspect: Suspect, belief: Belief, runs: int = _MOST_RUNS
) -> _Tried | None:
    if suspect.values:
        left, x = _choose(bench, suspect, belief)
    else:
        left, x = _search(bench, suspect, belief, runs)
    if x is None:
        return None
    value = suspect.value(x)
    found = Found(suspect.name, value, suspect.words(value), suspect.remedy, left)
    return _Tried(suspect, x, suspect.believe(belief, x), found)


def _pair(bench: Bench, tried: list[_Tried]) -> Found | None:
    """The two corrections that leave least: each setting, and the two best prices, with all others.

    A number that was fitted alone takes all blame. So less of it is tried as well, and the best
    pairs are fitted together.
    """
    settings = [each for each in tried if each.suspect.setting]
    prices = [each for each in tried if not each.suspect.setting][:2]
    # Of those that predict the same, one is enough.
    unlike = {each.found.misfit: each for each in reversed(settings)}.values()
    pairs: dict[frozenset[str], tuple[_Tried, _Tried]] = {}
    for each in [*unlike, *prices]:
        for one in _with_less(bench, each):
            for other in _all(bench, one.belief, one.suspect.name, _FEW_RUNS):
                names = frozenset((one.suspect.name, other.suspect.name))
                if names not in pairs or other.rank < pairs[names][1].rank:
                    pairs[names] = (one, other)
    likely = sorted(pairs.values(), key=lambda pair: pair[1].rank)[:_KEPT]
    together = (_together(bench, *pair) for pair in likely)
    best = min(together, key=lambda pair: pair[1].rank, default=None)
    if best is None:
        return None
    first, second = (each.found for each in best)
    return Found(
        f"{first.name} and {second.name}",
        [first.value, second.value],
        f"{first.words}, and {second.words}",
        f"{first.remedy}; {second.remedy}",
        second.misfit,
    )


def _with_less(bench: Bench, one: _Tried) -> list[_Tried]:
    """A correction, and some that change less, or what the measured times say."""
    suspect = one.suspect
    if suspect.values:
        return [one]
    said = suspect.starts(_balance(bench.base.pairs))[:1] if suspect.setting else ()
    return [one, *(_at(one, x) for x in {0.6 * one.x, *said} - {one.x})]


def _at(one: _Tried, x: float) -> _Tried:
    """A correction with another number; its misfit is not known."""
    value = one.suspect.value(x)
    found = one.found._replace(value=value, words=one.suspect.words(value))
    return _Tried(one.suspect, x, one.suspect.believe(Belief(), x), found)


def _together(bench: Bench, one: _Tried, other: _Tried) -> tuple[_Tried, _Tried]:
    """The pair with the number of the first that leaves least, if it has one."""
    best = (one, _at_best(bench, other.suspect, one.belief) or other)
    size = 0.0 if one.suspect.values else abs(one.x)
    step = size / 4
    while step > _FINEST * size:
        for x in (best[0].x - step, best[0].x + step):
            first = _at(one, min(max(x, one.suspect.low), one.suspect.high))
            second = _at_best(bench, other.suspect, first.belief, _FEW_RUNS)
            if second is not None and second.found.misfit < best[1].found.misfit:
                best = (first, second)
        step /= 2
    return best


def _choose(bench: Bench, suspect: Suspect, belief: Belief) -> tuple[float, Any]:
    """The least misfit of the values of a setting, and the value; None: no server takes any."""
    found = []
    for value in suspect.values:
        with suppress(ConfigError):  # as of a budget below max_num_seqs
            pairs = bench.replay(suspect.believe(belief, value)).pairs
            found.append((misfit(pairs), value))
    return min(found, key=itemgetter(0), default=(0.0, None))


def _search(
    bench: Bench, suspect: Suspect, belief: Belief, runs: int
) -> tuple[float, float | None]:
    """The number with which predictions are balanced, by the secant method; the least misfit
    counts. A setting is a staircase, so that its neighbours are tried as well."""
    tried: list[tuple[float, float, float]] = []

    def at(x: float) -> bool:
        x = min(max(x, suspect.low), suspect.high)
        if any(x == known for _, known, _ in tried):
            return False
        try:
            pairs = bench.replay(suspect.believe(belief, x)).pairs if x else base
        except ConfigError:  # as of a pool that is too small for a request
            return False
        tried.append((misfit(pairs), x, _balance(pairs)))
        return True

    base = bench.replay(belief).pairs
    at(0.0)
    for x in suspect.starts(tried[0][2]):
        at(x)
    tried.sort(reverse=True)  # The last two are the best.
    for _ in range(runs - 1):
        if len(tried) < 2:
            break
        (_, x0, before), (_, x, after) = tried[-2:]
        if abs(after) < _BALANCED or after == before:
            break
        if not at(x - after * (x - x0) / (after - before)):
            break
    for step in _STEPS if suspect.setting and runs > _FEW_RUNS and len(tried) > 1 else ():
        while True:
            best = min(tried)
            at(best[1] - step)
            at(best[1] + step)
            if min(tried) == best:
                break
    left, x, _ = min(tried)
    return left, x or None


def _balance(pairs: Matched) -> float:
    return _mean(errors(pairs))


def _mean(values: Mapping[str, float]) -> float:
    return fmean(values.values()) if values else 0.0
