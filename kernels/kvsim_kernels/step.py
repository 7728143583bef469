"""One engine step as a forward pass is given it, in plain values; no torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Blocks = Sequence[int] | np.ndarray
"""Block ids of one sequence in order; an int32 array is copied fastest."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of one prompt: `tokens` follow the `start` tokens already in the pool.

    `table` covers start + len(tokens) tokens. `samples`: the prompt ends here, so a token is made.
    """

    table: Blocks
    start: int
    tokens: Sequence[int] | np.ndarray
    samples: bool = True


@dataclass(frozen=True)
class Step:
    """What one engine step runs, in plain values.

    `tables`, `lengths`, `tokens`: decoding sequences; a length counts the new token, which is
    written to the pool by this step. `copies`: (source, target) blocks on the device; `swaps_out`:
    (device, host) blocks; `swaps_in`: (host, device) blocks. All three happen before the model
    runs, in the order swaps out, swaps in, copies.
    """

    tables: Sequence[Blocks] = ()
    lengths: Sequence[int] = ()
    tokens: Sequence[int] = ()
    chunks: Sequence[Chunk] = ()
    copies: Sequence[tuple[int, int]] = ()
    swaps_out: Sequence[tuple[int, int]] = ()
    swaps_in: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Batch:
    """How a prepared step is launched; its numbers lie in the device buffers."""

    decodes: int
    rows: int
    """Rows of the decode part, padding included."""
    chunks: tuple[tuple[int, int, int], ...]
    """(first token, end, length of the sequence) of each chunk."""
    samples: int
    """Rows of logits; 0 where no chunk ends its prompt."""
    longest: int
    """Least maximum of decoding lengths that the launch must allow for."""
    graph: bool

    @property
    def tokens(self) -> int:
        """Tokens that the dense part computes."""
        return self.chunks[-1][1] if self.chunks else self.rows
