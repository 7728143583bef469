"""The rows of steps, as columns of 64-bit integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from librt.vecs import append, extend, vec
from mypy_extensions import i64

from kvsim.core.plan import RECOMPUTE, Plan
from kvsim.core.schema import STEP_COLUMNS
from kvsim.core.vectors import EMPTY

if TYPE_CHECKING:
    import numpy as np

PIECE_STEPS: Final = 1 << 15
"""Rows that are packed together."""


class StepRows:
    """The rows of one run: `kvsim.core.schema.STEP_COLUMNS`, and the gauges that follow them."""

    num_steps: i64
    _names: tuple[str, ...]
    _cells: vec[i64]
    _packed: Any
    _full: i64

    def __init__(self, gauged: tuple[str, ...] = ()) -> None:
        from kvsim.core.records.packed import PackedColumns

        self.num_steps = 0
        self._names = STEP_COLUMNS + gauged
        self._cells = EMPTY
        self._packed = PackedColumns(self._names)
        self._full = PIECE_STEPS

    def __len__(self) -> int:
        return self.num_steps

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
        cells: vec[i64] = extend(self._cells, row)
        if plan.gauges:
            for value in plan.gauges:
                cells = append(cells, value)
        self._cells = cells
        self.num_steps += 1
        if self.num_steps >= self._full:
            self._seal()

    def columns(self) -> Mapping[str, np.ndarray]:
        """Each column as an int64 array of one entry per step; a long run unpacks it at access."""
        self._seal()
        packed: Mapping[str, np.ndarray] = self._packed
        return packed if self.num_steps > PIECE_STEPS else dict(packed)

    def _seal(self) -> None:
        import numpy as np

        from kvsim.settings import limits

        limits.check_size("steps", self.num_steps, limits.STEPS)
        if len(self._cells):
            cells = np.frombuffer(self._cells, np.int64)  # type: ignore[call-overload]
            self._packed.add(cells.reshape(-1, len(self._names)))
        self._cells = EMPTY
        self._full = self.num_steps + PIECE_STEPS
