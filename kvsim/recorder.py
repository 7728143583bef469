"""What happened, step by step, as packed integers.

One row per step, written once by the replica; columns are listed in `STEP_COLUMNS`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

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


class Recorder:
    """Keeps the rows of one run."""

    def __init__(self) -> None:
        self._rows = array("q")

    def step(self, row: tuple[int, ...]) -> None:
        """Append one row, in the order of `STEP_COLUMNS`."""
        self._rows.extend(row)

    def __len__(self) -> int:
        return len(self._rows) // len(STEP_COLUMNS)

    def columns(self) -> dict[str, np.ndarray]:
        """Each column as an int64 array of one entry per step."""
        import numpy as np

        width = len(STEP_COLUMNS)
        rows = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, width)
        return {name: rows[:, i].copy() for i, name in enumerate(STEP_COLUMNS)}
