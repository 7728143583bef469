"""Folders of runs, written, read and drawn for both kinds of them, one engine or a fleet; and what
they have to say: `report`, `why` and `diff`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typer import Argument, Option

from kvsim.cli.commands import tell_written
from kvsim.cli.options import AsJson, OutDir, RunDir
from kvsim.errors import ConfigError, OutputError, check_choice
from kvsim.report import make_console, make_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvsim.explain.differences import Waterfall
    from kvsim.explain.story import Story
    from kvsim.fleet import FleetRun
    from kvsim.fleet.result import Replica
    from kvsim.report import Explanation, Named
    from kvsim.results.blockmap import BlockMap
    from kvsim.run.result import Result


class Kind(NamedTuple):
    """What is done with runs of one kind."""

    simulate: Callable[..., Any]
    """Runs a trace with settings."""
    read: Callable[[str], Any]
    """Reads a run from its folder."""
    write: Callable[[Any, Path], None]
    """Writes a run into a folder."""
    explain: Callable[[Named, Named], Explanation]
    """Says why the second run differs from the first."""
    room: str
    """The module that makes pages, with `build_diff` and `build_comparison`."""

    @property
    def pages(self) -> Any:
        """That module, imported when it is first asked for."""
        return import_module(self.room)


def write_run(
    run: Result | Replica,
    out: str | Path,
    block_map: BlockMap | None = None,
    *,
    csv: bool = False,
    page: bool = False,
) -> None:
    """Write the folder of one engine."""
    from kvsim.report import write_results

    html, tables = None, (run.summary, run.requests, run.steps)
    if page:
        from kvsim.report.pages.run import build_page

        html = build_page(*tables, block_map)
    further: dict[str, Any] = {"transitions": run.transitions, "block_map": block_map}
    write_results(out, *tables, csv=csv, page=html, **further)


def write_replicas(
    run: FleetRun, out: str | Path, *, csv: bool = False, page: bool = True, pages: bool = False
) -> None:
    """Write the folder of each replica, with its page if `pages`, then what they have in common."""
    from kvsim.fleet import build_fleet
    from kvsim.fleet.folder import write_fleet

    def write(number: int, folder: str) -> None:
        write_run(run.replicas[number], folder, csv=csv, page=pages)

    write_fleet(out, run, write, build_fleet(run) if page else None)


def of_engines() -> Kind:
    """One engine each."""
    from kvsim.report import explain, read_results
    from kvsim.run.simulation import simulate

    return Kind(simulate, read_results, write_run, explain, "kvsim.report.pages.compare")


def of_fleets() -> Kind:
    """Several replicas each, behind a router."""
    from kvsim.fleet import explain_fleets, read_fleet, simulate_contender

    return Kind(simulate_contender, read_fleet, write_replicas, explain_fleets, "kvsim.fleet.page")


def report(directory: RunDir) -> None:
    """Rebuild report.html from the results in a folder."""
    from kvsim.report import PAGE, is_fleet, read_block_map, read_results
    from kvsim.report.pages.run import build_page
    from kvsim.writing import write_text

    if is_fleet(directory):
        from kvsim.fleet import build_fleet, read_fleet

        print(write_text(Path(directory) / PAGE, build_fleet(read_fleet(directory))))
        return
    summary, requests, steps = read_results(directory)
    block_map = read_block_map(directory, summary)
    print(write_text(Path(directory) / PAGE, build_page(summary, requests, steps, block_map)))


_REMEDY = "Give two runs of the same trace."


def diff(
    first: str = Argument(metavar="RUN_A", help="Folder written by `kvsim run --out`."),
    other: str = Argument(metavar="RUN_B", help="The run to compare with it."),
    out: OutDir = None,
    as_json: AsJson = False,
) -> None:
    """Say why two runs of the same requests differ: which decision, which time, which requests."""
    from kvsim.report import is_fleet
    from kvsim.report.compare import explanation_record
    from kvsim.writing import json_text, write_together

    fleets = is_fleet(first) and is_fleet(other)
    kind = of_fleets() if fleets else of_engines()
    runs = kind.read(first), kind.read(other)
    names = Path(first).resolve().name, Path(other).resolve().name
    # Folders of one name are told apart by their paths, as they were given.
    if names[0] == names[1]:
        names = first, other if other != first else f"{other} again"
    one, two = zip(names, runs, strict=True)
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
        replicas = None
        if fleets:
            from kvsim.fleet.page import REPLICA_DIFF_HEAD, replica_differences

            replicas = make_table(*REPLICA_DIFF_HEAD, rows=replica_differences(*runs))
        _render_difference(explanation, make_console(), replicas)
    if out is None:
        return
    write_together(out, {"diff.json": record, "diff.html": kind.pages.build_diff(one, two)})
    tell_written(out, "diff.html")


def _render_difference(explanation: Explanation, console: Console, replicas: Table | None) -> None:
    from kvsim.explain.differences import LABELS
    from kvsim.results.numerals import count, plural, signed

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
            change = signed((each.e2el_ns[1] - each.e2el_ns[0]) / 1e9, "s")
            part = f"{signed(each.part_ns / 1e9, 's')} {LABELS[each.part]}"
            console.print(f"  {each.id}: {change}, {part}")


def _parts(falls: Sequence[Waterfall]) -> Table:
    """By how much each part of the latencies changed, and their sums."""
    from kvsim.explain.differences import LABELS
    from kvsim.results.numerals import signed

    table = make_table("difference", *(fall.title for fall in falls))
    changed = [dict(fall.changes()) for fall in falls]
    for part, label in LABELS.items():
        if any(part in changes for changes in changed):
            cells = (signed(float(c[part]) / 1e9, "s") if part in c else "" for c in changed)
            table.add_row(label, *cells)
    table.add_section()
    table.add_row("together", *(signed(float(fall.difference) / 1e9, "s") for fall in falls))
    return table


TAILS = "ttft, tpot, e2el, queue"


def why(
    directory: RunDir,
    request: str | None = Option(None, metavar="ID", help="Id of the request."),
    p99: str | None = Option(
        None, "--p99", metavar="LATENCY", help=f"Why its tail is slow: {TAILS}."
    ),
    html: str | None = Option(None, metavar="FILE", help="Write it as a page, too."),
    as_json: AsJson = False,
) -> None:
    """Tell one request's story: what it waited for, what delayed it, where its time went.

    With --p99 ttft: why the slowest requests are slow, then the story of the first of them.
    """
    from kvsim.explain.story import find_request, tail_words, tell
    from kvsim.report import is_fleet, read_results, read_transitions
    from kvsim.writing import json_text, write_text

    console, said, fleet = make_console(), list[str](), None
    if is_fleet(directory):
        from kvsim.fleet import read_fleet
        from kvsim.fleet.folder import replica_of

        fleet = read_fleet(directory)
    if p99 is not None:
        check_choice("--p99", p99, TAILS.split(", "))
        everyone = read_results(directory)[1] if fleet is None else fleet.requests
        request, said = tail_words(everyone, p99)
    if request is None:
        raise ConfigError("why: give --request ID, or --p99 ttft")
    if fleet is not None:
        directory = replica_of(directory, fleet, request)
    summary, requests, steps = read_results(directory)
    index = find_request(requests, request)
    story = tell(summary, requests, steps, read_transitions(directory, summary), index)
    if as_json:
        moments = [moment._asdict() for moment in story.moments]
        record = {**story._asdict(), "moments": moments, "tail": said}
        print(json_text({**record, "spells": [spell._asdict() for spell in story.spells]}), end="")
        return
    for sentence in said:
        console.print(sentence)
    _render_story(story, console)
    if html is not None:
        from kvsim.report.pages.compare import build_story

        console.print(f"\nwritten to {write_text(html, build_story(story, said))}")


def _render_story(story: Story, console: Console) -> None:
    from kvsim.explain.story import ledger_rows
    from kvsim.results.ledger import PROMPT_LABELS, TIME_LABELS
    from kvsim.results.numerals import seconds

    console.print(f"request {story.id}: {story.about}", style="bold")
    moments = make_table("at", "after", "what happened", pad_edge=False)
    moments.columns[0].justify, moments.columns[2].justify = "right", "left"
    for time_ns, text in story.moments:
        since = seconds((time_ns - story.arrival_ns) / 1e9)
        moments.add_row(f"{time_ns / 1e9:,.6f} s", since, text)
    console.print(moments)
    for title, values, labels in (
        ("where its time went", story.times_ns, TIME_LABELS),
        ("its prompt tokens", story.tokens, PROMPT_LABELS),
    ):
        if values:
            rows = ledger_rows(values, labels)
            console.print(make_table(title, "", "", rows=rows, pad_edge=False))
