"""`check`: a measured run, replayed: predicted beside measured, and what to correct first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from kvsim.cli.console import command_line, note, progress_bar, tell_written
from kvsim.cli.fitting import FIRST, show_fit, with_fitted
from kvsim.cli.options import AsJson, ConfigFile, MeasuredFile, OutDir, TraceForm, takes_bundles
from kvsim.cli.server import ServerOptions, SettingOptions
from kvsim.report.screen import make_console, make_table, print_remarks

if TYPE_CHECKING:
    from kvsim.settings.server import ServerWord
    from kvsim.workload.trace import Trace

BEYOND = 3
"""Exit code where a figure is farther off than the tolerance."""
RECORD, PAGE = "check.json", "check.html"

Tolerance = Annotated[
    float | None,
    Option(min=0, metavar="SHARE", help="Exit with code 3 if a figure is farther off."),
]
Corrections = Annotated[
    bool, Option("--corrections/--no-corrections", help="Try what would explain the rest.")
]
Fit = Annotated[
    str | None,
    Option(
        metavar="FILE",
        help="First fit constants of the machine to the run, and write the profile there.",
    ),
]


@takes_bundles
def check(
    *,
    result: Annotated[
        str, Argument(metavar="RESULT", help="Of vllm bench serve --save-detailed, or a trace.")
    ],
    measured: MeasuredFile = None,
    tolerance: Tolerance = None,
    corrections: Corrections = True,
    fit: Fit = None,
    fit_first: Annotated[
        int, Option(min=1, metavar="N", help="Requests that --fit takes; the others judge.")
    ] = FIRST,
    config: ConfigFile = None,
    form: TraceForm,
    out: OutDir = None,
    as_json: AsJson = False,
    server: ServerOptions,
    settings: SettingOptions,
) -> None:
    """Replay a measured run, show predicted beside measured, and say what to correct first.

    The result of a benchmark is a trace and the measured answer at once.
    """
    from kvsim.against.check import check as check_run
    from kvsim.workload.formats.table import join_measured
    from kvsim.writing import json_text, write_together

    trace = form.open(result)
    if measured is not None:
        read = len(trace.notes)
        trace = join_measured(trace, measured)
        note(*trace.notes[read:])
    loaded = settings.load(config, _with_model(server.word(), trace))
    if fit is not None:
        loaded, fitted = with_fitted(trace, loaded, fit_first, fit)
        if not as_json:
            show_fit(fitted)
    with progress_bar("checking") as done:
        record = check_run(
            trace,
            loaded,
            tolerance=tolerance,
            correct=corrections,
            command=command_line(),
            done=done,
        )
    text = json_text(record)
    if as_json:
        print(text, end="")
    else:
        _show(record)
    if out is not None:
        from kvsim.against.check import build_check

        write_together(out, {RECORD: text, PAGE: build_check(record)})
        tell_written(out, PAGE)
    if not record["passed"]:
        raise typer.Exit(BEYOND)


def _with_model(word: ServerWord, trace: Trace) -> ServerWord:
    """What the server says, with the model that the result names beneath it."""
    from msgspec.structs import replace

    names = {row.model for row in trace.rows}
    name = names.pop() if len(names) == 1 else None
    if name is None or "model" in word.settings:
        return word
    return replace(word, settings={"model": name, **word.settings})


def _show(record: dict[str, Any]) -> None:
    from kvsim.against.check import correction_rows, figure_rows, part_rows

    console = make_console()
    print_remarks(console, ((each["text"], each["tone"]) for each in record["verdict"]))
    for head, rows in (
        (("", "measured", "predicted", "error"), figure_rows(record)),
        (("mean", "measured", "predicted", "difference"), part_rows(record)),
        (("correction", "mean error left"), [row[::2] for row in correction_rows(record)]),
    ):
        if rows:
            console.print(make_table(*head, rows=rows))
