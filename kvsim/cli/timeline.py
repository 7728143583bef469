"""A run as a Chrome trace, and what its server would have said of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer import Option

from kvsim.cli.options import Bundle, RunDir, takes_bundles
from kvsim.errors import ConfigError


class Served(Bundle):
    """What the server would have said of itself during a run."""

    kv_events: str | None = Option(
        None, metavar="FILE", help="KV events as vLLM publishes them: .jsonl, or msgpack."
    )
    openmetrics: str | None = Option(
        None, metavar="FILE", help="vLLM's metrics, as OpenMetrics text."
    )
    interval: float = Option(
        15.0, metavar="S", help="Seconds from one scrape of metrics to the next."
    )
    start: float = Option(0.0, metavar="UNIX", help="Time of the begin of the run in metrics.")
    trust: list[str] | None = Option(
        None, metavar="NAME", help="Code of your own that the run had; may be repeated."
    )

    def write(self, meta: Mapping[str, Any]) -> None:
        """Play a run again, and write what is asked for. Raises `ConfigError`."""
        if self.kv_events is self.openmetrics is None:
            return
        import msgspec

        from kvsim.writing import write_bytes, write_text

        try:
            from kvsim.against.serve.metrics import replayed
        except ImportError as error:
            raise ConfigError(f"timeline: {error}; pip install 'kvsim[serve]'") from None
        again = replayed(meta, self.interval, self.start, self.trust or ())
        if self.kv_events is not None:
            if again.batches is None:
                raise ConfigError(
                    "--kv-events: the engine of this run publishes none; it needs vllm-v1 or sglang"
                    " with prefix caching, all layers in one group and no offloading"
                )
            if Path(self.kv_events).suffix == ".jsonl":
                lines = [msgspec.json.encode(batch) + b"\n" for batch in again.batches]
            else:
                lines = [msgspec.msgpack.encode(batch) for batch in again.batches]
            print(write_bytes(self.kv_events, b"".join(lines)))
        if self.openmetrics is not None:
            print(write_text(self.openmetrics, again.openmetrics))


@takes_bundles
def timeline(
    *,
    directory: RunDir,
    out: str | None = Option(None, metavar="FILE", help="The trace: .json, or .json.gz."),
    begin_s: float | None = Option(
        None, "--from", metavar="S", help="Begin at this simulated second."
    ),
    end_s: float | None = Option(None, "--to", metavar="S", help="End at this simulated second."),
    request: list[str] | None = Option(
        None, metavar="ID", help="Only this request; may be repeated."
    ),
    served: Served,
) -> None:
    """Write a run as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing."""
    from kvsim.explain.story import find_request
    from kvsim.report import read_results, read_transitions
    from kvsim.report.tracks import events, run_window, write_tracks

    if out is served.kv_events is served.openmetrics is None:
        raise ConfigError("timeline: nothing to write; give --out, --kv-events or --openmetrics")
    summary, requests, steps = read_results(directory)
    if out is not None:
        chosen = {find_request(requests, each) for each in request or ()} or None
        window = run_window(steps, requests, begin_s, end_s)
        moves = read_transitions(directory, summary)
        listed = events(summary, requests, steps, moves, window, chosen)
        print(write_tracks(out, summary["meta"], listed))
    served.write(summary["meta"])
