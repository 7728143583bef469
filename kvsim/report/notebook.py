"""Shows results in a notebook: in one line, as a table, as charts, side by side."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.errors import ConfigError, check_choice
from kvsim.report.compare import Named, Summaries, change_words, compare_table, explain, value_words
from kvsim.report.pages.figures import Figure, coloured
from kvsim.report.pages.html import Html, element, join, table
from kvsim.report.pages.latencies import distribution_figures
from kvsim.report.pages.over_time import time_figures
from kvsim.report.pages.view import look_at
from kvsim.report.screen import make_console
from kvsim.report.terminal import render_comparison
from kvsim.report.wording import fate, latency_rows, subject, verdict
from kvsim.results.metrics import HEADLINES, NAMED, value
from kvsim.results.numerals import show

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure as Chart

_IN_A_LINE = ("p99_ttft_ms", "p99_tpot_ms", "output_throughput")
_STATISTICS = ("mean", "p50", "p90", "p99")
_GAP_PX, _MARGIN_PX = 46, 80
_NO_ARROW = {"showarrow": False}


class Compared(NamedTuple):
    """Two results side by side."""

    first: Named
    other: Named

    @property
    def summaries(self) -> Summaries:
        """Both names and summaries."""
        return [(name, run.summary) for name, run in self]

    def frame(self) -> pd.DataFrame:
        """Every figure that is not 0 in both: its unit, both values, the difference, the share."""
        import pandas as pd

        rows = compare_table(self.summaries)
        columns = {
            "unit": [row.metric.unit for row in rows],
            self.first[0]: [row.values[0] for row in rows],
            self.other[0]: [row.values[1] for row in rows],
            "difference": [row.difference(0) for row in rows],
            "relative": [row.relative(0) for row in rows],
        }
        return pd.DataFrame(columns, index=[row.metric.key for row in rows])

    @property
    def why(self) -> list[str]:
        """What made the difference, in sentences."""
        return explain(self.first, self.other).headline

    def __repr__(self) -> str:
        written = io.StringIO()
        console = make_console(written, width=100)
        render_comparison(self.summaries, console)
        for sentence in self.why:
            console.print(sentence)
        return written.getvalue()

    def _repr_html_(self) -> str:
        shown = [
            [row.metric.label, *(value_words(row, i) for i in (0, 1)), change_words(row, 0)]
            for row in compare_table(self.summaries)
            if row.metric.key in HEADLINES
        ]
        sentences = (element("p", sentence) for sentence in self.why)
        head = ["", self.first[0], self.other[0], "difference"]
        return join((*sentences, table(head, shown)))


def line(summary: Mapping[str, Any]) -> str:
    """A result in one line: what was simulated, what became of the requests, three figures."""
    figures = (
        f"{NAMED[key].label} {show(value(summary, key), NAMED[key].unit)}" for key in _IN_A_LINE
    )
    said = f"{subject(summary['meta'])}; {fate(summary).text} {', '.join(figures)}"
    return f"<kvsim.Result: {said}>".replace("\u00a0", " ")


def overview(summary: Mapping[str, Any]) -> Html:
    """A result as HTML: the verdict in sentences, and the latencies."""
    remarks = (element("p", remark.text) for remark in verdict(summary))
    latencies = table(["", *_STATISTICS], latency_rows(summary, _STATISTICS))
    return join((element("strong", subject(summary["meta"])), *remarks, latencies))


def chart(
    summary: Mapping[str, Any],
    requests: Mapping[str, Any],
    steps: Mapping[str, Any],
    name: str | None = None,
) -> Chart:
    """A chart of the report by its name, or all those over time above each other.

    Raises `ConfigError` for an unknown name, and where plotly is not installed.
    """
    try:
        from plotly.graph_objects import Figure as Chart
    except ImportError:
        raise ConfigError("plot: plotly is not installed; pip install 'kvsim[notebook]'") from None
    run = look_at(summary, requests, steps)
    drawn = (*time_figures(run), *distribution_figures([("requests", "used", run.durations)]))
    figures = {figure.id: figure for figure in drawn}
    if name is not None:
        check_choice("plot", name, figures)
    shown = [f for f in figures.values() if f.time] if name is None else [figures[name]]
    data, layout = _stacked(shown)
    return Chart(data=coloured(data), layout=coloured(layout))


def _stacked(figures: Sequence[Figure]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Traces and layout of figures above each other, with one x axis for all of them."""
    height = sum(figure.height + _GAP_PX for figure in figures)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    shapes: list[dict[str, Any]] = []
    titles: list[dict[str, Any]] = []
    bottom, axes = 1.0, 0
    for figure in figures:
        high = bottom - _GAP_PX / height
        bottom = max(high - figure.height / height, 0.0)  # Sums of floats may end below it.
        own: dict[str, str] = {}
        for key, look in figure.layout.items():
            if key.startswith("yaxis"):
                axes += 1
                own[key.replace("axis", "")] = f"y{axes}"
                ends = [bottom + (high - bottom) * end for end in look.get("domain", (0, 1))]
                layout[f"yaxis{axes}"] = {**look, "domain": ends}
            else:
                layout[key] = look
        group = {"legendgroup": figure.id, "legendgrouptitle": {"text": figure.title}}
        for trace in figure.data:
            named = {"showlegend": bool(trace.get("name"))}
            data.append({**named, **trace, **group, "yaxis": own[trace.get("yaxis", "y")]})
        shapes += [{"yref": own["y"], **each} for each in figure.layout.get("shapes", ())]
        titles.append({"text": figure.title, "y": high})
    place = {"x": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    layout |= {"shapes": shapes, "annotations": [{**t, **place, **_NO_ARROW} for t in titles]}
    layout["xaxis"] = {**layout.get("xaxis", {}), "anchor": "free", "position": 0}
    return data, {**layout, "height": height + _MARGIN_PX, "showlegend": True}
