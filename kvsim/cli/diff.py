"""`diff`: explain why two runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from kvsim.cli.console import tell_written
from kvsim.cli.kinds import of_engines, of_fleets
from kvsim.cli.options import AsJson, OutDir
from kvsim.errors import OutputError
from kvsim.report.screen import make_console, make_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from kvsim.explain.attribution import Carrier, Waterfall
    from kvsim.fleet.folder import FleetRun
    from kvsim.report.explanation import Explanation

_REMEDY = "Give two runs of the same trace."


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

    fleets = is_fleet(first) and is_fleet(other)
    kind = of_fleets() if fleets else of_engines()
    runs = kind.read(first), kind.read(other)
    one, two = zip(_names(first, other), runs, strict=True)
    explanation = kind.explain(one, two)
    if explanation.pairs is None:
        raise OutputError(f"{other}: {explanation.headline[0]} {_REMEDY}")
    traces = [(run.summary["meta"].get("trace") or {}).get("sha256") for run in runs]
    if traces[0] != traces[1]:
        raise OutputError(f"{other}: its trace has not the content of that of {first}. {_REMEDY}")
    record = json_text(explanation_record(explanation))
    if as_json:
        print(record, end="")
    else:
        _render(explanation, make_console(), _replicas(*runs) if fleets else None)
    if out is None:
        return
    write_together(out, {"diff.json": record, "diff.html": kind.diff_page(one, two)})
    tell_written(out, "diff.html")


def _names(first: str, other: str) -> tuple[str, str]:
    """The names of both folders, or their whole paths if the names are equal."""
    names = Path(first).resolve().name, Path(other).resolve().name
    return names if names[0] != names[1] else (first, other if other != first else f"{other} again")


def _render(explanation: Explanation, console: Console, replicas: Table | None) -> None:
    from kvsim.results.numerals import count, plural

    for sentence in explanation.headline:
        console.print(sentence)
    for key, texts in explanation.settings:
        console.print(f"{key}: {' → '.join(texts)}", style="dim")
    console.print("First divergent decision", style="bold")
    for sentence in explanation.divergence_words:
        console.print(f"  {sentence}")
    if replicas is not None:
        console.print(replicas)
    share = explanation.share
    if share is None:
        return
    console.print(_parts(explanation.waterfalls))
    if share.changed:
        half, total = count(share.half), plural(share.total, "request")
        text = f"{half} of {total} account for half of the change in E2EL:"
        console.print(text, style="bold")
        for each in explanation.carriers[:5]:
            console.print(f"  {_carried(each)}")


def _replicas(first: FleetRun, other: FleetRun) -> Table:
    from kvsim.fleet.page import REPLICA_DIFF_HEAD, replica_differences

    return make_table(*REPLICA_DIFF_HEAD, rows=replica_differences(first, other))


def _parts(falls: Sequence[Waterfall]) -> Table:
    """By how much each part of the latencies changed, and their sums."""
    from kvsim.explain.attribution import LABELS
    from kvsim.report.explanation import title_of
    from kvsim.results.numerals import signed

    table = make_table("difference", *map(title_of, falls))
    changed = [dict(fall.changes()) for fall in falls]
    for part, label in LABELS.items():
        if any(part in changes for changes in changed):
            cells = (signed(float(c[part]) / 1e9, "s") if part in c else "" for c in changed)
            table.add_row(label, *cells)
    table.add_section()
    table.add_row("together", *(signed(float(fall.difference) / 1e9, "s") for fall in falls))
    return table


def _carried(each: Carrier) -> str:
    from kvsim.explain.attribution import LABELS
    from kvsim.results.numerals import signed

    change = signed((each.e2el_ns[1] - each.e2el_ns[0]) / 1e9, "s")
    return f"{each.id}: {change}, {signed(each.part_ns / 1e9, 's')} {LABELS[each.part]}"
