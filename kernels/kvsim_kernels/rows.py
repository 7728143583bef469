"""The rows of a sweep in a file that survives a kill: one JSON object a line, written at once.

The first line says on what the rows were measured; a sweep goes on only where that is equal. A last
line without its end was cut off by a kill and is dropped. No torch here.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = "kvsim.rows/1"

Row = dict[str, Any]

NOT_COMPARED = ("created", "git")
"""Keys of the first line in which two sessions of one sweep may differ."""


class RowsError(ValueError):
    """The file cannot be read or continued; the text is one line with the remedy."""


def identity(row: Mapping[str, Any]) -> str:
    """What a row measures: equal rows are measured once."""
    keys = ("kernel", "method", "split", "shape", "session", "round")
    return json.dumps({key: row[key] for key in keys if key in row}, sort_keys=True)


def read_rows(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """(first line, rows) of a file; raises `RowsError` that names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RowsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RowsError(f"{path}: not UTF-8: {error}") from None
    lines = text.split("\n")[:-1]
    parsed = [_parsed(path, number, line) for number, line in enumerate(lines, 1)]
    if not parsed or parsed[0].get("schema") != SCHEMA:
        raise RowsError(f"{path}:1: not the rows of a calibration (no schema {SCHEMA!r})")
    for number, row in enumerate(parsed[1:], 2):
        missing = [key for key in ("kernel", "method", "split", "shape", "us") if key not in row]
        if missing:
            raise RowsError(f"{path}:{number}: {missing[0]}: missing")
    return parsed[0], parsed[1:]


class RowSet:
    """Rows by what they measure, in an order of their own."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rounds: dict[str, list[Row]] = {}
        for row in sorted(rows, key=identity):
            rounds.setdefault(identity({**row, "round": 0}), []).append(row)
        self.all = [_merged(found) for found in rounds.values()]

    def of(self, kernel: str, split: str = "fit", method: str | None = None) -> list[Row]:
        """Rows of one kernel, without those of decode batches of unequal lengths."""
        found = self._of(kernel, split, method)
        return [row for row in found if not {"seed", "long"} & row["shape"].keys()]

    def unequal(self, kernel: str, split: str) -> list[Row]:
        """Rows of decode batches of unequal lengths, scattered as in engines."""
        return [row for row in self._of(kernel, split, "alone") if "seed" in row["shape"]]

    def uneven(self, kernel: str, split: str) -> list[Row]:
        """Rows of decode batches of few long sequences among short ones."""
        return [row for row in self._of(kernel, split, "alone") if "long" in row["shape"]]

    def steps(self, split: str) -> list[Row]:
        """Rows of whole steps."""
        return self._of("step", split, "whole")

    def _of(self, kernel: str, split: str, method: str | None) -> list[Row]:
        wanted = (kernel, split)
        found = [row for row in self.all if (row["kernel"], row["split"]) == wanted]
        return [row for row in found if method in (None, row["method"])]


def _merged(rows: list[Row]) -> Row:
    """One row for the rounds of one sample: the least, as neighbours on a machine only add time.

    A difference in situ may be disturbed either way: its median.
    """
    times = sorted(row["us"] for row in rows)
    middle = (len(times) - 1) // 2 if rows[0]["method"] == "insitu" else 0
    chosen = next(row for row in rows if row["us"] == times[middle])
    kept = {key: value for key, value in chosen.items() if key != "round"}
    return kept | ({"rounds_us": times} if len(times) > 1 else {})


class RowStore:
    """Appends rows to a file, and knows those that it already holds."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Opens or creates the file; `header`: what the rows are measured on.

        Raises `RowsError` if the file holds rows of something else.
        """
        self._path = path
        self.header = {"schema": SCHEMA, **header}
        self.rows: list[Row] = []
        if path.exists() and path.stat().st_size:
            self._cut_half_line()
        if path.exists() and path.stat().st_size:
            found, self.rows = read_rows(path)
            self._refuse_other(found)
            self.header = found
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_line(self.header), encoding="utf-8")
        self._known = {identity(row) for row in self.rows}

    def __contains__(self, row: Mapping[str, Any]) -> bool:
        return identity(row) in self._known

    def append(self, row: Row) -> None:
        """Adds one row; it outlives this process from here on."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        self.rows.append(row)
        self._known.add(identity(row))

    @property
    def sessions(self) -> int:
        """How many sessions have measured so far."""
        return 1 + max((row.get("session", 0) for row in self.rows), default=-1)

    def _cut_half_line(self) -> None:
        data = self._path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            with self._path.open("r+b") as file:
                file.truncate(end)

    def _refuse_other(self, found: Mapping[str, Any]) -> None:
        keys = dict.fromkeys([*self.header, *found])
        for key in keys:
            ours, theirs = self.header.get(key), found.get(key)
            if key not in NOT_COMPARED and json.dumps(ours) != json.dumps(theirs):
                raise RowsError(
                    f"{self._path}: holds rows measured with another {key}"
                    f" ({_difference(theirs, ours)}); give another --out, or delete the file"
                )


def _difference(found: Any, wanted: Any) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys([*found, *wanted]):
            if found.get(key) != wanted.get(key):
                return f"{key}: {_difference(found.get(key), wanted.get(key))}"
    return f"there {found!r}, now {wanted!r}"


def _parsed(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RowsError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowsError(f"{path}:{number}: expected an object, got {line[:40]!r}")
    return row


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
