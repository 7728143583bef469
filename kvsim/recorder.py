"""What happened, step by step, as packed integers.

One row per step, written once by the replica; columns are listed in `STEP_COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    import numpy as np

STEP_COLUMNS = (
    "start_ns",  # composed
    "end_ns",  # its tokens exist
    "transfer_ns",  # of which: swap copies on the link
    "link_wait_ns",  # of which: waiting for the link
    "prefill_seqs",  # requests with prompt tokens in this step
    "prefill_tokens",  # prompt tokens computed (prefix hits not counted)
    "cached_tokens",  # prompt tokens whose computation a prefix hit saved
    "decode_seqs",  # sequences that produce one more token
    "context_tokens",  # sum of their lengths, the token of this step included
    "batched_tokens",  # tokens charged to max_num_batched_tokens
    "preempted_recompute",  # requests
    "preempted_swap",  # requests
    "swapped_in",  # requests
    "swap_out_blocks",
    "swap_in_blocks",
    "copied_blocks",  # copy-on-write
    "ignored",  # requests the engine gave up
    "waiting",  # requests in the queue, after composing; likewise below
    "running",
    "swapped",
    "used_blocks",  # GPU blocks in a table of a request
    "cached_blocks",  # GPU blocks in no table whose content may still be hit
    "free_blocks",  # GPU blocks in no table without content
    "cpu_used_blocks",
    "empty_slots",  # token slots of used blocks that hold no token: internal fragmentation
    "stranded_blocks",  # free GPU blocks that cannot serve an admission: external fragmentation
    "blocked",  # why the head of the waiting queue was not admitted: BLOCKED
    "finished",  # requests that ended with this step
)
"""Integer columns of a step row, in order."""

BLOCKED = ("", "slots", "tokens", "blocks", "watermark", "swapped", "preempted")
"""Meaning of column `blocked`: nobody waits or was refused; `max_num_seqs`;
`max_num_batched_tokens`; too few free blocks; enough free blocks, but the watermark holds them;
prompts wait until every swapped request is back; a preemption in this step."""


PIECE_STEPS = 1 << 15
"""Rows that are packed together."""

_ROW_BYTES = 8 * len(STEP_COLUMNS)
_PIECE_BYTES = PIECE_STEPS * _ROW_BYTES
pack = Struct(f"{len(STEP_COLUMNS)}q").pack
"""One row as bytes, for `Recorder.extend_packed`."""


class Recorder:
    """Keeps the rows of one run, packed (`kvsim.packed`)."""

    def __init__(self) -> None:
        from kvsim.packed import PackedColumns

        self._rows = bytearray()
        """What is not packed yet, as consecutive 64-bit integers."""
        self._packed = PackedColumns(STEP_COLUMNS)

    def step(self, row: tuple[int, ...]) -> None:
        """Append one row, in the order of `STEP_COLUMNS`."""
        self._rows += pack(*row)
        if len(self._rows) >= _PIECE_BYTES:
            self._seal()

    def extend(self, rows: np.ndarray | array[int]) -> None:
        """Append whole rows at once: an int64 array of shape (steps, columns), or its numbers."""
        self.extend_packed(rows.tobytes())

    def extend_packed(self, rows: bytes | bytearray) -> None:
        """Append whole rows, each as `pack` gives it."""
        self._rows += rows
        if len(self._rows) >= _PIECE_BYTES:
            self._seal()

    def __len__(self) -> int:
        return self._packed.rows + len(self._rows) // _ROW_BYTES

    def columns(self) -> Mapping[str, np.ndarray]:
        """Each column as an int64 array of one entry per step; a long run unpacks it at access."""
        if self._rows:
            self._seal()
        columns = self._packed
        return columns if columns.rows > PIECE_STEPS else dict(columns)

    def _seal(self) -> None:
        import numpy as np

        self._packed.add(np.frombuffer(self._rows, np.int64).reshape(-1, len(STEP_COLUMNS)))
        self._rows = bytearray()
