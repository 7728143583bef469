"""Reads recorded cases: folders with a config, a trace and logs, and files with one case a line."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.conform.record import Record
from kvsim.errors import TraceError
from kvsim.parsing import parse_json

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
    """Cases of a folder of case folders, of one case folder, or of a file with a case a line.

    Raises `TraceError` naming the file where something is missing or is not JSON.
    """
    if path.is_dir():
        folders = [path] if (path / "config.json").exists() else sorted(path.iterdir())
        found = False
        for folder in folders:
            if (folder / "config.json").is_file():
                found = True
                yield _folder(folder, engine)
        if not found:
            raise TraceError(f"{path}: no case folders (with a config.json) in it")
    else:
        for line, row in _json_lines(path):
            if not isinstance(row, dict) or not {"config", "trace"} <= row.keys():
                raise TraceError(f"{path}:{line}: not a case; expected keys config, trace, steps")
            yield Case(
                f"{_stem(path)}-{row.get('seed', line)}",
                row["config"],
                row["trace"],
                row.get("steps"),
            )


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
            yield RouterRun(_stem(path), lines[0][1], [record for _, record in lines[1:]])
            return
        for line, run in lines:
            if not isinstance(run, dict) or not {"header", "records"} <= run.keys():
                raise TraceError(f"{path}:{line}: not a run; expected keys header, records")
            yield RouterRun(run["header"].get("case", str(line)), run["header"], run["records"])
        return
    files = [*path.glob("*.jsonl*"), *path.glob(f"cases/{router}/*.jsonl*")]
    files += path.glob(f"fuzz/{router}.jsonl*")
    if not files:
        raise TraceError(f"{path}: no *.jsonl files, and none in cases/{router} or fuzz")
    for file in sorted(files):
        yield from read_router_runs(file, router)


def read_log(path: Path) -> list[Record]:
    """The records of a step log. Raises `TraceError`."""
    return [row for _, row in _json_lines(path)]


def _folder(folder: Path, engine: str) -> Case:
    config = _json(folder / "config.json")
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


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise TraceError(f"{path}: not JSON: {error}") from None


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise TraceError(f"{path}:{number}: not JSON: {error}") from None


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
