"""Stores the results of requests as columns, one request at a time, as they end."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np

from kvsim.core.records.packed import PackedColumns
from kvsim.core.request import ABORTED, Request
from kvsim.core.schema import REQUESTS, TEXT, Source
from kvsim.workload.columns import Rows, column
from kvsim.workload.trace import Row

_PACKED = tuple(column for column in REQUESTS.columns if column.source is Source.REQUEST)
_TRACE = tuple(column for column in REQUESTS.columns if column.source is Source.TRACE)

_values_of = attrgetter(*(column.attribute or column.name for column in _PACKED))
_pack = Struct(f"{len(_PACKED)}q").pack
_STATUS = {"": "completed", ABORTED: ABORTED}
"""Reason of a request → its status; any other was rejected."""
_PIECE_BYTES = 8 * len(_PACKED) << 15
"""Bytes of results that are packed at once."""


class Archive:
    """The results of the requests made from some rows of a trace."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._columns = PackedColumns(tuple(column.name for column in _PACKED))
        self._fresh = bytearray()
        """Results that are not packed yet, as consecutive 64-bit integers."""
        self._reasons: dict[int, str] = {}
        """Index of a rejected request → the reason."""
        self._said: dict[str, Any] = {}
        """Columns that come from the trace."""

    def add(self, request: Request) -> None:
        """Stores the results of a request, which must not change any more."""
        self._fresh += _pack(*_values_of(request))
        if request.reason:
            self._reasons[request.index] = request.reason
        if len(self._fresh) >= _PIECE_BYTES:
            self._seal()

    def missing(self) -> list[int]:
        """Returns the indexes of the rows whose requests are not stored yet."""
        self._seal()
        absent = np.ones(len(self._rows), dtype=bool)
        absent[self._columns["index"]] = False
        return list(map(int, np.flatnonzero(absent)))

    def let_rows_go(self) -> None:
        """Takes over what the rows say of the requests stored, so that their memory may be freed.

        No more requests can be stored.
        """
        self._seal()
        stored = np.sort(self._columns["index"]).tolist()
        for each in _TRACE:
            values = column(self._rows, each.name)
            if len(stored) < len(self._rows):
                values = [values[index] for index in stored]
            if each.type == TEXT:
                self._said[each.name] = [value or "" for value in values]
            else:
                self._said[each.name] = np.array(values, np.int64)
        if not isinstance(self._rows, Rows):
            # Copies, so that the memory of the rows is free once nothing else needs them.
            self._said["id"] = [f"{each} "[:-1] for each in self._said["id"]]
        self._rows = ()

    def column(self, name: str) -> np.ndarray:
        """Returns one of the columns of numbers that requests have, in trace order."""
        self._seal()
        return self._columns[name][np.argsort(self._columns["index"])]

    def columns(self) -> dict[str, Any]:
        """Returns the columns of `REQUESTS` that neither files nor the ledger add, in trace order;
        -1 means null."""
        if not self._said:
            self.let_rows_go()
        order = np.argsort(self._columns["index"])
        columns: dict[str, Any] = {name: self._columns[name][order] for name in self._columns}
        reasons = [self._reasons.get(index, "") for index in columns["index"].tolist()]
        status = [_STATUS.get(reason, "rejected") for reason in reasons]
        return columns | self._said | {"status": status, "reason": reasons}

    def _seal(self) -> None:
        if self._fresh:
            self._columns.add(np.frombuffer(self._fresh, np.int64).reshape(-1, len(_PACKED)))
            self._fresh = bytearray()
