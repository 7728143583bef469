"""`why`: the story of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvsim.cli.options import RunDir
from kvsim.report.screen import make_console, make_table

if TYPE_CHECKING:
    from rich.console import Console

    from kvsim.explain.story import Story


def why(
    directory: RunDir,
    request: Annotated[str, Option(metavar="ID", help="Id of the request.")],
    html: Annotated[str | None, Option(metavar="FILE", help="Write it as a page, too.")] = None,
) -> None:
    """Tell one request's story: what it waited for, what delayed it, where its time went."""
    from kvsim.explain.story import find_request, tell
    from kvsim.report.files import is_fleet, read_results, read_transitions
    from kvsim.writing import write_text

    if is_fleet(directory):
        from kvsim.fleet.folder import read_fleet, replica_of

        directory = replica_of(directory, read_fleet(directory), request)
    summary, requests, steps = read_results(directory)
    index = find_request(requests, request)
    story = tell(summary, requests, steps, read_transitions(directory, summary), index)
    console = make_console()
    _render(story, console)
    if html is not None:
        from kvsim.report.pages.story import build_story

        console.print(f"\nwritten to {write_text(html, build_story(story))}")


def _render(story: Story, console: Console) -> None:
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
            ledger = make_table(title, "", "", rows=rows, pad_edge=False)
            console.print(ledger)
