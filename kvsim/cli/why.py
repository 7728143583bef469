"""`why`: the story of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.console import make_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvsim.report.story import Story


def why(
    directory: Annotated[str, typer.Argument(metavar="RUN", help="What `kvsim run --out` wrote.")],
    request: Annotated[str, typer.Option("--request", metavar="ID", help="Id of the request.")],
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write it as a page, too.")
    ] = None,
) -> None:
    """Tell one request's story: what it waited for, what delayed it, where its time went."""
    from kvsim.report.files import read_results, read_transitions
    from kvsim.report.story import find_request, tell
    from kvsim.writing import write_text

    summary, requests, steps = read_results(directory)
    index = find_request(requests, request)
    story = tell(summary, requests, steps, read_transitions(directory, summary), index)
    console = make_console()
    _render(story, console)
    if html is not None:
        from kvsim.report.story_page import build_story

        console.print(f"\nwritten to {write_text(html, build_story(story))}", highlight=False)


def _render(story: Story, console: Console) -> None:
    from rich.text import Text

    from kvsim.ledger.parts import PROMPT_LABELS, TIME_LABELS
    from kvsim.report.numerals import count, seconds

    console.print(Text(f"request {story.id}: {story.about}", style="bold"))
    console.print(_time_line(story))
    if story.times_ns:
        parts = {name: seconds(ns / 1e9) for name, ns in story.times_ns.items()}
        console.print(_ledger("where its time went", parts, story.times_ns, TIME_LABELS))
    if story.tokens:
        parts = {name: count(number) for name, number in story.tokens.items()}
        console.print(_ledger("its prompt tokens", parts, story.tokens, PROMPT_LABELS))


def _time_line(story: Story) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from kvsim.report.numerals import seconds

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("after", justify="right", no_wrap=True, style="dim")
    table.add_column("what happened")
    for time_ns, text in story.moments:
        since = seconds((time_ns - story.arrival_ns) / 1e9)
        table.add_row(f"{time_ns / 1e9:,.6f} s", since, Text(text))
    return table


def _ledger(
    title: str, shown: dict[str, str], values: dict[str, int], labels: dict[str, str]
) -> Table:
    from rich import box
    from rich.table import Table

    from kvsim.report.numerals import percent

    whole = sum(values.values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column(title)
    table.add_column("", justify="right")
    table.add_column("", justify="right", style="dim")
    for name, text in shown.items():
        table.add_row(labels[name], text, percent(values[name] / whole))
    return table
