"""Reads logs in which a record is a request that was served: when, and how many tokens it had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvsim.workload.document import read_elements, read_objects
from kvsim.workload.gather import Gathered
from kvsim.workload.source import Source, parse, shown
from kvsim.workload.values import NS_PER_S, date, instant, tokens


class Record(NamedTuple):
    """An object of a log and where it stands in a line or a list, for messages."""

    table: dict[str, Any]
    where: str

    def field(self, key: str) -> str:
        """The name of a key in messages."""
        return f"{self.where}.{key}" if self.where else key


def records(source: Source, within: str = "data") -> Iterator[Record]:
    """The records of a file of JSON Lines, of a JSON list, or in the list that objects have under
    `within`. Raises `TraceError`."""
    if source.beginning().lstrip().startswith("["):
        yield from _listed(source, read_elements(source), "")
        return
    for table in _objects(source):
        if isinstance(inner := table.get(within), list):
            yield from _listed(source, iter(inner), within)
        else:
            yield Record(table, "")


def add_served(
    source: Source,
    gathered: Gathered,
    record: Record,
    counts: tuple[object, object],
    times: tuple[str, str, str],
    names: tuple[str, str, str],
) -> None:
    """Keep a request.

    `counts`: of its prompt and output. `times`: keys of its start, first token and end, of which
    the last two may be missing; dates, or seconds since any moment. `names`: keys of its id,
    session and model.
    """
    if not counts[0] or not counts[1]:
        gathered.drop("they have no prompt or no output")
        return
    start_ns = _moment(source, record, times[0])
    observed = {}
    for key, name in zip(times[1:], ("ttft_s", "e2e_s"), strict=True):
        if record.table.get(key):
            observed[name] = max(0, _moment(source, record, key) - start_ns) / NS_PER_S
    id, session, model = (
        value if isinstance(value := record.table.get(key), str) and value else None
        for key in names
    )
    gathered.add(
        tokens(source, record.field("prompt tokens"), counts[0]),
        tokens(source, record.field("output tokens"), counts[1]),
        time_ns=start_ns,
        id=id,
        session=session,
        model=model,
        observed=observed or None,
    )


def _moment(source: Source, record: Record, key: str) -> int:
    value = record.table.get(key)
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        return date(source, record.field(key), value)
    return instant(source, record.field(key), value, NS_PER_S)


def _objects(source: Source) -> Iterator[dict[str, Any]]:
    first = next((line for line in source.beginning().splitlines() if line.strip()), "")
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        yield from read_objects(source)
        return
    for line in source.lines():
        yield parse(source, line)


def _listed(source: Source, values: Iterator[Any], of: str) -> Iterator[Record]:
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise source.error(f"{shown(value)} is not an object; give one", f"{of}[{number}]", 0)
        yield Record(value, f"{of}[{number}]")
