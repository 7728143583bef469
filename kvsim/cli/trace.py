"""`trace`: look at a trace, check it, convert it, or make one."""

from __future__ import annotations

import sys

from typer import Argument, Option

from kvsim.cli.commands import group_of, note
from kvsim.cli.options import AsJson, Bundle, TraceForm, takes_bundles
from kvsim.errors import TraceError

app = group_of("trace")


@app.command()
@takes_bundles
def info(*, file: str = Argument(metavar="FILE"), form: TraceForm, as_json: AsJson = False) -> None:
    """Counts, lengths, rates, and how much of the input a prefix cache could save at most."""
    from kvsim.explain.info import render, trace_info
    from kvsim.workload import open_trace
    from kvsim.writing import json_text

    found = trace_info(open_trace(file, form.trace_format, form.columns))
    print(json_text(found) if as_json else f"{render(found)}\n", end="")


@app.command()
@takes_bundles
def check(*, file: str = Argument(metavar="FILE"), form: TraceForm) -> None:
    """Say whether a trace can be read, and if not, why: file, line and field of each fault."""
    from kvsim.workload import check_trace

    trace, faults = check_trace(file, form.trace_format, form.columns)
    if trace is None:
        for fault in faults[:-1]:
            print(f"kvsim: {fault}", file=sys.stderr)
        raise TraceError(faults[-1])
    note(*trace.notes)
    print(f"{file}: {trace.format}, {len(trace.rows):,} requests, no faults")


@app.command()
@takes_bundles
def convert(
    *,
    source: str = Argument(metavar="IN"),
    target: str = Argument(metavar="OUT"),
    to: str = Option("native", help="native or mooncake."),
    block_size: int | None = Option(
        None, help="Tokens per hash id in OUT (mooncake), if IN has none."
    ),
    form: TraceForm,
) -> None:
    """Write a trace in another format; reports what the format cannot hold."""
    from kvsim.workload import convert as write
    from kvsim.workload import open_trace

    opened = open_trace(source, form.trace_format, form.columns)
    note(*write(opened, target, to, block_size))


class Made(Bundle):
    """How many requests are made, and how long they are."""

    requests: int | None = Option(None, min=1, help="How many.")
    rate: float | None = Option(None, help="Mean requests (api) or sessions per s.")
    input_len: int = Option(1024, help="random: tokens of a prompt.")
    output_len: int = Option(128, help="random: tokens of an output.")
    range_ratio: float = Option(0.0, help="random: lengths are uniform in LEN × (1 ± this).")
    long_inputs: str = Option(
        "0:1", metavar="SHARE:FACTOR", help="random: this share is FACTOR times longer."
    )
    long_outputs: str = Option(
        "0:1", metavar="SHARE:FACTOR", help="random: the same for outputs, chosen independently."
    )


@app.command()
@takes_bundles
def synth(
    *,
    kind: str = Argument(metavar="KIND", help="chat, api, agents, agentx or random."),
    out: str = Option(metavar="FILE", help="Native format."),
    seed: int = Option(0, min=0),
    made: Made,
) -> None:
    """Make a trace from a seed, with lengths and arrivals like published ones.

    random: lengths as the random data set of `vllm bench serve` draws them, and no arrivals.
    """
    from msgspec.structs import asdict

    from kvsim.workload.native import write
    from kvsim.workload.spec import Workload, make_trace

    write(make_trace(Workload(kind, **asdict(made)), seed), out)
