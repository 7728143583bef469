"""A result for Python's prompt and notebooks: shown as a line or a table, drawn, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsim.run import result

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as Chart

    from kvsim.report.notebook import Compared


class Result(result.Result):
    """The result of a run: one row per step, one per request, and its provenance."""

    def __repr__(self) -> str:
        from kvsim.report.notebook import line

        return line(self.summary)

    def _repr_html_(self) -> str:
        from kvsim.report.notebook import overview

        return overview(self.summary)

    def plot(self, name: str | None = None) -> Chart:
        """A chart of the report, as a figure of plotly: `queues`, `gpu-blocks`, `dist-ttft`, ...

        By default, all charts over time, above each other. Raises `ConfigError` for an unknown
        name, and where plotly is not installed (`pip install 'kvsim[notebook]'`).
        """
        from kvsim.report.notebook import chart

        return chart(self.summary, self.requests, self.steps, name)

    def compare(self, other: Result, names: tuple[str, str] = ("this", "other")) -> Compared:
        """This result beside another one: figures, differences, and why they differ."""
        from kvsim.report.notebook import Compared

        return Compared((names[0], self), (names[1], other))
