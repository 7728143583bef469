"""`why`: the story of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvsim.cli.options import AsJson, RunDir
from kvsim.errors import ConfigError, check_choice
from kvsim.report.screen import make_console, make_table

if TYPE_CHECKING:
    from rich.console import Console

    from kvsim.explain.story import Story

TAILS = "ttft, tpot, e2el, queue"


def why(
    directory: RunDir,
    request: Annotated[str | None, Option(metavar="ID", help="Id of the request.")] = None,
    p99: Annotated[
        str | None, Option("--p99", metavar="LATENCY", help=f"Why its tail is slow: {TAILS}.")
    ] = None,
    html: Annotated[str | None, Option(metavar="FILE", help="Write it as a page, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell one request's story: what it waited for, what delayed it, where its time went.

    With --p99 ttft: why the slowest requests are slow, then the story of the first of them.
    """
    from kvsim.explain.story import find_request, tail_words, tell
    from kvsim.report.files import is_fleet, read_results, read_transitions
    from kvsim.writing import json_text, write_text

    console, said, fleet = make_console(), list[str](), None
    if is_fleet(directory):
        from kvsim.fleet.folder import read_fleet, replica_of

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
    _render(story, console)
    if html is not None:
        from kvsim.report.pages.story import build_story

        console.print(f"\nwritten to {write_text(html, build_story(story, said))}")


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
