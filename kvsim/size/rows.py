"""The cells of a table of values around an answer."""

from __future__ import annotations

from kvsim.report.metrics import Metric
from kvsim.report.numerals import MISSING, percent, show
from kvsim.size.search import Laboratory

HEAD = ("from the answer", "seeds that keep all")
"""Columns between the knob and the figures."""


def row(lab: Laboratory, answer: float | None, value: float) -> list[str]:
    """One value: the knob, its distance, the seeds, the figures (means over the seeds)."""
    configuration = lab.tried[value]
    metrics = lab.objectives.metrics
    if configuration.outcome != "finished":
        figures = [configuration.outcome.replace("-", " "), *[MISSING] * (len(metrics) - 1)]
    else:
        figures = [_figure(lab, metric, answer, value) for metric in metrics]
    return [
        f"{value:g}" if lab.knob.unit == "share" else f"{value:,}",
        _distance(answer, value),
        f"{configuration.met} of {len(lab.seeds)}",
        *figures,
    ]


def _distance(answer: float | None, value: float) -> str:
    if answer is None or not answer:
        return ""
    if value == answer:
        return "answer"
    share = abs(value / answer - 1)
    text = percent(share) if share >= 0.001 else f"{100 * share:.1g} %"
    return f"{'+' if value > answer else '−'}{text}"


def _figure(lab: Laboratory, metric: Metric, answer: float | None, value: float) -> str:
    """A figure; if it is far from that of the answer, also how many times that it is."""
    figure = lab.tried[value].figures.get(metric.key)
    text = show(figure, metric.unit)
    own = None if answer is None else lab.tried[answer].figures.get(metric.key)
    if figure is None or not own or value == answer:
        return text
    times = figure / own
    return text if 0.67 < times < 1.5 else f"{text} (×{times:.{1 if times < 100 else 0}f})"
