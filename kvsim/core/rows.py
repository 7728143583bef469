"""The rows of steps and requests, as columns of 64-bit integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from librt.vecs import append, vec
from mypy_extensions import i64

from kvsim.core.plan import RECOMPUTE, Plan
from kvsim.core.records import PackedColumns
from kvsim.core.request import Request
from kvsim.core.schema import REQUEST_COLUMNS, STEP_COLUMNS
from kvsim.core.vectors import longer, zeros

if TYPE_CHECKING:
    import numpy as np

PIECE_ROWS: Final = 1 << 13
"""Rows that are packed together: few enough to stay in the cache of a processor."""

WIDE_ROWS: Final = 1 << 16
"""Steps up to which columns stay unpacked: figures, files and page each read most of them."""


class Packing:
    """Rows of 64-bit integers, which are packed by column, many at a time."""

    num_rows: i64
    packed: Any
    """Their columns (`kvsim.core.records.PackedColumns`), once they are sealed."""
    _cells: vec[i64]
    """The rows that are not packed yet, one after another; it is used again, as new memory takes
    time to come by."""
    _used: i64
    """Numbers of them in it."""
    _most: i64
    """Numbers of a piece."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.num_rows = 0
        self.packed = PackedColumns(names)
        self._cells, self._used = zeros(64 * len(names)), 0
        self._most = PIECE_ROWS * len(names)

    def __len__(self) -> int:
        return self.num_rows

    def keep(self, row: vec[i64]) -> None:
        """Adds a row."""
        cells: vec[i64] = self._cells
        at: i64 = self._used
        self._used += len(row)
        if self._used > len(cells):
            cells = self._cells = longer(cells, len(cells))
        k: i64
        for k in range(len(row)):
            cells[at + k] = row[k]
        self.num_rows += 1
        if self._used >= self._most:
            self.seal()

    def seal(self) -> None:
        """Packs all rows so far."""
        import numpy as np

        if self._used:
            cells = np.frombuffer(self._cells, np.int64, self._used)  # type: ignore[call-overload]
            self.packed.add(cells.reshape(-1, len(self.packed)))
        # Packing has made copies, so the cells can be filled again.
        self._used = 0


class StepRows(Packing):
    """The rows of one run: `kvsim.core.schema.STEP_COLUMNS`, and the gauges that follow them."""

    def __init__(self, gauged: tuple[str, ...] = ()) -> None:
        super().__init__(STEP_COLUMNS + gauged)

    def add(self, plan: Plan, finished: i64) -> None:
        """Adds the row of a step that is over, with which `finished` requests ended. The values
        stand in the order of `STEP_COLUMNS`."""
        copy_ns, wait_ns, flush_ns, rank_wait_ns = plan.moved
        again: i64 = 0
        for _, means in plan.preempted:
            again += means == RECOMPUTE
        row: vec[i64] = vec[i64](
            [
                plan.start_ns,
                plan.end_ns,
                copy_ns,
                wait_ns,
                flush_ns,
                rank_wait_ns,
                plan.num_chunks - plan.num_repairs,
                plan.prefill_tokens,
                plan.cached_tokens,
                plan.decode_seqs,
                plan.context_tokens,
                plan.batched_tokens,
                again,
                len(plan.preempted) - again,
                len(plan.swapped_in),
                len(plan.swaps_out),
                len(plan.swaps_in),
                len(plan.copies),
                len(plan.ignored),
                plan.waiting,
                plan.running,
                plan.swapped,
                plan.used_blocks,
                plan.cached_blocks,
                plan.free_blocks,
                plan.cpu_used_blocks,
                plan.empty_slots,
                plan.stranded_blocks,
                plan.blocked,
                finished,
            ]
        )
        if plan.gauges:
            for value in plan.gauges:
                row = append(row, value)
        self.keep(row)

    def seal(self) -> None:
        from kvsim.settings import limits

        limits.check_size("steps", self.num_rows, limits.STEPS)
        super().seal()

    def columns(self) -> Mapping[str, np.ndarray]:
        """Each column as an int64 array of one entry per step; a long run unpacks it at access."""
        self.seal()
        packed: Mapping[str, np.ndarray] = self.packed
        return packed if self.num_rows > WIDE_ROWS else dict(packed)


class RequestRows(Packing):
    """The figures of requests: `kvsim.core.schema.REQUEST_COLUMNS`."""

    reasons: dict[int, str]
    """Index of a request that was turned away or given up → the reason."""
    _let_go: Callable[[Request], None] | None

    def __init__(self, let_go: Callable[[Request], None] | None = None) -> None:
        """`let_go` is called with each request whose row is kept."""
        super().__init__(REQUEST_COLUMNS)
        self.reasons, self._let_go = {}, let_go

    def add(self, request: Request) -> None:
        """Adds the row of a request that is over, which must not change any more. The values stand
        in the order of `REQUEST_COLUMNS`."""
        self.keep(
            vec[i64](
                [
                    request.index,
                    request.output_tokens,
                    request.n,
                    request.num_preemptions,
                    request.cached_tokens,
                    request.tier1_hit_tokens,
                    request.tier2_hit_tokens,
                    request.recached_tokens,
                    request.recomputed_tokens,
                    request.swapped_out_blocks,
                    request.swapped_in_blocks,
                    request.blocked_steps,
                    request.released_ns,
                    request.client_queue_ns,
                    request.arrival_ns,
                    request.first_scheduled_ns,
                    request.first_token_ns,
                    request.finish_ns,
                ]
            )
        )
        if request.reason:
            self.reasons[request.index] = request.reason
        if self._let_go is not None:
            self._let_go(request)
