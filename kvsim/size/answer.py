"""Says what a search found, how sure that is, and what is near."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvsim.certainty.estimates import paired
from kvsim.report.metrics import Metric
from kvsim.report.numerals import count, percent, plural, show
from kvsim.report.wording import Remark
from kvsim.size.cliffs import Cliff, find_cliff, slope
from kvsim.size.knobs import Knob
from kvsim.size.search import Laboratory, boundary, find_best, find_boundary, sharpen
from kvsim.sweep.choose import Configuration

LEVEL = 0.05
"""Chance of error of what is said with certainty."""
_WINDOW = 0.25
"""Share of the answer within which values are its neighbourhood."""
_SERVED = 0.9
"""Below this share of the offered rate, the queue was growing until the end."""


class Answer(NamedTuple):
    """What a search found."""

    knob: Knob
    value: float | None
    """None: nothing that was tried keeps the objectives, or ends at all."""
    meets: bool
    cliffs: tuple[Cliff, ...]
    as_good: tuple[float, ...]
    """For a `best` knob, values that cannot be told from the best."""
    verdict: tuple[Remark, ...]


def answer(lab: Laboratory, varies: Sequence[str]) -> Answer:
    """Search, look for cliffs and put it into words; `varies`: what differs from seed to seed."""
    knob = lab.knob
    value = find_best(lab) if knob.goal == "best" else find_boundary(lab)
    metrics = [objective.metric for objective in lab.objectives.each]
    for metric in metrics:
        sharpen(lab, metric)
    if knob.goal != "best" and value is not None and boundary(lab)[0] != value:
        value = find_boundary(lab)
    cliffs = tuple(
        cliff for metric in metrics if (cliff := find_cliff(lab.ascending, metric)) is not None
    )
    as_good = () if value is None or knob.goal != "best" else _as_good(lab, value)
    meets = value is not None and lab.tried[value].meets
    draft = Answer(knob, value, meets, cliffs, as_good, ())
    remarks = (_found(lab, draft), *_doubts(lab, draft), *_cliff_remarks(draft))
    return draft._replace(verdict=(*remarks, _certainty(lab, varies)))


def neighbourhood(lab: Laboratory, value: float | None) -> list[tuple[float, Configuration]]:
    """The tried values near an answer, at most about a dozen; without one, all, thinned out."""
    tried = lab.ascending
    if value is None or lab.knob.goal == "best":
        return tried[:: max(1, len(tried) // 12)] if value is None else tried
    near = [each for each in tried if abs(each[0] - value) <= _WINDOW * abs(value)]
    wanted = [value * (1 + share / 100) for share in (-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20)]
    grain = [v for v, _ in near if v != value]
    beside = [max((v for v in grain if v < value), default=value)]
    beside.append(min((v for v in grain if v > value), default=value))
    picked = {min(near, key=lambda each: abs(each[0] - w))[0] for w in (*wanted, *beside)}
    return [each for each in near if each[0] in picked]


def written(knob: Knob, value: float) -> str:
    """A value of the knob in words."""
    if knob.unit == "requests/s":
        return f"{value:g} requests/s"
    if knob.unit == "share":
        return f"{value:g}"
    return f"{count(value)} {knob.unit}".strip()


def _found(lab: Laboratory, draft: Answer) -> Remark:
    knob, bounds = lab.knob, " and ".join(map(str, lab.objectives.each))
    if draft.value is None or not draft.meets:
        tried = sorted(lab.tried)
        text = f"No {knob.key} from {tried[0]:g} to {tried[-1]:g} keeps {bounds}."
        return Remark(text + _nearest(lab), "bad")
    said = {"least": "The least", "most": "The highest", "best": "Farthest from the limits"}
    kept = f"that keeps {bounds}" if knob.goal != "best" else f"of {bounds}"
    order = f"{knob.key} {kept}" if knob.goal != "best" else f"{kept} is {knob.key}"
    text = f"{said[knob.goal]} {order}: {written(knob, draft.value)}."
    figures = _figures(lab, draft.value)
    return Remark(f"{text} {figures}")


def _figures(lab: Laboratory, value: float) -> str:
    configuration = lab.tried[value]
    listed = (
        f"{o.metric.label} {show(configuration.figures.get(o.metric.key), o.metric.unit)}"
        for o in lab.objectives.each
    )
    return f"There {', '.join(listed)}{' on average' if len(lab.seeds) > 1 else ''}."


def _nearest(lab: Laboratory) -> str:
    value, best = min(lab.tried.items(), key=lambda each: each[1].load)
    if best.load == float("inf"):
        reason = best.reason or "requests were rejected"
        return f" At {value:g}: {reason}"
    return f" Nearest is {written(lab.knob, value)}, with {best.load:.3g} times a limit on a seed."


def _doubts(lab: Laboratory, draft: Answer) -> list[Remark]:
    """What makes an answer less than it seems."""
    knob, value, remarks = draft.knob, draft.value, list[Remark]()
    if value is None or not draft.meets:
        return remarks
    if knob.goal == "best":
        if draft.as_good:
            stretches = _stretches(lab, (*draft.as_good, value))
            remarks.append(Remark(f"Not to be told apart on these seeds: {stretches}."))
        return remarks
    bad = boundary(lab)[1]
    if bad is None:
        text = f"Every value that was tried keeps them, down to {value:g}"
        text = text.replace("down", "up") if knob.goal == "most" else text
        remarks.append(Remark(f"{text}: the limit lies beyond.", "warning"))
    else:
        met, seeds = lab.tried[bad].met, len(lab.seeds)
        text = f"With {written(knob, bad)} they hold on {met} of {plural(seeds, 'seed')}."
        remarks.append(Remark(text if seeds > 1 else f"With {written(knob, bad)} they do not."))
    lucky = [
        v
        for v, each in lab.ascending
        if each.meets and bad is not None and (v > bad if knob.goal == "most" else v < bad)
    ]
    if lucky:
        values = ", ".join(f"{v:g}" for v in lucky[:6])
        text = f"By luck they hold at {values}, too, but not everywhere between."
        remarks.append(Remark(text, "warning"))
    return remarks + _growing(lab, value)


def _stretches(lab: Laboratory, values: Sequence[float]) -> str:
    """Values as few stretches of what was tried: `0.005 to 0.05, 0.1`."""
    stretches: list[list[float]] = [[]]
    for value in sorted(lab.tried):
        if value in values:
            stretches[-1].append(value)
        elif stretches[-1]:
            stretches.append([])
    ends = ((each[0], each[-1]) for each in stretches if each)
    return ", ".join(f"{a:g}" if a == b else f"{a:g} to {b:g}" for a, b in ends)


def _growing(lab: Laboratory, value: float) -> list[Remark]:
    """A queue that grows until the trace ends says nothing of a longer load."""
    if lab.knob.key != "request_rate":
        return []
    served = lab.tried[value].figures.get("request_throughput", value) / value
    if served >= _SERVED:
        return []
    text = (
        f"At this rate {percent(served)} of the load is served by the time it has been sent: the"
        " queue grows, and a longer trace would keep the objectives at a lower rate only."
    )
    return [Remark(text, "warning")]


def _cliff_remarks(draft: Answer) -> list[Remark]:
    remarks = []
    for cliff in draft.cliffs:
        unit = cliff.metric.unit
        text = (
            f"Cliff: {_moved(cliff.step)} ({written(draft.knob, cliff.beyond)} instead of"
            f" {written(draft.knob, cliff.safe)}) gives {_times(cliff)} the {cliff.metric.label}:"
            f" {show(cliff.figure_beyond, unit)} after {show(cliff.figure, unit)}."
        )
        if draft.value is not None and draft.meets:
            text += f" {_standing(cliff, draft.value)}"
        remarks.append(Remark(text, "warning"))
    return remarks


def _standing(cliff: Cliff, value: float) -> str:
    away = cliff.distance(value)
    if (cliff.beyond - value) * (cliff.safe - value) <= 0:
        return "The answer stands on its edge: leave a margin."
    return f"The answer is {percent(abs(away))} away from its edge."


def _moved(step: float) -> str:
    return f"{percent(abs(step))} {'more' if step > 0 else 'less'}"


def _times(cliff: Cliff) -> str:
    rises = cliff.figure_beyond > cliff.figure
    return f"{cliff.times:.1f} times" if rises else f"1/{cliff.times:.1f} of"


def _as_good(lab: Laboratory, value: float) -> tuple[float, ...]:
    """Finished values whose paired difference to the best is not told apart, ascending."""
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


def _certainty(lab: Laboratory, varies: Sequence[str]) -> Remark:
    seeds = len(lab.seeds)
    if not varies:
        return Remark(
            "One run says it all for this trace as it is: nothing is drawn at random. Give"
            " --request-rate to see other arrivals, too."
        )
    if seeds == 1:
        return Remark("One seed: chance is not known; give --seeds.", "warning")
    at_least = LEVEL ** (1 / seeds)
    return Remark(
        f"Every value met the same {count(seeds)} seeds ({', '.join(varies)} differ). What holds on"
        f" all of them holds on at least {percent(at_least)} of seeds, at"
        f" {percent(1 - LEVEL)} confidence."
    )


def slopes(lab: Laboratory, value: float) -> list[tuple[Metric, float]]:
    """How steep each bounded figure is at the answer, where that is known."""
    found = [(o.metric, slope(lab.ascending, value, o.metric)) for o in lab.objectives.each]
    return [(metric, each) for metric, each in found if each is not None]
