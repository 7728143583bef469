"""What happened, step by step, as packed integers.

One row per step, written once by the replica; columns are listed in `STEP_COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import TYPE_CHECKING

from kvsim.schema import step_row

if TYPE_CHECKING:
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

pack = Struct(f"{len(STEP_COLUMNS)}q").pack
"""One row as bytes, for `Recorder.packed`."""


class Recorder:
    """Keeps the rows of one run, packed (`kvsim.packed`)."""

    def __init__(self, block_size: int = 1) -> None:
        """`block_size`: tokens per block, for `decodes`."""
        from kvsim.packed import PackedColumns

        self._block_size = block_size
        self._rows = bytearray()
        """What is not packed yet, as consecutive 64-bit integers."""
        self._steps: list[int] = []
        """For each of these rows 0, or how many decode steps it stands for (`decodes`)."""
        self._ends_ns: list[int] = []
        """When these steps end, and how many blocks each of them opens."""
        self._opened: list[int] = []
        self._columns = PackedColumns(STEP_COLUMNS)
        self._number = 0

    def step(self, row: tuple[int, ...]) -> None:
        """Append one row, in the order of `STEP_COLUMNS`."""
        self.packed(pack(*row))

    def packed(self, row: bytes) -> None:
        """Append one row as `pack` gives it."""
        self._rows += row
        self._steps.append(0)
        self._number += 1
        if self._number - self._columns.rows >= PIECE_STEPS:
            self._seal()

    def record(self, **columns: int) -> None:
        """Append one step, given by its columns."""
        self.packed(step_row(**columns))

    def decodes(self, row: bytes, ends_ns: list[int], opened: list[int]) -> None:
        """Append pure decode steps in a row, which end then and open so many blocks.

        `row` is that of the first, but for the blocks and empty slots, which are those before it,
        and for `finished`, which is of the last.
        """
        self._rows += row
        self._steps.append(len(ends_ns))
        self._ends_ns += ends_ns
        self._opened += opened
        self._number += len(ends_ns)
        if self._number - self._columns.rows >= PIECE_STEPS:
            self._seal()

    def __len__(self) -> int:
        return self._number

    def columns(self) -> Mapping[str, np.ndarray]:
        """Each column as an int64 array of one entry per step; a long run unpacks it at access."""
        if self._steps:
            self._seal()
        columns = self._columns
        return columns if columns.rows > PIECE_STEPS else dict(columns)

    def _seal(self) -> None:
        import numpy as np

        rows = np.frombuffer(self._rows, np.int64).reshape(-1, len(STEP_COLUMNS))
        columns = unfold(rows, self._steps, self._ends_ns, self._opened, self._block_size)
        self._columns.add(columns.T)
        self._rows, self._steps, self._ends_ns, self._opened = bytearray(), [], [], []


def unfold(
    rows: np.ndarray, steps: list[int], ends_ns: list[int], opened: list[int], block_size: int
) -> np.ndarray:
    """The columns of rows of which some stand for decode steps in a row (`Recorder.decodes`).

    `rows` has the shape (rows, columns), the answer (columns, steps).
    """
    import numpy as np

    number = np.array(steps)
    columns = np.repeat(np.ascontiguousarray(rows.T), np.maximum(number, 1), axis=1)
    if not ends_ns:
        return columns
    column = dict(zip(STEP_COLUMNS, columns, strict=True))
    folded = np.repeat(number > 0, np.maximum(number, 1))
    number = number[number > 0]
    first = np.cumsum(number) - number
    place = np.arange(len(ends_ns)) - np.repeat(first, number)
    end_ns, blocks = np.array(ends_ns), np.cumsum(opened)
    blocks -= np.repeat(blocks[first] - np.array(opened)[first], number)
    start_ns = np.concatenate([end_ns[:1], end_ns[:-1]])
    start_ns[first] = column["start_ns"][folded][first]
    tokens = column["decode_seqs"][folded]
    blank = column["free_blocks"][folded]
    column["start_ns"][folded] = start_ns
    column["end_ns"][folded] = end_ns
    column["context_tokens"][folded] += place * tokens
    column["used_blocks"][folded] += blocks
    column["free_blocks"][folded] = np.maximum(blank - blocks, 0)
    column["cached_blocks"][folded] -= np.maximum(blocks - blank, 0)
    column["empty_slots"][folded] += block_size * blocks - (place + 1) * tokens
    column["finished"][folded] *= place == np.repeat(number, number) - 1
    return columns
