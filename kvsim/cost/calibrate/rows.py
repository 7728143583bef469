"""Reads tables of numbers and YAML documents, and reports where they are faulty."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from kvsim.errors import ConfigError


def numbers(
    path: Path,
    columns: Sequence[str],
    label: str | None = None,
    usual: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, list[Any]]]:
    """(line, values of `columns`) of every row of a CSV file with a header.

    `label` names a column of text, whose value comes first. `usual` has the values of columns that
    a file may lack. Values are finite and at least 0.
    Raises `ConfigError` that names file, line and column.
    """
    with _opened(path) as file:
        reader = csv.DictReader(file)
        wanted = [*([label] if label else []), *columns]
        known, usual = reader.fieldnames or (), usual or {}
        missing = [name for name in wanted if name not in known and name not in usual]
        if missing:
            raise ConfigError(f"{path}:1: no column {missing[0]!r}; a header names the columns")
        for each in reader:
            row = {**usual, **each}
            values: list[Any] = [row[label]] if label else []
            values += [_number(path, reader.line_num, name, row[name]) for name in columns]
            yield reader.line_num, values


def columns(path: Path) -> list[str]:
    """The names in the header of a CSV file. Raises `ConfigError` if it cannot be read."""
    with _opened(path) as file:
        return next(csv.reader(file), [])


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not CSV: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The table of a YAML file, or a `ConfigError` with its line."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected a table of keys, got a {type(table).__name__}")
    return table


def _number(path: Path, line: int, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{path}:{line}: {name}: expected a number of at least 0, got {text!r}")
    return value
