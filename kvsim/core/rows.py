"""The rows of steps, as columns of 64-bit integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from librt.vecs import append, vec
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
        cells: vec[i64] = self._cells
        cells = append(cells, plan.start_ns)
        cells = append(cells, plan.end_ns)
        cells = append(cells, copy_ns)
        cells = append(cells, wait_ns)
        cells = append(cells, flush_ns)
        cells = append(cells, rank_wait_ns)
        cells = append(cells, plan.num_chunks - plan.num_repairs)
        cells = append(cells, plan.prefill_tokens)
        cells = append(cells, plan.cached_tokens)
        cells = append(cells, plan.decode_seqs)
        cells = append(cells, plan.context_tokens)
        cells = append(cells, plan.batched_tokens)
        cells = append(cells, again)
        cells = append(cells, len(plan.preempted) - again)
        cells = append(cells, len(plan.swapped_in))
        cells = append(cells, len(plan.swaps_out))
        cells = append(cells, len(plan.swaps_in))
        cells = append(cells, len(plan.copies))
        cells = append(cells, len(plan.ignored))
        cells = append(cells, plan.waiting)
        cells = append(cells, plan.running)
        cells = append(cells, plan.swapped)
        cells = append(cells, plan.used_blocks)
        cells = append(cells, plan.cached_blocks)
        cells = append(cells, plan.free_blocks)
        cells = append(cells, plan.cpu_used_blocks)
        cells = append(cells, plan.empty_slots)
        cells = append(cells, plan.stranded_blocks)
        cells = append(cells, plan.blocked)
        cells = append(cells, finished)
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
