"""`python -m kvsim.core.schema > docs/reference/columns.md`."""

from __future__ import annotations

import sys

from kvsim.core.schema import TABLES, Column, Table

_HEAD = """\
# Columns of the result tables

Written by `python -m kvsim.core.schema`; a test holds that it is up to date.

`kvsim run --out DIR` writes these tables as Parquet, `--csv` the first two as CSV, too.
`Result.requests` and `Result.steps` hold the same columns, but those from `nanoseconds` and from a
`difference of instants`; there, -1 stands for null. Instants are counted from the start of the run.
Columns from the ledger are there where a run has kept one, those of SGLang and of speculative
decoding where a run had them.
"""


def reference() -> str:
    """The text of `docs/reference/columns.md`."""
    return "\n".join([_HEAD, *map(_section, TABLES)])


def _section(table: Table) -> str:
    lines = [f"## `{table.name}.parquet`", "", table.about.strip(), ""]
    lines += ["| column | type | unit | meaning | from |", "|---|---|---|---|---|"]
    lines += map(_line, table.columns)
    for column in table.columns:
        if column.codes:
            lines += ["", f"Values of `{column.name}`:", ""]
            lines += [f"- {i}: {_code(*code)}" for i, code in enumerate(column.codes)]
    return "\n".join(lines) + "\n"


def _line(column: Column) -> str:
    label = f"**{column.label}**: " if column.label else ""
    type_ = f"{column.type}, null" if column.null else column.type
    cells = f"`{column.name}`", type_, column.unit, label + column.meaning, column.source.value
    return f"| {' | '.join(cells)} |"


def _code(name: str, meaning: str) -> str:
    return f"`{name}`: {meaning}" if name else meaning


sys.stdout.write(reference())
