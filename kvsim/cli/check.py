"""`check`: a measured run, replayed: predicted beside measured, and what to correct first."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.console import make_console
from kvsim.cli.fitting import FIRST, show_fit, with_fitted
from kvsim.cli.flags import settings, with_run_flags
from kvsim.cli.options import (
    Assignments,
    ConfigFile,
    StartupLog,
    TraceColumns,
    TraceFormat,
    VllmCommand,
    VllmFile,
    open_noted,
)
from kvsim.cli.progress import spinner
from kvsim.cli.server import load_over, server_word
from kvsim.report.rich_tables import make_table

if TYPE_CHECKING:
    from kvsim.server import ServerWord
    from kvsim.workload.trace import Trace

BEYOND = 3
"""Exit code where a figure is farther off than the tolerance."""
RECORD, PAGE = "check.json", "check.html"
STYLES = {"plain": "", "warning": "yellow", "bad": "bold red"}

Measured = Annotated[
    str | None,
    typer.Option(
        "--measured",
        metavar="FILE",
        help="Measured times by id: JSON Lines, CSV or Parquet with id, ttft_s, e2e_s, queue_s.",
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(min=0, metavar="SHARE", help="Exit with code 3 if a figure is farther off."),
]
Corrections = Annotated[
    bool, typer.Option("--corrections/--no-corrections", help="Try what would explain the rest.")
]
Fit = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="First fit constants of the machine to the run, and write the profile there.",
    ),
]


@with_run_flags
def check(
    result: Annotated[
        str,
        typer.Argument(metavar="RESULT", help="Of vllm bench serve --save-detailed, or a trace."),
    ],
    measured: Measured = None,
    tolerance: Tolerance = None,
    corrections: Corrections = True,
    fit: Fit = None,
    fit_first: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests that --fit takes; the others judge.")
    ] = FIRST,
    config: ConfigFile = None,
    trace_format: TraceFormat = None,
    columns: TraceColumns = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Write check.json and check.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    startup_log: StartupLog = None,
    vllm: VllmCommand = None,
    vllm_file: VllmFile = None,
    assignments: Assignments = None,
    **flags: Any,
) -> None:
    """Replay a measured run, show predicted beside measured, and say what to correct first.

    The result of a benchmark is a trace and the measured answer at once.
    """
    from kvsim.check.check import check as check_run

    trace = open_noted(result, trace_format, columns)
    if measured is not None:
        trace = _joined(trace, measured)
    word = _with_model(server_word(startup_log, vllm, vllm_file), trace)
    loaded = load_over(word, config, settings(flags), assignments or ())
    if fit is not None:
        loaded, fitted = with_fitted(trace, loaded, fit_first, fit)
        if not as_json:
            show_fit(fitted)
    command = shlex.join(["kvsim", *sys.argv[1:]])
    with spinner("checking") as done:
        record = check_run(
            trace, loaded, tolerance=tolerance, correct=corrections, command=command, done=done
        )
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    if as_json:
        print(text)
    else:
        _show(record)
    if out is not None:
        _write(out, record, text, quiet=as_json)
    if not record["passed"]:
        raise typer.Exit(BEYOND)


def _joined(trace: Trace, path: str) -> Trace:
    from kvsim.workload.measured import join_measured

    joined = join_measured(trace, path)
    for note in joined.notes[len(trace.notes) :]:
        print(f"note: {note}", file=sys.stderr)
    return joined


def _with_model(word: ServerWord, trace: Trace) -> ServerWord:
    """What the server says, with the model that the result names beneath it."""
    from dataclasses import replace

    names = {row.model for row in trace.rows}
    name = names.pop() if len(names) == 1 else None
    if name is None or "model" in word.settings:
        return word
    return replace(word, settings={"model": name, **word.settings})


def _show(record: dict[str, Any]) -> None:
    from kvsim.check.wording import correction_rows, figure_rows, part_rows

    console = make_console()
    for remark in record["verdict"]:
        console.print(remark["text"], highlight=False, style=STYLES[remark["tone"]])
    for head, rows in (
        (("", "measured", "predicted", "error"), figure_rows(record)),
        (("mean", "measured", "predicted", "difference"), part_rows(record)),
        (("correction", "mean error left"), [row[::2] for row in correction_rows(record)]),
    ):
        if rows:
            table = make_table(*head, header_style="dim")
            for row in rows:
                table.add_row(*row)
            console.print(table)


def _write(out: str, record: dict[str, Any], text: str, *, quiet: bool) -> None:
    from kvsim.check.wording import correction_rows, figure_rows, part_rows
    from kvsim.pages.check import build_check
    from kvsim.writing import write_together

    rows = figure_rows(record), part_rows(record), correction_rows(record)
    write_together(out, {RECORD: text + "\n", PAGE: build_check(record, *rows)})
    if not quiet:
        make_console().print(f"written to {out}: open {Path(out) / PAGE}", highlight=False)
