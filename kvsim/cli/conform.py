"""`conform`: compare kvsim's decisions with those of the real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kvsim.errors import ConfigError, check_choice


def conform(
    cases: Annotated[
        list[str],
        Argument(
            metavar="CASES...", help="Case folders, or files with one case a line; or two logs."
        ),
    ],
    engine: Annotated[str | None, Option(metavar="NAME", help="The engine to run.")] = None,
    router: Annotated[
        str | None, Option(metavar="NAME", help="The router to compare, instead of an engine.")
    ] = None,
    out: Annotated[str | None, Option(metavar="DIR", help="Write the step logs here.")] = None,
    against: Annotated[
        bool, Option("--against", help="Compare two step logs: A.steps.jsonl B.steps.jsonl.")
    ] = False,
) -> None:
    """Replay recorded cases on the virtual clock and compare every decision.

    Exit code 0 only if all logs are identical, else 1.
    """
    if against:
        raise typer.Exit(_compare_logs(cases))
    if router is not None:
        raise typer.Exit(_replay_router(cases, router))
    from kvsim.conform.builders import RECORDED

    if engine is None:
        raise ConfigError(f"conform: give --engine, one of {', '.join(RECORDED)}")
    check_choice("--engine", engine, RECORDED)
    raise typer.Exit(_replay(cases, engine, out))


def _replay(paths: list[str], engine: str, out: str | None) -> int:
    from kvsim.conform.builders import run_case
    from kvsim.conform.cases import read_cases
    from kvsim.conform.compare import first_divergence

    compared = identical = records = alone = 0
    for case in (case for path in paths for case in read_cases(_there(path), engine)):
        if case.recorded is not None or out is not None:
            log = list(run_case(engine, case.config, case.trace))
        if out is not None:
            _write_log(Path(out) / case.name / f"{engine}.steps.jsonl", log)
        if case.recorded is None:
            alone += 1
            continue
        compared += 1
        records += len(log)
        identical += _same(case.name, first_divergence(case.recorded, log))
    if alone:
        print(f"{alone} cases have no recorded log of {engine}: not compared")
    print(f"{compared} cases, {identical} identical, {records} records")
    return 0 if identical == compared else 1


def _replay_router(paths: list[str], router: str) -> int:
    from kvsim.conform.cases import read_router_runs
    from kvsim.conform.compare import first_divergence
    from kvsim.conform.routers import REPLAYS, replay

    check_choice("--router", router, REPLAYS)
    runs = identical = decisions = 0
    for run in (run for path in paths for run in read_router_runs(_there(path), router)):
        runs += 1
        decisions += sum(record["op"] == "route" for record in run.records)
        identical += _same(run.name, first_divergence(run.records, replay(router, run)))
    print(f"{runs} runs, {identical} identical, {decisions} decisions")
    return 0 if identical == runs else 1


def _there(path: str) -> Path:
    if not Path(path).exists():
        raise ConfigError(f"{path}: no such file or folder")
    return Path(path)


def _same(name: str, divergence: object) -> bool:
    """Whether there is no divergence; prints one that there is."""
    if divergence is not None:
        print(f"{name}: recorded | kvsim: {divergence}")
    return divergence is None


def _compare_logs(paths: list[str]) -> int:
    from kvsim.conform.cases import read_log
    from kvsim.conform.compare import first_divergence

    if len(paths) != 2:
        raise ConfigError("--against: give two step logs, A.steps.jsonl B.steps.jsonl")
    for path in paths:
        if not Path(path).is_file():
            raise ConfigError(f"{path}: no such file")
    one, other = (read_log(Path(path)) for path in paths)
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
