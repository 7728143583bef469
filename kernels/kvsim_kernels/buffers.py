"""What a step tells the kernels, in one allocation on the host and one on the device.

Addresses never change, so captured graphs stay valid, and a step costs one copy. On CPU both are
the same memory.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Fields:
    """Views of one buffer, numpy on the host, tensors on the device.

    `ids`, `positions`, `slots`: int64 [tokens]; `last`: int64 [sequences], the token whose logits
    are sampled; `lengths`: int32 [sequences], of decoding ones; `spans`: int32 [sequences, 4],
    (0, tokens, length, -) of a chunk; `table`: int32 [sequences, blocks]. Every row of the last
    two starts on 16 bytes: a kernel is compiled once, whichever row its pointer is given.
    """

    ids: Any
    positions: Any
    slots: Any
    last: Any
    lengths: Any
    spans: Any
    table: Any


class Buffers:
    """Room for steps of `tokens` tokens and `sequences` sequences of `blocks` blocks."""

    def __init__(
        self, tokens: int, sequences: int, blocks: int, device: str | torch.device
    ) -> None:
        blocks = -(-blocks // 4) * 4
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            **dict.fromkeys(("ids", "positions", "slots"), (torch.int64, (tokens,))),
            "last": (torch.int64, (sequences,)),
            "lengths": (torch.int32, (sequences,)),
            "spans": (torch.int32, (sequences, 4)),
            "table": (torch.int32, (sequences, blocks)),
        }
        self._tokens, self._sequences = tokens, sequences
        cuda = torch.device(device).type == "cuda"
        offsets, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            offsets[name] = end
            # Every field starts on 16 bytes, as kernels expect of their pointers.
            end += -(-dtype.itemsize * int(np.prod(shape)) // 16) * 16
        self._row_bytes, self._table_at = 4 * blocks, offsets["table"]
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=cuda)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device) if cuda else self._host

        def views(flat: torch.Tensor) -> dict[str, torch.Tensor]:
            found = {}
            for name, (dtype, shape) in shapes.items():
                size = dtype.itemsize * int(np.prod(shape))
                part = flat[offsets[name] : offsets[name] + size]
                found[name] = part.view(dtype).view(shape)
            return found

        self.host = Fields(**{name: view.numpy() for name, view in views(self._host).items()})
        self.device = Fields(**views(self._device))

    def require(self, tokens: int, sequences: int) -> None:
        """Raises ValueError for a step that does not fit."""
        if tokens > self._tokens or sequences > self._sequences:
            raise ValueError(
                f"a step of {tokens} tokens and {sequences} sequences exceeds the buffers of"
                f" {self._tokens} tokens and {self._sequences} sequences"
            )

    def copy(self, rows: int) -> None:
        """Brings everything up to the first `rows` of the table to the device, asynchronously."""
        if self._device is not self._host:
            end = self._table_at + rows * self._row_bytes
            self._device[:end].copy_(self._host[:end], non_blocking=True)
