"""Keeps the record of a real engine: the time of every step, and a digest of the schedule.

Settings and step times decide a run, so only the times are kept. The simulator reproduces
everything else: it runs again with these times and gets the same schedule, which `digest` proves.
```
{"schema": "kvsim.recording/1", "kvsim_version", "device", "software", "model", "engine", "setup",
 "policies": [{"name", "real": Run, "repeat": Run, "replay": Run}]}
Run: {"end_ns", "digest", "step_ns": [...], "swap_ns": [...]}
```
`swap_ns` has an entry per copy between the pools; in a step, out comes before in. `repeat` is an
independent run; `replay` runs the same plans as `real`.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvsim.errors import ConfigError
from kvsim.settings.parsing import parse_json
from kvsim.writing import write_text

SCHEMA = "kvsim.recording/1"
KEYS = ("kvsim_version", "device", "software", "model", "engine", "setup", "policies")
RUNS = ("real", "repeat", "replay")

MARKS = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns", "num_preemptions")
"""Figures of a request that identify a schedule."""


def digest(marks: Iterable[Iterable[int]]) -> str:
    """A hash over one column of the requests' figures for each of `MARKS`."""
    total = hashlib.sha256()
    for column in marks:
        total.update(array("q", column).tobytes())
    return total.hexdigest()[:16]


def write_json(path: str | Path, table: Mapping[str, Any]) -> Path:
    """Write a table, whole or not at all; long lists of numbers stay on one line.

    Raises `OutputError` naming the file.
    """
    return write_text(path, _text(table) + "\n")


def read_json(path: str | Path, *schemas: str) -> dict[str, Any]:
    """A table of one of these schemas. Raises `ConfigError` that names the file and the remedy."""
    try:
        table = parse_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    found = table.get("schema") if isinstance(table, dict) else None
    if found not in schemas:
        said = f"its schema is {found!r}" if found else "it has no schema"
        raise ConfigError(f"{path}: {said}; expected {' or '.join(schemas)}")
    return dict(table)


def require(table: Mapping[str, Any], keys: Iterable[str], path: str | Path) -> None:
    """Raise `ConfigError` for a table that lacks one of these keys."""
    missing = [key for key in keys if key not in table]
    if missing:
        raise ConfigError(f"{path}: {missing[0]}: missing; the file is damaged, make it again")


def _text(value: Any, indent: str = "") -> str:
    """JSON with one key per line, and lists of plain values on one line."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        entries = (f"{inner}{json.dumps(k)}: {_text(v, inner)}" for k, v in value.items())
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        return "[\n" + ",\n".join(inner + _text(v, inner) for v in value) + f"\n{indent}]"
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
