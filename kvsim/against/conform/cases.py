"""Recorded cases, read from folders or from files with one case a line, and run by kvsim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from kvsim.against.conform import sglang, vllm_v1
from kvsim.against.conform.step_log import Record, build, replay
from kvsim.engines import ENGINES
from kvsim.engines.nano import Nano, Nano2025, NanoTables, NanoTables2025
from kvsim.engines.vllm_033 import Vllm033, Vllm033Tables
from kvsim.engines.vllm_063.blocks import Naive, PrefixCaching
from kvsim.engines.vllm_063.scheduler import Vllm063, Vllm063Async
from kvsim.errors import TraceError
from kvsim.settings.library import read_json
from kvsim.settings.parsing import parse_json
from kvsim.workload.source import Source

PREFIXES = {
    "vllm-0.3.3": "vllm033",
    "vllm-0.6.3": "vllm",
    "vllm-v1": "v1",
    "nano-vllm": "nano",
    "nano-vllm-2025-08": "nano_aug2025",
    "sglang": "sglang",
}
"""Engine → first part of its log's file name."""


class Case(NamedTuple):
    """One run of the corpus."""

    name: str
    config: dict[str, Any]
    trace: list[dict[str, Any]]
    recorded: list[Record] | None
    """The real engine's log, where it lies beside the case."""


def read_cases(path: Path, engine: str) -> Iterator[Case]:
    """Cases of a folder of case folders, of one case folder, of a file with a case a line, or of
    a folder of such files. One that says which release recorded it is of that `vllm_version`.

    Raises `TraceError` naming the file where something is missing, damaged or too large, and
    `ConfigError` for a configuration that is not JSON.
    """
    if path.is_dir():
        inside = [path] if (path / "config.json").exists() else sorted(path.iterdir())
        folders = [each for each in inside if (each / "config.json").is_file()]
        files = [] if folders else files_in(path)
        if not folders and not files:
            raise TraceError(
                f"{path}: no case folders (with a config.json) and no *.jsonl files in it"
            )
        for folder in folders:
            yield _folder(folder, engine)
        for file in files:
            yield from read_cases(file, engine)
    else:
        for line, row in _json_lines(path):
            yield _case(path, line, row)


class RouterRun(NamedTuple):
    """What one router was shown, and what it decided."""

    name: str
    header: dict[str, Any]
    records: list[Record]


def read_router_runs(path: Path, router: str) -> Iterator[RouterRun]:
    """Runs of a router, from the folder of all routers, a folder of files, or a file.

    A file has one run, its header first, or a run in each line. Raises `TraceError`.
    """
    if not path.is_dir():
        lines = list(_json_lines(path))
        if lines and {"config", "workers"} <= lines[0][1].keys():
            yield RouterRun(stem(path), lines[0][1], [record for _, record in lines[1:]])
            return
        for line, row in lines:
            yield _run(path, line, row)
        return
    files = [*path.glob("*.jsonl*"), *path.glob(f"cases/{router}/*.jsonl*")]
    files += path.glob(f"fuzz/{router}.jsonl*")
    if not files:
        raise TraceError(f"{path}: no *.jsonl files, and none in cases/{router} or fuzz")
    for file in sorted(files):
        yield from read_router_runs(file, router)


def files_in(path: Path) -> list[Path]:
    """The files of a folder that may have a case or run a line, in order of their names."""
    return [each for each in sorted(path.iterdir()) if each.name.endswith((".jsonl", ".jsonl.gz"))]


def read_named(path: Path) -> Iterator[tuple[str, Case | RouterRun]]:
    """Cases and runs of a file whose lines say which `engine` or `router` they are of, each with
    that name. Raises `TraceError`."""
    for line, row in _json_lines(path):
        if isinstance(engine := row.get("engine"), str):
            yield engine, _case(path, line, row)
        elif isinstance(router := row.get("router"), str):
            yield router, _run(path, line, row)
        else:
            raise TraceError(
                f"{path}:{line}: does not say which engine or router it is of;"
                " give --engine or --router"
            )


def read_log(path: Path) -> list[Record]:
    """The records of a step log. Raises `TraceError`."""
    return [row for _, row in _json_lines(path)]


def _case(path: Path, line: int, row: Record) -> Case:
    config, trace, steps = (row.get(key) for key in ("config", "trace", "steps"))
    logged = steps is None or _are_records(steps)
    if not (isinstance(config, dict) and _are_records(trace) and logged):
        raise TraceError(f"{path}:{line}: not a case; expected keys config, trace, steps")
    seed = row.get("seed")
    number = seed if type(seed) is int else line
    if "release" in row:
        config = config | {"vllm_version": row["release"]}
    return Case(f"{stem(path)}-{number}", config, trace, steps)


def _run(path: Path, line: int, row: Record) -> RouterRun:
    header, records = row.get("header"), row.get("records")
    if not (isinstance(header, dict) and _are_records(records)):
        raise TraceError(f"{path}:{line}: not a run; expected keys header, records")
    return RouterRun(header.get("case", str(line)), header, records)


def _folder(folder: Path, engine: str) -> Case:
    config = read_json(folder / "config.json")
    trace = _find(folder, "trace")
    if trace is None and "trace_from" in config:
        # Cases of one engine may name a case of the common folder whose trace they use.
        for parent in (folder.parent, folder.parent.parent.parent / "cases"):
            trace = trace or _find(parent / str(config["trace_from"]), "trace")
    if trace is None:
        raise TraceError(f"{folder}: no trace.jsonl or trace.jsonl.gz")
    log = _find(folder, f"{PREFIXES.get(engine, engine)}.steps")
    return Case(folder.name, config, read_log(trace), read_log(log) if log else None)


def _find(folder: Path, name: str) -> Path | None:
    for path in (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz"):
        if path.is_file():
            return path
    return None


def _json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """The objects of a file, one a line, each with the number of its line."""
    with Source(str(path)) as source:
        for line in source.lines():
            try:
                value = parse_json(line)
            except ValueError as error:
                raise source.error(f"not JSON: {error}") from None
            if not isinstance(value, dict):
                raise source.error("not an object; write one a line")
            yield source.line, value


def _are_records(value: Any) -> TypeGuard[list[Record]]:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def stem(path: Path) -> str:
    """The name of a file without `.jsonl` or `.jsonl.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


Config = Mapping[str, Any]

KINDS: dict[str, tuple[type, type]] = {
    "vllm-0.3.3": (Vllm033, Vllm033Tables),
    "vllm-0.6.3": (Vllm063, Naive),
    "nano-vllm": (Nano, NanoTables),
    "nano-vllm-2025-08": (Nano2025, NanoTables2025),
}
"""Engine → scheduler and block manager."""

REPLAYS = {"vllm-v1": vllm_v1.replay, "sglang": sglang.replay}
"""Engines whose logs have fields of their own → what writes the log of a case."""

RECORDED = (*KINDS, *REPLAYS)
"""Engines that there are recorded logs of."""


def run_case(
    engine: str, config: Config, trace: list[dict[str, Any]], audit_every: int = 0
) -> Iterator[Record]:
    """The step log that kvsim writes for a case.

    `audit_every`: check the books after every so many steps, 0: never.
    """
    served = engine == "vllm-v1" or ENGINES[engine].samples
    if not served and any(row.get("n", 1) > 1 for row in trace):
        yield {"step": 0, "time": 0.0, "error": "this engine draws one sample a request (n = 1)"}
        return
    try:
        log = REPLAYS.get(engine, partial(_replay, engine))(config, trace, audit_every)
    except ValueError as refusal:
        # The engine refuses to start with these settings.
        yield {"step": 0, "time": 0.0, "error": f"ValueError: {refusal}"}
        return
    yield from log


def _replay(
    engine: str, config: Config, trace: list[dict[str, Any]], audit_every: int
) -> Iterator[Record]:
    scheduler, tables = KINDS[engine]
    if scheduler is Vllm063 and config.get("async_output_proc", False):
        scheduler = Vllm063Async
    if tables is Naive and config.get("enable_prefix_caching", False):
        tables = PrefixCaching
    settings = {"num_cpu_blocks": 0, "scheduling_policy": config.get("policy", "fcfs"), **config}
    if engine.startswith("nano"):
        # The recorded one was not asked whether it takes prompts of this length.
        settings["max_model_len"] = None
    built = build(scheduler, settings), build(tables, settings)
    return replay(*built, trace, config.get("max_steps", 1_000_000), audit_every)
