"""Makes the requests of a run from the rows of a trace, each when it is first looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from kvsim.core.request import PLAIN, PREFILL, Options, Request
from kvsim.workload.columns import bare
from kvsim.workload.keys import Streams, streams
from kvsim.workload.source import NS_PER_S
from kvsim.workload.trace import Row, Trace


class Requests(Sequence[Request]):
    """New requests for the rows of a trace, in order; `let_go` drops a request that is over."""

    def __init__(
        self,
        rows: Sequence[Row],
        streams: Streams | None,
        *,
        n: int = 1,
        ignore_eos: bool = False,
        kv_transfer: str = "",
    ) -> None:
        """`streams`: block identities of each row of the trace, if anybody needs them; `n`: samples
        of each request; `ignore_eos`: clients announce how long outputs become, as benchmarks
        do; `kv_transfer`: as in `Options`. A prefill engine is asked for one token."""
        self._ignore_eos = ignore_eos
        self._kv_transfer = kv_transfer
        self._row = bare(rows)
        self._samples = n
        self.streams = streams
        self._held: list[Request | None] = [None] * len(rows)
        self._over = bytearray(len(rows))
        """1 for a request that was dropped."""

    def __len__(self) -> int:
        return len(self._over)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        held = self._held[index]
        if held is not None:
            return held
        row = self._row(index)
        stream = None if self.streams is None else self.streams[row.index]
        announced = row.output_length if self._ignore_eos else row.max_new_tokens
        plain = not (row.lora or self._kv_transfer)
        request = Request(
            row.index,
            row.id,
            row.input_length,
            stream,
            n=self._samples,
            priority=row.priority,
            session=row.session,
            max_new_tokens=1 if self._kv_transfer == PREFILL else announced,
            ignore_eos=self._ignore_eos or row.ignore_eos,
            options=PLAIN if plain else Options(lora=row.lora or "", kv_transfer=self._kv_transfer),
            extra=_known_of(row),
        )
        self._held[index] = request
        return request

    def admitted(self, index: int) -> bool:
        """Whether a request has been given blocks, or is over."""
        held = self._held[index]
        return bool(self._over[index]) if held is None else held.first_scheduled_ns >= 0

    def let_go(self, request: Request) -> None:
        """Drop a request that is over."""
        self._held[request.index] = None
        self._over[request.index] = 1

    def let_all_go(self) -> None:
        """Drop all requests and their rows, which nothing looks up any more."""
        self._held, self._row = [], ().__getitem__


def _known_of(row: Row) -> dict[str, Any]:
    """What a trace tells policies of a request, beyond what engines know."""
    if row.extra is None and row.tags is None and row.deadline_ns is None:
        return {}
    deadline = {} if row.deadline_ns is None else {"deadline_s": row.deadline_ns / NS_PER_S}
    return {**(row.tags or {}), **deadline, **(row.extra or {})}


def make_requests(
    trace: Trace,
    rows: Sequence[Row],
    *,
    n: int = 1,
    keyed: bool = True,
) -> list[Request]:
    """All requests of `Requests` in a list."""
    return list(Requests(rows, streams(trace) if keyed else None, n=n))
