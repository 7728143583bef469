"""Azure LLM inference traces: CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`.

Times are dates with seven decimals, line ends CRLF (Azure/AzurePublicDataset, the files of 2023).
There is no content, so no prompt hits the prefix cache.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from kvsim.workload.rows import RowRules
from kvsim.workload.source import MAX_TOKENS, Source, shown
from kvsim.workload.trace import Row, Trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_NS_PER_S = 1_000_000_000
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)


def read(source: Source) -> Trace:
    """An Azure trace; arrivals count from its first row, whose time becomes `origin`.

    Raises `TraceError` at the first line that is wrong.
    """
    lines = source.lines()
    _check_header(source, next(lines))
    rules = RowRules(source)
    origin, origin_ns = "", 0
    for line in lines:
        time, *lengths = _cells(source, line)
        time_ns = _nanoseconds(source, time)
        if not rules.rows:
            origin, origin_ns = time, time_ns
        rules.check_order(time_ns - origin_ns, COLUMNS[0], time)
        input_length, output_length = (
            _tokens(source, column, cell) for column, cell in zip(COLUMNS[1:], lengths, strict=True)
        )
        rules.check_total(input_length, output_length, COLUMNS[1])
        rules.append(
            Row(
                index=len(rules.rows),
                id=str(len(rules.rows)),
                line=source.line,
                arrival_ns=time_ns - origin_ns,
                input_length=input_length,
                output_length=output_length,
            )
        )
    if not rules.rows:
        raise source.error("no requests after the header; add one request per line")
    return Trace(
        path=source.path,
        format="azure",
        sha256=source.sha256,
        rows=rules.rows,
        origin=origin.replace(" ", "T"),
        source={"format": "azure", "file": Path(source.path).name, "sha256": source.sha256},
    )


def _check_header(source: Source, line: str) -> None:
    found = tuple(line.split(","))
    if found != COLUMNS:
        what = f"columns {shown(','.join(found))}, expected {','.join(COLUMNS)}"
        raise source.error(f"{what}; rename or drop columns")


def _cells(source: Source, line: str) -> list[str]:
    cells = line.split(",")
    if len(cells) != len(COLUMNS):
        what = f"{len(cells)} cells, expected {len(COLUMNS)}: {','.join(COLUMNS)}"
        raise source.error(f"{what}; fix the line")
    return cells


def _nanoseconds(source: Source, cell: str) -> int:
    """Nanoseconds since 1970, exact to the last decimal."""
    match = _TIME.fullmatch(cell)
    if match is None:
        what = f"{shown(cell)} is not a time YYYY-MM-DD HH:MM:SS.fffffff"
        raise source.error(f"{what}; fix it", COLUMNS[0])
    second, fraction, zone = match.groups()
    try:
        return _second(second, zone or "") * _NS_PER_S + int((fraction or "0").ljust(9, "0"))
    except (ValueError, OverflowError):
        raise source.error(f"{shown(cell)} is not a date; fix it", COLUMNS[0]) from None


@lru_cache(maxsize=1024)
def _second(text: str, zone: str) -> int:
    time = datetime.fromisoformat(text + zone)
    return int((time if zone else time.replace(tzinfo=UTC)).timestamp())


def _tokens(source: Source, column: str, cell: str) -> int:
    if cell.isascii() and cell.isdecimal() and len(cell) <= 18 and 1 <= int(cell) <= MAX_TOKENS:
        return int(cell)
    if cell.isascii() and cell.isdecimal() and len(cell.lstrip("0")) > 7:
        raise source.error(f"{shown(cell)} is above {MAX_TOKENS}; give less", column)
    raise source.error(f"{shown(cell)} is not an integer >= 1; fix it", column)
