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
that it sees: decodes that end before the prompt delay no other sequence. While a batch only
decodes, its differences stay what they are, and so does the term.

Source: FlashAttention-2, `num_splits_heuristic` (no split from 0.8 x 2 x multiprocessors work items
on) and `run_mha_fwd_splitkv_dispatch` (64 queries a block), github.com/Dao-AILab/flash-attention,
`csrc/flash_attn`; vLLM passes paged caches to these kernels, and steps with prompts never split.
Measured against uneven batches, it is held in `Profile.error["uneven"]`.
"""

from __future__ import annotations

from collections.abc import Sequence

from librt.vecs import vec
from mypy_extensions import i64

from kvsim.cost.profile import Tail

MOST = 15
"""Most sequences that are told apart from an even batch."""


class Uneven:
    """Times of one layer for a `Tail`, in whole picoseconds per token, so that sums are exact."""

    longest: i64
    """How many of the longest lengths matter."""
    _count: i64
    """Number of remaining sequences up to which they do not fill the GPU."""
    _unsplit_seqs: i64
    _tile: i64
    _alone: float
    _share: float
    _rest: float

    def __init__(self, tail: Tail) -> None:
        self._unsplit_seqs, self._tile = tail.unsplit_seqs, tail.tile
        alone, share = round(1000 * tail.alone_ns), round(1000 * tail.share_ns)
        # With more sequences than that, the whole GPU is the limit, not a thread block.
        count = min(alone // share, MOST) if share else MOST
        self._count, self.longest = count, count + 1
        self._alone, self._share = float(alone), float(share)
        self._rest = float(alone - count * share)

    def decode_us(self, sequences: i64, context_tokens: i64, longest: list[int]) -> float:
        """Microseconds that a decode launch of `sequences` takes longer.

        `context_tokens` is the sum of their lengths, `longest` the first in descending order.
        """
        if sequences < self._unsplit_seqs:
            return 0.0
        if sequences <= self._count:
            # All lengths are in both sums, so the shares cancel: alone x (longest - mean) is left.
            ahead = float(sequences * longest[0] - context_tokens)
            return self._alone * ahead / float(sequences) / 1e6
        return self._held_up(self._first(longest)) / 1e6

    def mixed_us(
        self,
        chunks: Sequence[tuple[int, int]],
        sequences: i64,
        context_tokens: i64,
        longest: list[int],
    ) -> float:
        """Microseconds that a launch with chunks takes longer. A chunk is (tokens, tokens before
        them)."""
        mean = float(context_tokens) / float(sequences)
        lengths = self._first(longest)
        highest: i64 = self._add_tiles(lengths, chunks)
        held_up = self._held_up(lengths)
        # The table has what an even batch is held up beside the chunks. Where no chunk outlasts the
        # mean and there are enough decodes, that is nothing.
        if sequences >= self.longest and len(chunks) == 1:
            if float(highest) > mean:
                held_up -= self._even_beside(highest, chunks[0][1], mean)
        elif sequences < self.longest or float(highest) > mean:
            even = self._first([mean] * min(sequences, self.longest))
            self._add_tiles(even, chunks)
            held_up -= self._held_up(even)
        return held_up / 1e6

    def _even_beside(self, highest: i64, context: i64, mean: float) -> float:
        """Picoseconds beside one chunk, `highest` tokens with its context, for an even batch of as
        many sequences as matter or more.

        Tiles fall evenly, so that those longer than the mean need no list.
        """
        count, tile = self._count, self._tile
        shortest: i64 = context if float(context) > mean else i64(mean)
        above: i64 = min(-(-(highest - shortest) // tile), count + 1)
        inside: i64 = min(above, count)
        whole: i64 = inside * highest - tile * inside * (inside - 1) // 2
        even = float(whole) + float(count - inside) * mean
        last = mean if above <= count else float(highest - count * tile)
        return self._alone * float(highest) - self._share * even - self._rest * last

    def _first(self, lengths: list[float] | list[int]) -> vec[float]:
        """The longest that matter, given in descending order; absent ones are 0."""
        first = vec[float]([0.0] * self.longest)
        k: i64
        for k in range(min(len(lengths), self.longest)):
            first[k] = lengths[k]
        return first

    def _add_tiles(self, first: vec[float], chunks: Sequence[tuple[int, int]]) -> i64:
        """Counts the tiles of chunks among the longest. Returns the highest one."""
        highest: i64 = 0
        for new, context in chunks:
            length: i64 = context + new
            highest = max(highest, length)
            while length > context and _put(first, float(length)):
                length -= self._tile
        return highest

    def _held_up(self, longest: vec[float]) -> float:
        """The sum over k of (L_k - L_{k+1}) x max(0, alone - k x share)."""
        k: i64
        # Summed by parts, with c for `_count`: alone L_1 - share (L_1 + ... + L_c) - (alone - c
        # share) L_(c+1).
        total = 0.0
        for k in range(self._count):
            total += longest[k]
        return self._alone * longest[0] - self._share * total - self._rest * longest[self._count]


def _put(first: vec[float], length: float) -> bool:
    """Puts a length among the first ones, which descend. Returns whether it is one of them."""
    k: i64 = len(first) - 1
    if length <= first[k]:
        return False
    while k > 0 and first[k - 1] < length:
        first[k] = first[k - 1]
        k -= 1
    first[k] = length
    return True
