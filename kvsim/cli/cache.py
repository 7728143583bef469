"""`cache`: hit rates of a trace by cache size, and the audit of a run's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from kvsim.cli.commands import group_of, progress_bar
from kvsim.cli.options import AsJson, Bundle, RunDir, TraceForm, takes_bundles
from kvsim.errors import ConfigError
from kvsim.report import make_console, make_table
from kvsim.settings.versions import DEFAULT_BLOCK_SIZE

if TYPE_CHECKING:
    from kvsim.explain.cache_curve import Asked, Study
    from kvsim.explain.cache_eviction import Recorded
    from kvsim.report.pages.cache import Audited
    from kvsim.settings.config import RunConfig
    from kvsim.workload.reuse import Counting
    from kvsim.workload.trace import Trace

app = group_of("cache")

CAPACITY = Option("--capacity", min=1, max=1 << 40, metavar="N", help="In blocks; may be repeated.")
Out = Annotated[str | None, Option("--out", metavar="FILE", help="Also a page, HTML.")]


class Blocks(Bundle, kw_only=True):
    """A trace, and the blocks that it is cut into."""

    trace: str = Argument(metavar="TRACE", help="As for `kvsim run --trace`: a file, or chat.")
    block_size: int | None = Option(
        None, min=1, metavar="N", help="Tokens per block; default: that of the ids, else 16."
    )
    form: TraceForm

    def open(self) -> tuple[Trace, int]:
        """The trace, and the tokens per block."""
        opened = self.form.open(self.trace)
        return opened, self.block_size or opened.block_size or DEFAULT_BLOCK_SIZE


class Counted(Blocks, kw_only=True):
    """What counts as a block, and as a hit."""

    partial_blocks: bool = Option(
        False, "--partial-blocks", help="Keep partial last blocks, too; the last token may hit."
    )
    outputs: bool = Option(False, "--outputs", help="Keep outputs that the trace names, too.")

    def counted(self) -> tuple[Trace, Counting]:
        """The trace, and how it is counted."""
        from kvsim.workload.reuse import Counting

        opened, size = self.open()
        return opened, Counting(size, self.partial_blocks, self.partial_blocks, self.outputs)


class Sizes(Bundle, kw_only=True):
    """Capacities that are asked about, and requests that fill the cache first."""

    capacity: Annotated[list[int] | None, CAPACITY] = None
    gib: float | None = Option(None, metavar="X", help="A capacity in GiB of --model.")
    model: str | None = Option(None, metavar="NAME", help="Show capacities in its memory, too.")
    warm_up: int = Option(
        0, min=0, metavar="N", help="Requests at the start that are not measured."
    )

    def asked(self, block_size: int) -> Asked:
        """What is asked, in blocks of so many tokens. Raises `ConfigError`."""
        from kvsim.explain.cache_curve import Asked
        from kvsim.machine.memory import block_bytes as bytes_of
        from kvsim.machine.models import load_model
        from kvsim.settings.config import make_config

        block_bytes = None
        if self.model is not None:
            config = make_config({"model": self.model, "block_size": block_size})
            block_bytes = bytes_of(load_model(self.model), config)
        capacities = list(self.capacity or ())
        if self.gib is not None:
            if block_bytes is None:
                raise ConfigError(
                    "--gib: needs --model, whose KV cache says how much a block takes"
                )
            capacities.insert(0, _blocks(self.gib, block_bytes))
        return Asked(capacities, self.warm_up, block_bytes)


@app.command()
@takes_bundles
def curve(*, blocks: Counted, sizes: Sizes, out: Out = None, as_json: AsJson = False) -> None:
    """Hits by capacity: least recently used at every size, the optimum, and no limit."""
    from kvsim.explain.cache_curve import study_trace

    opened, counting = blocks.counted()
    study = study_trace(opened, counting, sizes.asked(counting.block_size))
    _show(study, as_json=as_json)
    if out is not None and not as_json:
        from kvsim.report.pages.cache import build_curve

        _write(out, build_curve(study))


@app.command()
@takes_bundles
def stream(
    *,
    trace: str = Argument(metavar="TRACE", help="A native trace, .gz too."),
    sizes: Sizes,
    as_json: AsJson = False,
) -> None:
    """The curve of least recently used, of a recording that is too long for memory.

    Its rows are counted and forgotten: a native trace, in blocks of its hash ids.
    """
    from kvsim.explain.cache_curve import open_recording, study_recording
    from kvsim.workload.source import Source

    with Source(trace) as source:
        header, rows = open_recording(source)
        study = study_recording(header, rows, sizes.asked(header.block_size or 1))
    _show(study, as_json=as_json)


def _show(study: Study, *, as_json: bool) -> None:
    from kvsim.report.pages.cache import CURVE_HEAD, curve_rows, definitions, sentences
    from kvsim.writing import json_text

    if as_json:
        print(json_text(study.record()), end="")
        return
    rows = list(curve_rows(study))
    # Without a model there are no bytes, and of a stream no optimum: these have no column.
    shown = [place for place in range(len(CURVE_HEAD)) if rows[0][place]]
    _print(
        sentences(study),
        [CURVE_HEAD[place] for place in shown],
        ([row[place] for place in shown] for row in rows),
        definitions(study),
        texts=0,
    )


@app.command()
@takes_bundles
def sample(
    *,
    blocks: Blocks,
    capacity: Annotated[list[int], CAPACITY],
    rate: float = Option(0.1, metavar="X", help="Share of the blocks to keep."),
    seed: int = Option(0, min=0, help="Another seed keeps other blocks."),
) -> None:
    """Estimate the hits of least recently used from a sample of the blocks."""
    from kvsim.explain.cache_curve import sampled_lru_tokens
    from kvsim.results.numerals import count, percent
    from kvsim.workload.keys import streams

    opened, size = blocks.open()
    sizes = sorted(set(capacity))
    found = sampled_lru_tokens(opened.rows, streams(opened), size, sizes, rate, seed=seed)
    total = sum(row.input_length for row in opened.rows)
    rows = [
        (count(number), percent(tokens / total))
        for number, tokens in zip(sizes, found, strict=True)
    ]
    note = (
        f"ESTIMATED from {percent(rate)} of the blocks. On Mooncake's conversation trace the"
        " greatest error was 0.6 points at a rate of 0.1, and 2.3 at 0.01; `kvsim cache curve` is"
        " exact."
    )
    _print((), ("blocks", "LRU"), rows, note, texts=0)


@app.command()
@takes_bundles
def policies(
    *,
    blocks: Counted,
    capacity: Annotated[list[int], CAPACITY],
    policy: list[str] | None = Option(None, metavar="NAME", help="May be repeated; default: all."),
    as_json: AsJson = False,
) -> None:
    """Compare eviction policies with the optimum, in a cache alone."""
    from kvsim.explain.cache_eviction import POLICIES, rank_policies
    from kvsim.report.pages.cache import POLICY_HEAD, policy_rows, policy_sentences
    from kvsim.writing import json_text

    opened, counting = blocks.counted()
    names, sizes = policy or POLICIES, sorted(set(capacity))
    with progress_bar("replaying", len(names) * len(sizes)) as done:
        ranking = rank_policies(opened, names, sizes, counting, done)
    if as_json:
        print(json_text(ranking.record()), end="")
        return
    note = (
        "Single blocks: any block may go. Ends only: a block stays as long as one that continues it"
        " does. Intervals (95 %) are from stretches of the trace."
    )
    _print(policy_sentences(ranking), POLICY_HEAD, policy_rows(ranking), note, texts=2)


@app.command()
@takes_bundles
def audit(
    *,
    directory: RunDir,
    eviction: list[str] | None = Option(
        None,
        metavar="NAME",
        help="Run it again with this eviction, such as arc or belady; may be repeated.",
    ),
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Split a run's prompt tokens: hit, lost to policy, pinning, capacity or timing, cold."""
    from kvsim.report.pages.cache import audit_rows, audit_sentences, build_audit
    from kvsim.writing import json_text

    with progress_bar("auditing") as done:
        runs = _audited(directory, eviction or (), done)
    if as_json:
        record = [{"run": run.name, "oracle": run.oracle, **run.audit._asdict()} for run in runs]
        print(json_text(record), end="")
        return
    note = "The parts add up. What the policy lost holds for the schedule of each run."
    head = ["prompt tokens", *(run.label for run in runs)]
    _print(audit_sentences(runs), head, audit_rows(runs), note, texts=1)
    if out is not None:
        _write(out, build_audit(runs))


def _audited(
    directory: str, evictions: Sequence[str], done: Callable[[int], None]
) -> list[Audited]:
    """The audit of a run, and of the same run with other evictions; or that of each replica of a
    fleet."""
    from msgspec.structs import replace

    from kvsim.explain.cache_eviction import Recorded
    from kvsim.explain.cache_eviction import audit as audit_run
    from kvsim.report.files import FLEET
    from kvsim.report.pages.cache import Audited
    from kvsim.run.simulation import simulate

    if (Path(directory) / FLEET).exists():
        folders = sorted(Path(directory).glob("replica-*"), key=lambda path: (len(path.name), path))
        if evictions:
            raise ConfigError(f"--eviction: {directory} is a fleet, and cannot be run again here")
        return [Audited(each.name, audit_run(_recorded(str(each))[0])) for each in folders]
    run, trace, settings = _recorded(directory)
    args = settings.block_manager_args
    oracles = run.summary["meta"]["oracles"]
    runs = [Audited(args.get("eviction", "this run"), audit_run(run), bool(oracles))]
    for name in evictions:
        done(1)
        again = simulate(trace, replace(settings, block_manager_args={**args, "eviction": name}))
        if list(again.requests["id"]) != list(run.requests["id"]):
            raise ConfigError(
                f"--eviction: {directory} is a replica, and cannot be run again alone"
            )
        recorded = Recorded(
            *(again.summary, again.requests, again.steps, again.transitions), run.streams
        )
        runs.append(Audited(name, audit_run(recorded), bool(again.meta["oracles"])))
    return runs


def _recorded(directory: str) -> tuple[Recorded, Trace, RunConfig]:
    """What a run folder holds, and what the run replayed. Raises `ConfigError`."""
    from kvsim.explain.cache_eviction import Recorded
    from kvsim.report import read_results, read_transitions
    from kvsim.run.simulation import to_repeat
    from kvsim.workload.keys import streams

    summary, requests, steps = read_results(directory)
    if not summary["meta"].get("prefix_caching"):
        raise ConfigError(f"{directory}: a run without prefix caching has no hits to audit")
    trace, config = to_repeat(summary["meta"], directory)
    # A replica has some of the requests.
    places = {row.id: row.index for row in trace.rows}
    if not places.keys() >= set(requests["id"]):
        raise ConfigError(f"{directory}: its requests are not those of its trace; run it again")
    prompts = streams(trace).picked(places[id] for id in requests["id"])
    transitions = read_transitions(directory, summary)
    return Recorded(summary, requests, steps, transitions, prompts), trace, config


def _blocks(gib: float, block_bytes: int) -> int:
    if not 0 < gib <= 1e6:
        raise ConfigError(f"--gib: {gib:g} is not above 0 and at most 1e6; give the memory in GiB")
    blocks = int(gib * 2**30 // block_bytes)
    if blocks < 1:
        raise ConfigError(f"--gib: {gib:g} GiB hold no block of {block_bytes:,} bytes; give more")
    return blocks


def _print(
    sentences: Iterable[str],
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    note: str,
    *,
    texts: int,
) -> None:
    console = make_console()
    for sentence in sentences:
        console.print(sentence)
    console.print(make_table(*head, rows=rows, texts=texts))
    console.print(note, style="dim")


def _write(out: str, page: str) -> None:
    from kvsim.writing import write_text

    make_console().print(f"\nwritten to {write_text(out, page)}")
