"""Places the values of settings and figures on axes, from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvsim.report.pages.figures import WIDE
from kvsim.results.metrics import Metric
from kvsim.results.numerals import number, show
from kvsim.search.sweep.choose import Configuration, value_words

_MOST_TICKS = 12
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Scale(NamedTuple):
    """An axis of numbers or of words."""

    title: str
    shares: tuple[float | None, ...]
    """The place of each configuration from 0 to 1; None if it has none."""
    texts: tuple[str, ...]
    """The value of each configuration, in words."""
    ticks: tuple[tuple[float, str], ...]
    logarithmic: bool = False
    limit: float | None = None
    """Place of an objective's limit, if it is on the axis."""


def setting_scale(key: str, configurations: Sequence[Configuration]) -> Scale:
    """The axis of a setting: its values if they are few or words, else a scale of numbers."""
    values = [configuration.settings[key] for configuration in configurations]
    texts = tuple(map(value_words, values))
    distinct = ordered(values)
    if len(distinct) > _MOST_TICKS and all(map(is_number, distinct)):
        return _numbers(key, [float(value) for value in values], texts, number)
    span = max(len(distinct) - 1, 1)
    places = {value_words(value): rank / span for rank, value in enumerate(distinct)}
    ticks = tuple((place, text) for text, place in places.items())
    return Scale(key, tuple(places[text] for text in texts), texts, ticks)


def figure_scale(
    metric: Metric, configurations: Sequence[Configuration], limit: float | None = None
) -> Scale:
    """The axis of a figure."""
    values = [configuration.figures.get(metric.key) for configuration in configurations]
    texts = tuple(show(value, metric.unit) for value in values)
    return _numbers(metric.label, values, texts, lambda v: show(v, metric.unit), limit)


def ordered(values: Sequence[Any]) -> list[Any]:
    """Distinct values: numbers by size, others in order of appearance."""
    distinct = list({value_words(value): value for value in values}.values())
    return sorted(distinct) if all(map(is_number, distinct)) else distinct


def is_number(value: Any) -> bool:
    """Whether a value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(
    title: str,
    values: Sequence[float | None],
    texts: tuple[str, ...],
    write: Callable[[float], str],
    limit: float | None = None,
) -> Scale:
    there = [value for value in values if value is not None]
    if not there:
        return Scale(title, tuple(None for _ in values), texts, ())
    low, high = min(there), max(there)
    logarithmic = low > 0 and high / low >= WIDE

    def share(value: float) -> float:
        if high == low:
            return 0.5
        if logarithmic:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def value_at(place: float) -> float:
        return low * (high / low) ** place if logarithmic else low + place * (high - low)

    places = [0.5] if high == low else _TICKS
    ticks = tuple((place, write(value_at(place))) for place in places)
    within = limit is not None and low < limit < high
    return Scale(
        title,
        tuple(None if value is None else share(value) for value in values),
        texts,
        ticks,
        logarithmic,
        share(limit) if within and limit is not None else None,
    )
