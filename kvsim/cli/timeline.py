"""`timeline`: a run as tracks for a trace viewer."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from kvsim.cli.options import RunDir


def timeline(
    directory: RunDir,
    out: Annotated[str, Option(metavar="FILE", help="The trace: .json, or .json.gz.")],
    begin_s: Annotated[
        float | None, Option("--from", metavar="S", help="Begin at this simulated second.")
    ] = None,
    end_s: Annotated[
        float | None, Option("--to", metavar="S", help="End at this simulated second.")
    ] = None,
    request: Annotated[
        list[str] | None, Option(metavar="ID", help="Only this request; may be repeated.")
    ] = None,
) -> None:
    """Write a run as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing."""
    from kvsim.explain.story import find_request
    from kvsim.report.files import read_results, read_transitions
    from kvsim.report.tracks.export import events, run_window, write_tracks

    summary, requests, steps = read_results(directory)
    chosen = {find_request(requests, each) for each in request} if request else None
    window = run_window(steps, requests, begin_s, end_s)
    listed = events(summary, requests, steps, read_transitions(directory, summary), window, chosen)
    print(write_tracks(out, summary["meta"], listed))
