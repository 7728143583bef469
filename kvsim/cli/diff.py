"""`diff`: explain why two runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.console import make_console, tell_written
from kvsim.cli.options import AsJson, OutDir
from kvsim.report.rich_tables import make_table

if TYPE_CHECKING:
    from rich.console import Console

    from kvsim.report.carriers import Carrier
    from kvsim.report.explanation import Explanation, Run


def diff(
    first: Annotated[
        str, typer.Argument(metavar="RUN_A", help="Folder written by `kvsim run --out`.")
    ],
    other: Annotated[str, typer.Argument(metavar="RUN_B", help="The run to compare with it.")],
    out: OutDir = None,
    as_json: AsJson = False,
) -> None:
    """Say why two runs of the same requests differ: which decision, which time, which requests."""
    from kvsim.report.explanation import explain, explanation_record
    from kvsim.writing import json_text, write_together

    runs = _read(first, other)
    explanation = explain(*runs)
    record = json_text(explanation_record(explanation))
    if as_json:
        print(record, end="")
    else:
        _render(explanation, make_console())
    if out is None:
        return
    from kvsim.pages.diff import build_diff

    write_together(out, {"diff.json": record, "diff.html": build_diff(*runs)})
    if not as_json:
        tell_written(out, "diff.html")


def _read(first: str, other: str) -> tuple[Run, Run]:
    """Both runs, named after their folders, or by their whole paths if the names are equal."""
    from kvsim.report.files import read_results

    names = [Path(folder).resolve().name for folder in (first, other)]
    if names[0] == names[1]:
        names = [first, other if other != first else f"{other} again"]
    return (names[0], *read_results(first)), (names[1], *read_results(other))


def _render(explanation: Explanation, console: Console) -> None:
    from rich.text import Text

    for sentence in explanation.headline:
        console.print(Text(sentence))
    for key, texts in explanation.settings:
        console.print(Text(f"{key}: {' → '.join(texts)}", style="dim"))
    console.print(Text("First divergent decision", style="bold"))
    for sentence in explanation.divergence_words:
        console.print(Text(f"  {sentence}"))
    if explanation.share is None:
        return
    _render_parts(explanation, console)
    share = explanation.share
    if share.changed:
        text = f"{share.half} of {share.total} requests carry half of all change in E2EL:"
        console.print(Text(text, style="bold"))
        for each in explanation.carriers[:5]:
            console.print(Text(f"  {_carried(each)}"))


def _render_parts(explanation: Explanation, console: Console) -> None:
    from kvsim.report.attribution import LABELS
    from kvsim.report.explanation import title_of
    from kvsim.report.numerals import signed

    falls = explanation.waterfalls
    table = make_table("difference", *map(title_of, falls), header_style="dim")
    changed = [dict(fall.changes()) for fall in falls]
    for part in LABELS:
        if any(part in changes for changes in changed):
            cells = [signed(float(c[part]) / 1e9, "s") if part in c else "" for c in changed]
            table.add_row(LABELS[part], *cells)
    table.add_section()
    table.add_row("together", *(signed(float(fall.difference) / 1e9, "s") for fall in falls))
    console.print(table)


def _carried(each: Carrier) -> str:
    from kvsim.report.attribution import LABELS
    from kvsim.report.numerals import signed

    change = signed((each.e2el_ns[1] - each.e2el_ns[0]) / 1e9, "s")
    return f"{each.id}: {change}, {signed(each.part_ns / 1e9, 's')} {LABELS[each.part]}"
