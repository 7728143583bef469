"""Looks at the beginning of a file: what its content shows of its format, whatever its name is."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from dataclasses import dataclass

from kvsim.workload.source import Source

PARQUET = "PAR1"
"""The first four bytes of a Parquet file."""
_KEY = re.compile(r'"([^"\\]+)"\s*:')
_SEPARATORS = ",\t;"


@dataclass(frozen=True, slots=True)
class Head:
    """What a recogniser may look at."""

    text: str
    """The first characters of the file, about 64 Ki at most."""
    keys: Set[str]
    """Keys of the first JSON object; empty if the file does not begin with JSON. If that object
    spans lines or is damaged: all keys in `text`, inner ones too. The value of `schema` is one."""
    columns: tuple[str, ...]
    """Cells of the first line, if the file does not begin with JSON."""

    @property
    def is_json(self) -> bool:
        """Whether the file begins as JSON does."""
        return self.text.lstrip()[:1] in ("{", "[")

    @property
    def is_parquet(self) -> bool:
        """Whether this is a Parquet file."""
        return self.text.startswith(PARQUET)

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing, or nothing but white space."""
        return not self.text.strip()


def look(source: Source) -> Head:
    """The head of a file, of which nothing is read."""
    text = source.beginning()
    first = next((line for line in text.splitlines() if line.strip()), "")
    if text.lstrip()[:1] in ("{", "["):
        return Head(text, _keys(first, text), ())
    return Head(text, frozenset(), split_header(first))


def split_header(line: str) -> tuple[str, ...]:
    """The column names in the first line of a CSV file, without quotes around them."""
    return tuple(cell.strip().strip('"') for cell in line.split(separator_of(line)))


def separator_of(header: str) -> str:
    """What separates the columns: a comma, a tab or a semicolon, whichever comes first."""
    return next((each for each in header if each in _SEPARATORS), ",")


def _keys(first: str, text: str) -> Set[str]:
    try:
        table = json.loads(first)
    except (ValueError, RecursionError):
        return frozenset(_KEY.findall(text))
    if not isinstance(table, dict):
        return frozenset(_KEY.findall(text))
    schema = table.get("schema")
    return {*table, schema} if isinstance(schema, str) else table.keys()
