"""`timeline`: a run as tracks for a trace viewer, as KV events, as metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvsim.cli.options import RunDir
from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from kvsim.against.serve.again import Again


def timeline(
    directory: RunDir,
    out: Annotated[
        str | None, Option(metavar="FILE", help="The trace: .json, or .json.gz.")
    ] = None,
    begin_s: Annotated[
        float | None, Option("--from", metavar="S", help="Begin at this simulated second.")
    ] = None,
    end_s: Annotated[
        float | None, Option("--to", metavar="S", help="End at this simulated second.")
    ] = None,
    request: Annotated[
        list[str] | None, Option(metavar="ID", help="Only this request; may be repeated.")
    ] = None,
    kv_events: Annotated[
        str | None,
        Option(metavar="FILE", help="KV events as vLLM publishes them: .jsonl, or msgpack."),
    ] = None,
    openmetrics: Annotated[
        str | None, Option(metavar="FILE", help="vLLM's metrics, as OpenMetrics text.")
    ] = None,
    interval: Annotated[
        float, Option(metavar="S", help="Seconds from one scrape of metrics to the next.")
    ] = 15.0,
    start: Annotated[
        float, Option(metavar="UNIX", help="Time of the begin of the run in metrics.")
    ] = 0.0,
    trust: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Code of your own that the run had; may be repeated."),
    ] = None,
) -> None:
    """Write a run as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing."""
    from kvsim.explain.story import find_request
    from kvsim.report.files import read_results, read_transitions
    from kvsim.report.tracks.export import events, run_window, write_tracks

    if out is None and kv_events is None and openmetrics is None:
        raise ConfigError("timeline: nothing to write; give --out, --kv-events or --openmetrics")
    summary, requests, steps = read_results(directory)
    if out is not None:
        chosen = {find_request(requests, each) for each in request} if request else None
        window, moves = run_window(steps, requests, begin_s, end_s), (directory, summary)
        listed = events(summary, requests, steps, read_transitions(*moves), window, chosen)
        print(write_tracks(out, summary["meta"], listed))
    if kv_events is not None or openmetrics is not None:
        try:
            from kvsim.against.serve.again import replayed
        except ImportError as error:
            raise ConfigError(f"timeline: {error}; pip install 'kvsim[serve]'") from None
        again = replayed(summary["meta"], interval, start, trust or ())
        _write_again(again, kv_events, openmetrics)


def _write_again(again: Again, kv_events: str | None, openmetrics: str | None) -> None:
    import msgspec

    from kvsim.writing import write_bytes, write_text

    if kv_events is not None:
        if again.batches is None:
            raise ConfigError(
                "--kv-events: the engine of this run publishes none; it needs vllm-v1 or sglang"
                " with prefix caching, all layers in one group and no offloading"
            )
        if Path(kv_events).suffix == ".jsonl":
            lines = [msgspec.json.encode(batch) + b"\n" for batch in again.batches]
        else:
            lines = [msgspec.msgpack.encode(batch) for batch in again.batches]
        print(write_bytes(kv_events, b"".join(lines)))
    if openmetrics is not None:
        print(write_text(openmetrics, again.openmetrics))
