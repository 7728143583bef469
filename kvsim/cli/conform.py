"""`conform`: compare kvsim's decisions with those of the real engine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from kvsim.errors import ConfigError, TraceError, check_choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvsim.against.conform.cases import Case
    from kvsim.against.conform.step_log import Record


def conform(
    cases: Annotated[
        list[str],
        Argument(
            metavar="CASES...",
            help="Case folders, files with one case a line, folders of such files; or two logs.",
        ),
    ],
    engine: Annotated[str | None, Option(metavar="NAME", help="The engine to run.")] = None,
    router: Annotated[
        str | None, Option(metavar="NAME", help="The router to compare, instead of an engine.")
    ] = None,
    release: Annotated[
        str | None,
        Option(
            metavar="VERSION",
            help="Decide as this release of vLLM V1; default: the one that recorded the case.",
        ),
    ] = None,
    out: Annotated[str | None, Option(metavar="DIR", help="Write the step logs here.")] = None,
    against: Annotated[
        bool, Option("--against", help="Compare two step logs: A.steps.jsonl B.steps.jsonl.")
    ] = False,
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
    counts: dict[str | None, Counter[str]] = {}
    alone = 0
    for read in (case for path in paths for case in read_cases(_there(path), engine)):
        case = read._replace(config=read.config | given)
        if case.recorded is not None or out is not None:
            log = _log_of(case, engine)
        if out is not None:
            _write_log(Path(out) / case.name / f"{engine}.steps.jsonl", log)
        if case.recorded is None:
            alone += 1
            continue
        count = counts.setdefault(case.config.get("vllm_version"), Counter())
        count += _compared(case.name, case.recorded, log)
    total = sum(counts.values(), Counter[str]())
    if not counts and out is None:
        raise TraceError(
            f"{' '.join(paths)}: none of {alone} cases has a recorded log of {engine}; give the"
            " --engine that they are of, or --out DIR to write the logs"
        )
    if alone:
        print(f"{alone} cases have no recorded log of {engine}: not compared")
    for version in sorted(counts, key=version_of):
        if version is not None:
            print(f"vLLM {version}: {_counted(counts[version])}")
    print(_counted(total))
    return int(total["identical"] != total["compared"])


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


def _write_log(path: Path, log: list[dict[str, object]]) -> None:
    from kvsim.writing import write_text

    lines = (json.dumps(record, separators=(",", ":")) + "\n" for record in log)
    write_text(path, "".join(lines))
