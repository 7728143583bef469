"""`diff`: explain why two runs differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from kvsim.cli.console import make_console, tell_written
from kvsim.cli.options import AsJson, OutDir
from kvsim.report.rich_tables import make_table

if TYPE_CHECKING:
    from rich.console import Console

    from kvsim.report.carriers import Carrier
    from kvsim.report.explanation import Explanation


def diff(
    first: Annotated[str, Argument(metavar="RUN_A", help="Folder written by `kvsim run --out`.")],
    other: Annotated[str, Argument(metavar="RUN_B", help="The run to compare with it.")],
    out: OutDir = None,
    as_json: AsJson = False,
) -> None:
    """Say why two runs of the same requests differ: which decision, which time, which requests."""
    from kvsim.report.explanation import explanation_record
    from kvsim.report.files import is_fleet
    from kvsim.writing import json_text, write_together

    several = is_fleet(first) and is_fleet(other)
    explanation, page, replicas = (_of_fleets if several else _of_runs)(first, other)
    record = json_text(explanation_record(explanation))
    if as_json:
        print(record, end="")
    else:
        _render(explanation, make_console(), replicas)
    if out is None:
        return
    write_together(out, {"diff.json": record, "diff.html": page()})
    if not as_json:
        tell_written(out, "diff.html")


Explained = tuple["Explanation", Callable[[], str], list[list[str]]]
"""An explanation, what makes its page, and rows of replicas."""


def _of_runs(first: str, other: str) -> Explained:
    from kvsim.report.explanation import explain
    from kvsim.report.files import read_results

    names = _names(first, other)
    runs = (names[0], *read_results(first)), (names[1], *read_results(other))

    def page() -> str:
        from kvsim.pages.diff import build_diff

        return build_diff(*runs)

    return explain(*runs), page, []


def _of_fleets(first: str, other: str) -> Explained:
    from kvsim.fleet.difference import explain_fleets, replica_differences
    from kvsim.fleet.folder import read_fleet

    names = _names(first, other)
    one, two = read_fleet(first), read_fleet(other)
    named = (names[0], one), (names[1], two)

    def page() -> str:
        from kvsim.pages.fleet_diff import build_fleet_diff

        return build_fleet_diff(*named)

    return explain_fleets(*named), page, replica_differences(one, two)


def _names(first: str, other: str) -> tuple[str, str]:
    """The names of both folders, or their whole paths if the names are equal."""
    names = Path(first).resolve().name, Path(other).resolve().name
    return names if names[0] != names[1] else (first, other if other != first else f"{other} again")


def _render(explanation: Explanation, console: Console, replicas: list[list[str]]) -> None:
    from rich.text import Text

    for sentence in explanation.headline:
        console.print(Text(sentence))
    for key, texts in explanation.settings:
        console.print(Text(f"{key}: {' → '.join(texts)}", style="dim"))
    console.print(Text("First divergent decision", style="bold"))
    for sentence in explanation.divergence_words:
        console.print(Text(f"  {sentence}"))
    if replicas:
        from kvsim.fleet.difference import REPLICA_DIFF_HEAD

        console.print(make_table(*REPLICA_DIFF_HEAD, rows=replicas, header_style="dim"))
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
