"""kvsim beside something real: `check` beside measured runs, `validate` beside a GPU, `conform`
beside real decisions, `bench` beside other simulators and earlier versions."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Argument, Option

import kvsim
from kvsim.cli.commands import command_line, note, progress_bar, run_module, tell_written, watched
from kvsim.cli.options import (
    AsJson,
    Bundle,
    ConfigFile,
    MeasuredFile,
    OutDir,
    TraceForm,
    TracePath,
    takes_bundles,
)
from kvsim.cli.profile import FIRST, show_fit, with_fitted
from kvsim.cli.settings import Given, Settings, config_path
from kvsim.errors import ConfigError, TraceError, check_choice
from kvsim.report import make_console, make_table, print_remarks
from kvsim.settings.config import RunConfig, load_config, read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.table import Table as RichTable

    from kvsim.against.bench import Bench
    from kvsim.against.bench_workloads import Case as Benched
    from kvsim.against.conform.cases import Case
    from kvsim.against.conform.step_log import Record
    from kvsim.settings.server import ServerWord
    from kvsim.workload.trace import Trace


BEYOND = 3
"""Exit code where a figure is farther off than the tolerance."""


class Asked(Bundle):
    """What a measured run is asked."""

    measured: MeasuredFile = None
    tolerance: float | None = Option(
        None, min=0, metavar="SHARE", help="Exit with code 3 if a figure is farther off."
    )
    corrections: bool = Option(
        True, "--corrections/--no-corrections", help="Try what would explain the rest."
    )
    fit: str | None = Option(
        None,
        metavar="FILE",
        help="First fit constants of the machine to the run, and write the profile there.",
    )
    fit_first: int = Option(
        FIRST, min=1, metavar="N", help="Requests that --fit takes; the others judge."
    )


@takes_bundles
def check(
    *,
    result: str = Argument(
        metavar="RESULT", help="Of vllm bench serve --save-detailed, or a trace."
    ),
    asked: Asked,
    config: ConfigFile = None,
    form: TraceForm,
    out: OutDir = None,
    as_json: AsJson = False,
    settings: Settings,
) -> None:
    """Replay a measured run, show predicted beside measured, and say what to correct first.

    The result of a benchmark is a trace and the measured answer at once.
    """
    from kvsim.against.check import build_check
    from kvsim.against.check import check as check_run
    from kvsim.workload.formats.table import join_measured
    from kvsim.writing import json_text, write_together

    trace = form.open(result)
    if asked.measured is not None:
        read = len(trace.notes)
        trace = join_measured(trace, asked.measured)
        note(*trace.notes[read:])
    loaded = settings.load(config, _with_model(settings.word, trace))
    if asked.fit is not None:
        loaded, fitted = with_fitted(trace, loaded, asked.fit_first, asked.fit)
        if not as_json:
            show_fit(fitted)
    with progress_bar("checking") as done:
        record = check_run(
            trace,
            loaded,
            tolerance=asked.tolerance,
            correct=asked.corrections,
            command=command_line(),
            done=done,
        )
    text = json_text(record)
    if as_json:
        print(text, end="")
    else:
        _show(record)
    if out is not None:
        write_together(out, {"check.json": text, "check.html": build_check(record)})
        tell_written(out, "check.html")
    if not record["passed"]:
        raise typer.Exit(BEYOND)


def _with_model(word: ServerWord, trace: Trace) -> ServerWord:
    """What the server says, with the model that the result names beneath it."""
    from msgspec.structs import replace

    names = {row.model for row in trace.rows}
    name = names.pop() if len(names) == 1 else None
    if name is None or "model" in word.settings:
        return word
    return replace(word, settings={"model": name, **word.settings})


def _show(record: dict[str, Any]) -> None:
    from kvsim.against.check import correction_rows, figure_rows, part_rows

    console = make_console()
    print_remarks(console, ((each["text"], each["tone"]) for each in record["verdict"]))
    for head, rows in (
        (("", "measured", "predicted", "error"), figure_rows(record)),
        (("mean", "measured", "predicted", "difference"), part_rows(record)),
        (("correction", "mean error left"), [row[::2] for row in correction_rows(record)]),
    ):
        if rows:
            console.print(make_table(*head, rows=rows))


Table = dict[str, Any]


class Engine(Bundle):
    """What is run, and where."""

    profile: str | None = Option(None, metavar="FILE", help="What `kvsim calibrate` measured here.")
    device: str = Option("cuda", metavar="cuda|cpu", help="Where the engine runs.")
    policies: str = Option(
        "recompute,swap,prefix-caching",
        metavar="NAMES",
        help="Of recompute, swap, prefix-caching, chunked-prefill.",
    )


class Stages(Bundle):
    """Where the files of a validation are, and from which of them to go on."""

    out: str = Option("runs/validate", metavar="DIR", help="Folder of the results.")
    prepare: str | None = Option(
        None, metavar="FILE", help="Only write the setup, to measure it elsewhere."
    )
    source: str | None = Option(
        None, "--from", metavar="FILE", help="Continue from a recording, or draw a result."
    )
    trust: list[str] | None = Option(
        None, metavar="MODULE:NAME", help="Code of your own that the file of --from may run."
    )
    html: str | None = Option(None, metavar="FILE", help="The page; default: in --out.")

    def go_on(self, profile: str | None) -> None:
        """Continue from a recording to a result, or from a result to its page."""
        from kvsim.against.validate.errors import KEYS, SCHEMA
        from kvsim.against.validate.setup import RECORDED, read_json, require

        assert self.source is not None
        table = read_json(self.source, RECORDED, SCHEMA)
        if table["schema"] == RECORDED:
            if profile is None:
                raise ConfigError(
                    f"{self.source}: a recording; give --profile FILE to compare it with"
                )
            self.compare(Path(self.source), self.trust or (), profile)
        else:
            require(table, KEYS, self.source)
            self.draw(table)

    def compare(self, recording: Path, trust: Sequence[str], profile: str) -> None:
        """Print how far the profile is off, and write it and its page."""
        from kvsim.against.validate import setup
        from kvsim.against.validate.errors import compare, count_rows, error_rows

        table = setup.read_json(recording, setup.RECORDED)
        setup.require(table, setup.RECORDED_KEYS, recording)
        setup.refuse_foreign(table["setup"], trust, recording)
        result = compare(table, profile)
        written = setup.write_json(Path(self.out) / "validation.json", result)
        for title, (head, rows) in (
            ("Error of the model, and in brackets the noise of the machine", error_rows(result)),
            ("Real / real again / simulated", count_rows(result)),
        ):
            make_console().print(make_table(*head, rows=rows, title=title))
        print(f"written to {written}")
        self.draw(result)

    def draw(self, result: Table) -> None:
        """Write the page of a result."""
        from kvsim.against.validate.page import build_page
        from kvsim.writing import write_text

        page = self.html or str(Path(self.out) / "validation.html")
        print(f"open {write_text(page, build_page(result))}")


@takes_bundles
def validate(
    *,
    trace: TracePath = None,
    engine: Engine,
    config: ConfigFile = None,
    form: TraceForm,
    files: Stages,
    given: Given,
) -> None:
    """Run the scheduler on a real engine and show how far the profile is off.

    Random weights, a paged pool, real kernels. Errors are shown step by step and request by
    request, beside the difference of two real runs. The pool is really allocated: give
    --num-gpu-blocks-override, few enough that requests are preempted.
    """
    from kvsim.against.validate.setup import foreign, read_json, write_json
    from kvsim.against.validate.setup import prepare as setup_of
    from kvsim.settings.library import find

    if files.source is not None:
        files.go_on(engine.profile)
        return
    if trace is None:
        raise ConfigError("validate: give --trace FILE, or --from a recording or a result")
    check_choice("--device", engine.device, ("cuda", "cpu"))
    profile, prepare = engine.profile, files.prepare
    if profile is None and prepare is None:
        raise ConfigError(
            "validate: give --profile FILE, made with `kvsim calibrate` on this device"
        )
    opened = form.open(trace)
    path = "" if profile is None else str(find("profiles", profile))
    made = read_json(path, "kvsim.profile/1") if path else {}
    loaded = _settings(opened, made, config, given)
    setup = setup_of(opened, loaded, [name.strip() for name in engine.policies.split(",")])
    if prepare is not None:
        written = write_json(prepare, setup)
        print(f"written to {written}: measure it with python -m kvsim.against.validate")
        return
    assert profile is not None
    out = Path(files.out)
    written, recording = write_json(out / "setup.json", setup), str(out / "recording.json")
    arguments = [str(written), "--profile", path, "--device", engine.device, "--out", recording]
    named = foreign(setup)
    run_module("kvsim.against.validate", [*arguments, *(f"--trust={name}" for name in named)])
    files.compare(Path(recording), named, profile)


def _settings(trace: Trace, made: Table, config: str | None, flags: Given) -> RunConfig:
    """The user's settings; missing ones are taken from the profile and fitted to the trace."""
    path, flagged = config_path(config), flags.flags.settings
    given = {**(read_toml(path) if path else {}), **flagged}
    longest = max(row.input_length + row.output_length for row in trace.rows)
    # The policies that it compares by default are those of this engine.
    defaults: Table = {"engine": "vllm-0.6.3", "max_model_len": longest}
    if made:
        model, engine = made["model"], made["engine"]
        defaults |= {"model": model["name"], "block_size": engine["block_size"]}
        defaults |= {"dtype": model["dtype"], "kv_cache_dtype": model["kv_dtype"]}
    if "num_gpu_blocks_override" not in given:
        raise ConfigError(
            "validate: give --num-gpu-blocks-override: the pool is really allocated, and a"
            " scheduler preempts only if blocks are few"
        )
    defaults["num_cpu_blocks_override"] = given["num_gpu_blocks_override"]
    missing = {key: value for key, value in defaults.items() if key not in given}
    return load_config(path, {**missing, **flagged}, flags.assignments or ())


def conform(
    cases: list[str] = Argument(
        metavar="CASES...",
        help="Case folders, files with one case a line, folders of such files; or two logs.",
    ),
    engine: str | None = Option(None, metavar="NAME", help="The engine to run."),
    router: str | None = Option(
        None, metavar="NAME", help="The router to compare, instead of an engine."
    ),
    release: str | None = Option(
        None,
        metavar="VERSION",
        help="Decide as this release of vLLM V1; default: the one that recorded the case.",
    ),
    out: str | None = Option(None, metavar="DIR", help="Write the step logs here."),
    against: bool = Option(
        False, "--against", help="Compare two step logs: A.steps.jsonl B.steps.jsonl."
    ),
) -> None:
    """Replay recorded cases on the virtual clock and compare every decision.

    Without an engine or a router, each line of the files has to say which one it is of, as those of
    tests/data do. Exit code 0 only if all logs are identical, else 1.
    """
    if release is not None:
        _check_release(release, engine)
    if against:
        raise typer.Exit(_compare_logs(cases))
    if router is not None:
        raise typer.Exit(_replay_router(cases, router))
    if engine is None and out is None:
        raise typer.Exit(_replay_named(cases))
    from kvsim.against.conform.cases import RECORDED

    if engine is None:
        raise ConfigError(f"conform: --out needs --engine, one of {', '.join(RECORDED)}")
    check_choice("--engine", engine, RECORDED)
    raise typer.Exit(_replay(cases, engine, release, out))


def _check_release(release: str, engine: str | None) -> None:
    from kvsim.engines.vllm_v1.releases import release_of
    from kvsim.settings.versions import release as version_of

    if engine != "vllm-v1":
        raise ConfigError("--release: only --engine vllm-v1 knows several; leave it out")
    release_of(version_of(release))


def _replay(paths: list[str], engine: str, release: str | None, out: str | None) -> int:
    from kvsim.against.conform.cases import read_cases
    from kvsim.settings.versions import release as version_of

    given = {} if release is None else {"vllm_version": release}
    counts = defaultdict[str | None, Counter[str]](Counter)
    for read in (case for path in paths for case in read_cases(_there(path), engine)):
        case = read._replace(config=read.config | given)
        counts[case.config.get("vllm_version")] += _replayed(case, engine, out)
    total = sum(counts.values(), Counter[str]())
    if not total["compared"] and out is None:
        raise TraceError(
            f"{' '.join(paths)}: none of {total['alone']} cases has a recorded log of {engine};"
            " give the --engine that they are of, or --out DIR to write the logs"
        )
    if total["alone"]:
        print(f"{total['alone']} cases have no recorded log of {engine}: not compared")
    versions = [each for each, count in counts.items() if each and count["compared"]]
    for version in sorted(versions, key=version_of):
        print(f"vLLM {version}: {_counted(counts[version])}")
    print(_counted(total))
    return int(total["identical"] != total["compared"])


def _replayed(case: Case, engine: str, out: str | None) -> Counter[str]:
    """Writes the log of a case, and counts it: compared, or without one that is recorded."""
    from kvsim.writing import write_lines

    if case.recorded is None and out is None:
        return Counter(alone=1)
    log = _log_of(case, engine)
    if out is not None:
        lines = (json.dumps(record, separators=(",", ":")) for record in log)
        write_lines(Path(out) / case.name / f"{engine}.steps.jsonl", lines)
    return Counter(alone=1) if case.recorded is None else _compared(case.name, case.recorded, log)


def _log_of(case: Case, engine: str) -> list[Record]:
    from kvsim.against.conform.cases import run_case

    try:
        return list(run_case(engine, case.config, case.trace))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TraceError(
            f"{case.name}: no case of {engine}: {error!r}; give the --engine that it is of"
        ) from None


def _replay_named(paths: list[str]) -> int:
    """Cases and runs whose lines say which engine or router they are of; counts by file."""
    from kvsim.against.conform.cases import RECORDED, files_in, stem

    total = Counter[str]()
    for path in map(_there, paths):
        for file in files_in(path) if path.is_dir() else [path]:
            count = sum((_compared(*each) for each in _named(file)), Counter[str]())
            if count:
                print(f"{stem(file)}: {_counted(count)}")
            total += count
    if not total:
        raise TraceError(
            f"{' '.join(paths)}: no cases in it that say their engine; give --engine, one of"
            f" {', '.join(RECORDED)}, or --router"
        )
    print(f"in all: {_counted(total)}")
    return int(total["identical"] != total["compared"])


def _named(file: Path) -> Iterator[tuple[str, list[Record], list[Record]]]:
    """Of each line of a file: its name, what is recorded, and what kvsim decides."""
    from kvsim.against.conform.cases import RECORDED, RouterRun, read_named
    from kvsim.against.conform.routers import REPLAYS, replay

    for name, read in read_named(file):
        if isinstance(read, RouterRun):
            check_choice(f"{file}: router", name, REPLAYS)
            yield read.name, read.records, replay(name, read)
        else:
            check_choice(f"{file}: engine", name, RECORDED)
            if read.recorded is None:
                raise TraceError(f"{read.name}: nothing is recorded in it; expected a key steps")
            yield read.name, read.recorded, _log_of(read, name)


def _counted(count: Counter[str]) -> str:
    return f"{count['compared']} cases, {count['identical']} identical, {count['records']} records"


def _compared(name: str, recorded: list[Record], log: list[Record]) -> Counter[str]:
    """Counts one log, the same or not, and its decisions; prints where it parts."""
    from kvsim.against.conform.step_log import first_divergence

    divergence = first_divergence(recorded, log)
    if divergence is not None:
        print(f"{name}: recorded | kvsim: {divergence}")
    decided = sum(record.get("op", "route") == "route" for record in log)
    return Counter(compared=1, identical=int(divergence is None), records=decided)


def _replay_router(paths: list[str], router: str) -> int:
    from kvsim.against.conform.cases import read_router_runs
    from kvsim.against.conform.routers import REPLAYS, replay

    check_choice("--router", router, REPLAYS)
    runs = (run for path in paths for run in read_router_runs(_there(path), router))
    total = sum(
        (_compared(run.name, run.records, replay(router, run)) for run in runs), Counter[str]()
    )
    if not total:
        raise TraceError(f"{' '.join(paths)}: no runs in it; give the records of a router")
    print(f"{total['compared']} runs, {total['identical']} identical, {total['records']} decisions")
    return int(total["identical"] != total["compared"])


def _there(path: str) -> Path:
    if not Path(path).exists():
        raise ConfigError(f"{path}: no such file or folder")
    return Path(path)


def _compare_logs(paths: list[str]) -> int:
    from kvsim.against.conform.cases import read_log
    from kvsim.against.conform.step_log import first_divergence

    if len(paths) != 2:
        raise ConfigError("--against: give two step logs, A.steps.jsonl B.steps.jsonl")
    for path in paths:
        if not Path(path).is_file():
            raise ConfigError(f"{path}: no such file")
    one, other = (read_log(Path(path)) for path in paths)
    if not one and not other:
        raise TraceError(f"{' '.join(paths)}: no records in them; give two step logs")
    divergence = first_divergence(one, other)
    if divergence is None:
        print(f"identical: {len(one)} records")
        return 0
    print(f"{paths[0]} | {paths[1]}: {divergence}")
    return 1


_BENCH_WIDTH = 120
"""Columns of the widest table; a narrow terminal folds its lines."""


class Peer(Bundle):
    """Another simulator to measure beside."""

    name: str | None = Option(
        None,
        "--peer",
        metavar="aisimulate",
        help="Run another simulator in turns, on the same requests with its prefix cache on.",
    )
    python: str = Option("python3", "--peer-python", metavar="PATH", help="The Python that has it.")


@takes_bundles
def bench(
    *,
    names: list[str] | None = Option(
        None,
        "--workload",
        metavar="NAME",
        help="A name such as W1, or `decode` for all of decode-N; may be repeated. Default: the"
        " usual ones of the settings; conversation-N only with --trace.",
    ),
    engines: list[str] | None = Option(
        None,
        "--settings",
        metavar="NAME|FILE",
        help="An engine such as sglang, `feature` or `own` for all features of vLLM V1 or policies"
        " of one's own, or a TOML file of settings; may be repeated. Default: all; vllm-v1 if there"
        " is a --workload.",
    ),
    repeats: int = Option(3, min=1, metavar="N", help="Runs of each."),
    trace: str | None = Option(
        None, metavar="FILE", help="Mooncake's conversation_trace.jsonl, for conversation-N."
    ),
    as_json: AsJson = False,
    stored: str | None = Option(
        None, "--compare", metavar="FILE", help="Show the ratio to an earlier output of --json."
    ),
    peer: Peer,
    around: bool = Option(
        False, "--around", help="Measure what a run costs besides the simulation."
    ),
) -> None:
    """Measure CPU time and memory of runs that anybody can rebuild.

    Each run reads a file of requests and simulates them, on an H100 where the settings name no
    other times, in a process of its own. All take turns; the tables show the least and the median
    of the repeats. ns/seq: per decoding sequence and step; over base: a feature's or policy's time
    of a step over the default's on the same requests, a fleet's time of a request over that of one
    replica; MB: peak memory.
    """
    from kvsim.against.bench import check_peer, load, run, store_bytecode, to_json
    from kvsim.against.bench_workloads import choose

    cases = choose(names or [], engines or [], trace)
    store_bytecode(Path(kvsim.__file__).parent)
    if around:
        _show_parts(cases, trace)
        return
    if peer.name is not None:
        check_peer(peer.name, peer.python)
    then = None if stored is None else load(stored)
    beside = None if peer.name is None else (peer.name, peer.python)
    measured = run(cases, repeats, trace, _note_case, beside)
    if as_json:
        print(to_json(measured), end="")
    else:
        _show_bench(measured, then)


def _note_case(case: Benched) -> None:
    if watched():
        print(f"{case}: measured", file=sys.stderr)


def _show_bench(bench: Bench, then: Bench | None) -> None:
    from kvsim.against.bench import columns_of, ratios

    console = make_console()
    console.width = max(console.width, _BENCH_WIDTH)
    load = "" if bench.load_average is None else f", load {bench.load_average:.2f}"
    console.print(
        f"kvsim {bench.kvsim_version}, Python {bench.python}, {bench.machine}{load}", soft_wrap=True
    )
    for rows, columns in columns_of(bench):
        if rows and columns:
            cells = ([*row.case, *(write(row) for _, write in columns)] for row in rows)
            console.print(_cases_table([head for head, _ in columns], cells))
    if then is not None:
        found = ratios(bench, then).items()
        changes = [[*case, f"{ratio:.2f}"] for case, ratio in found]
        if changes:
            console.print(_cases_table(("CPU now / then",), changes))


def _show_parts(cases: list[Benched], trace: str | None) -> None:
    from kvsim.against.bench import around, in_fresh_process

    rows = (
        [*case, part, f"{cpu_s:.3f}"]
        for case in cases
        for part, cpu_s in in_fresh_process(around, case, trace).items()
    )
    make_console().print(_cases_table(("part", "CPU s"), rows))


def _cases_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> RichTable:
    """A table of cases: workload, settings, and columns with these heads."""
    look: dict[str, Any] = {"pad_edge": False, "padding": (0, 1), "collapse_padding": True}
    table = make_table("workload", "settings", *heads, rows=rows, texts=2, **look)
    for column in table.columns:
        column.no_wrap = True
    return table
