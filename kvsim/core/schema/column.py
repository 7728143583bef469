"""What a column and a table are."""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from typing import NamedTuple

INTEGER, FLOAT, TEXT = "int64", "float64", "string"
"""Types of columns, under the names of pyarrow's types."""


class Source(Enum):
    """What the values of a column come from."""

    STEP = "step"
    STATE = "engine, after composing"
    SGLANG = "SGLang, after composing"
    DRAFTS = "speculative decoding"
    STAGES = "pipeline"
    KERNEL = "ledger: time of the step"
    TRACE = "trace"
    ADAPTERS = "trace that names adapters"
    REQUEST = "request"
    ENDING = "end of the request"
    SECONDS = "nanoseconds"
    PHASE = "difference of instants"
    TIME = "ledger: time of the request"
    PROMPT = "ledger: prompt tokens"
    TRANSITION = "log of transitions"
    BLOCK_MAP = "watcher of blocks"
    ROUTING = "decision of the router"
    HANDOVER = "prefill/decode split"
    LEG = "prefill/decode split: time of the request"


OPTIONAL = (
    *(Source.DRAFTS, Source.STAGES, Source.SGLANG, Source.ADAPTERS),
    *(Source.KERNEL, Source.TIME, Source.PROMPT),
)
"""Sources of which a result has all columns, or none: the ledger, and what few runs have."""


class Column(NamedTuple):
    """One column of a table."""

    name: str
    unit: str
    meaning: str
    source: Source
    type: str = INTEGER
    null: bool = False
    """Whether a value can be null, because the event never happened or is undefined. In memory,
    null is -1."""
    least: int = 0
    """The smallest value of an integer that is not null."""
    label: str = ""
    """The short name of a part of a whole, for display."""
    codes: tuple[tuple[str, str], ...] = ()
    """For values that are indexes: the name and the meaning of each value, from 0 on."""

    @property
    def derived(self) -> bool:
        """Whether only files have the column."""
        return self.source in (Source.SECONDS, Source.PHASE)


class Table(NamedTuple):
    """A Parquet file and its columns, in the file and in memory."""

    name: str
    """Name of the file, without its suffix."""
    about: str
    """What a row stands for, and what several columns have in common."""
    columns: tuple[Column, ...]

    def names(self, *sources: Source) -> tuple[str, ...]:
        """Returns the names of the columns that come from these sources, in order."""
        return tuple(column.name for column in self.columns if column.source in sources)

    def labels(self, source: Source) -> dict[str, str]:
        """Returns column → label for the columns of this source that have a label."""
        return {c.name: c.label for c in self.columns if c.source is source and c.label}

    def expected(self, names: Container[str]) -> tuple[Column, ...]:
        """Returns the columns that a result must have if it has `names`."""
        kept = {column.source for column in self.columns if column.name in names}
        return tuple(c for c in self.columns if c.source not in OPTIONAL or c.source in kept)

    def held(self, names: Container[str] = ()) -> tuple[Column, ...]:
        """Returns the `expected` columns that are also held in memory."""
        return tuple(column for column in self.expected(names) if not column.derived)


def part(name: str, label: str, meaning: str, source: Source) -> Column:
    """Returns a column that is a part of a whole. Its name ends with its unit."""
    return Column(name, name.rpartition("_")[2], meaning, source, label=label)


def seconds(of: str) -> Column:
    """Returns a column that holds the values of `{of}_ns` in seconds."""
    return Column(f"{of}_s", "s", f"`{of}_ns` in seconds", Source.SECONDS, FLOAT, null=True)
