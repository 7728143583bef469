"""`experiment`: published figures beside what kvsim counts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.console import make_console, make_table
from kvsim.cli.options import Jobs
from kvsim.cli.progress import progress_bar
from kvsim.config import nearest
from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from kvsim.experiments import Run

Groups = dict[str, list["Run"]]

NAMES = ("watermark", "victims")


def experiment(
    name: Annotated[str, typer.Argument(metavar="NAME", help="watermark or victims.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 8,
    jobs: Jobs = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Write every run's figures here.")
    ] = None,
) -> None:
    """Repeat a published experiment without a GPU and show how far off it comes out.

    watermark: preemptions against blocks kept free (vLLM PR #44594); victims: recompute tax against
    who gives way (vLLM RFC #54644).
    """
    if name not in NAMES:
        near = nearest(name, NAMES)
        raise ConfigError(f"experiment: no {name!r};{near} choose from {', '.join(NAMES)}")
    from kvsim import experiments

    watermark = name == "watermark"
    settings = len(experiments.WATERMARKS)
    run = experiments.run_watermarks
    if not watermark:
        settings = len(experiments.TAXES) * len(experiments.ORDER)
        run = experiments.run_victims
    with progress_bar(seeds * settings, "runs", quiet_below=2) as progress:
        runs = list(run(seeds, jobs=jobs, progress=progress))
    groups = experiments.group(runs)
    console = make_console()
    for table in [_watermarks(groups)] if watermark else _victims(groups):
        console.print(table)
    if out is not None:
        from kvsim.writing import write_text

        text = json.dumps({"experiment": name, "runs": experiments.record(runs)}, indent=1)
        path = write_text(Path(out) / f"{name}.json", text + "\n")
        console.print(f"every run: {path}", highlight=False)


def _watermarks(groups: Groups) -> Table:
    from kvsim.experiments import WATERMARKS

    table = make_table(
        "watermark",
        "published",
        "measured",
        "deviation",
        "preempted requests",
        "tax %",
        "output tokens/s",
        title="Preemptions by watermark (vLLM PR #44594)",
    )
    for name, published in WATERMARKS.items():
        runs = groups[name]
        counts = [run.preemptions for run in runs]
        table.add_row(
            name,
            f"{published:,}",
            _spread(counts),
            f"{mean(counts) / published - 1:+.0%}",
            _spread(run.preempted_requests for run in runs),
            _spread((100 * run.tax for run in runs), 1),
            _spread(run.output_throughput for run in runs),
        )
    return table


def _victims(groups: Groups) -> list[Table]:
    return [_taxes(groups), _order(groups)]


def _taxes(groups: Groups) -> Table:
    from kvsim.experiments import CUTS, TAXES, cuts, setting_of

    table = make_table(
        "blocks",
        "tax %: published",
        "measured",
        "points",
        "cut %: published",
        "measured",
        title="Recompute tax where the tail gives way, and what least computed first saves"
        " (vLLM RFC #54644)",
    )
    for blocks, published in TAXES.items():
        taxes = [100 * run.tax for run in groups[setting_of(blocks, "tail")]]
        cells = [f"{blocks:,}", f"{100 * published:.1f}", _spread(taxes, 1)]
        cells.append(f"{mean(taxes) - 100 * published:+.1f}")
        if blocks in CUTS:
            cells.append(f"{100 * CUTS[blocks]:.0f}")
            cells.append(_spread(100 * cut for cut in cuts(groups, blocks)))
        table.add_row(*cells)
    return table


def _order(groups: Groups) -> Table:
    from kvsim.experiments import CUTS, ORDER, ordered, setting_of

    title = "Wasted tokens by victim; published order: " + " < ".join(ORDER)
    table = make_table("blocks", *ORDER, "seeds in this order", title=title)
    for blocks in CUTS:
        runs = [groups[setting_of(blocks, victim)] for victim in ORDER]
        wasted = [_spread(run.wasted_tokens for run in each) for each in runs]
        table.add_row(f"{blocks:,}", *wasted, f"{ordered(groups, blocks)} of {len(runs[0])}")
    return table


def _spread(values: Iterable[float], digits: int = 0) -> str:
    """Mean ± standard deviation of the runs; the mean alone of one run."""
    figures = list(values)
    if not figures:
        return "–"
    text = f"{mean(figures):,.{digits}f}"
    return text if len(figures) < 2 else f"{text} ± {stdev(figures):,.{digits}f}"
