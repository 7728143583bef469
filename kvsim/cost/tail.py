"""What uneven decode batches take longer than even ones of the same mean length.

FlashAttention-2 reads each sequence with one thread block per head, unless it splits the keys and
values of a decode launch. So towards the end of a launch, when few long sequences are left, they go
on at the pace of a thread block while the rest of the GPU is idle. Take k sequences that are left:
a token of each takes the longer of

    alone_ns        a thread block that nobody disturbs
    k x share_ns    the whole GPU, which k sequences share

With lengths L1 >= L2 >= ... a launch takes the sum over k of (L_k - L_{k+1}) times that. The table
holds this time for even batches; what is added here is the difference to that of an even batch:

    sum over k of (L_k - L_{k+1}) x max(0, alone_ns - k x share_ns), less the same of the mean

In a step with prompts, each `tile` of a chunk counts as one more sequence, as long as the context
that it sees: decodes that last no longer than the prompt hold nobody up. While a batch only
decodes, its differences stay what they are, and so does the term.

Source: FlashAttention-2, `num_splits_heuristic` (no split from 0.8 x 2 x multiprocessors work items
on) and `run_mha_fwd_splitkv_dispatch` (64 queries a block), github.com/Dao-AILab/flash-attention,
`csrc/flash_attn`; vLLM passes paged caches to these kernels, and steps with prompts never split.
Measured against uneven batches, it is held in `Profile.error["uneven"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from kvsim.cost.profile import Tail

MOST = 15
"""Most sequences that are told apart from an even batch."""


class Uneven:
    """Times of one layer for a `Tail`."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        count = min(int(tail.alone_ns / tail.share_ns), MOST) if tail.share_ns else MOST
        excess = [tail.alone_ns - k * tail.share_ns for k in range(1, count + 1)]
        self._excess = [ns for ns in excess if ns > 0]
        last = self._excess[-1:]
        self._weights = [b - a for a, b in zip([0.0, *self._excess], self._excess, strict=False)]
        self._weights += [-ns for ns in last]
        self.longest = len(self._weights)
        """How many of the longest lengths matter."""

    def decode_us(self, sequences: int, context_tokens: int, longest: Sequence[int]) -> float:
        """Microseconds that a decode launch of `sequences` takes longer.

        `context_tokens` is the sum of their lengths, `longest` the first in descending order.
        """
        if sequences < self._tail.unsplit_seqs or sequences < 2:
            return 0.0
        excess = self._excess
        ns = 0.0
        for each, length, following in zip(excess, longest, longest[1:], strict=False):
            ns += (length - following) * each
        if sequences <= len(excess):
            shortest = longest[sequences - 1]
            ns += (sequences * shortest - context_tokens) / sequences * excess[sequences - 1]
        return ns / 1000

    def mixed_us(
        self,
        chunks: Sequence[tuple[int, int]],
        sequences: int,
        context_tokens: int,
        longest: Sequence[int],
    ) -> float:
        """As `decode_us`, of a launch that also serves chunks: (tokens, tokens before them)."""
        tile, most = self._tail.tile, self.longest
        tiles: list[float] = []
        for new, context in chunks:
            tiles += range(context + new, context, -tile)[:most]
        mean, weights = context_tokens / sequences, self._weights
        even = [*tiles, *[mean] * min(sequences, most)]
        even.sort(reverse=True)
        tiles += longest
        tiles.sort(reverse=True)
        ns: float = sum(map(mul, weights, tiles)) - sum(map(mul, weights, even))
        return ns / 1000
