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

from collections.abc import Callable, Sequence

from kvsim.cost.profile import Tail
from kvsim.sums import added

MOST = 15
"""Most sequences that are told apart from an even batch."""


class Uneven:
    """Times of one layer for a `Tail`, in whole picoseconds per token, so that sums are exact."""

    def __init__(self, tail: Tail) -> None:
        self._unsplit_seqs, self._tile = tail.unsplit_seqs, tail.tile
        self._alone, self._share = round(1000 * tail.alone_ns), round(1000 * tail.share_ns)
        self._count = min(self._alone // self._share, MOST) if self._share else MOST
        """Number of remaining sequences up to which they do not fill the GPU."""
        self._rest = self._alone - self._count * self._share
        self.longest = self._count + 1
        """How many of the longest lengths matter."""

    def decode_us(self, sequences: int, context_tokens: int, longest: Sequence[int]) -> float:
        """Microseconds that a decode launch of `sequences` takes longer.

        `context_tokens` is the sum of their lengths, `longest` the first in descending order.
        """
        if sequences < self._unsplit_seqs:
            return 0.0
        if sequences <= self._count:
            ahead = sequences * longest[0] - context_tokens  # of the mean, times sequences
            return self._alone * ahead / sequences / 1e6
        return self._held_up(longest) / 1e6

    def mixed_us(
        self,
        chunks: Sequence[tuple[int, int]],
        sequences: int,
        context_tokens: int,
        longest: Sequence[int],
    ) -> float:
        """Microseconds that a launch with chunks takes longer. A chunk is (tokens, tokens before
        them)."""
        if sequences >= self.longest and len(chunks) == 1:
            return self._beside_one(*chunks[0], context_tokens / sequences, longest) / 1e6
        tile, most, mean = self._tile, self.longest, context_tokens / sequences
        last = longest[-1] if sequences >= most else 0
        highest = max([new + context for new, context in chunks])
        if highest <= last and highest <= mean:
            return self._held_up(longest) / 1e6
        least = int(min(last, mean))  # what lasts no longer changes neither sum
        tiles: list[float] = []
        for new, context in chunks:
            tiles += range(context + new, max(context, least), -tile)[:most]
        lengths = sorted([*longest, *tiles], reverse=True) if highest > last else longest
        held_up = self._held_up(lengths)
        if highest > mean or sequences < most:
            even = [*tiles, *[mean] * min(sequences, most)]
            even.sort(reverse=True)
            held_up -= self._held_up(even, added)
        return held_up / 1e6

    def _beside_one(self, new: int, context: int, mean: float, longest: Sequence[int]) -> float:
        """Picoseconds beside one chunk, for as many sequences as matter or more.

        As `mixed_us` in general; but tiles fall evenly, so that those longer than the mean need no
        list.
        """
        count, tile, highest = self._count, self._tile, new + context
        lengths: Sequence[float] = longest
        if highest > (least := longest[count]):
            tiles = range(highest, context if context > least else least, -tile)[: count + 1]
            lengths = sorted([*longest, *tiles], reverse=True)
        held_up = self._held_up(lengths)
        if highest > mean:
            shortest = context if context > mean else int(mean)
            above = min(-(-(highest - shortest) // tile), count + 1)
            inside = above if above < count else count
            even = inside * highest - tile * inside * (inside - 1) // 2 + (count - inside) * mean
            last = mean if above <= count else highest - count * tile
            held_up -= self._alone * highest - self._share * even - self._rest * last
        return held_up

    def _held_up(
        self, longest: Sequence[float], add: Callable[[Sequence[float]], float] = sum
    ) -> float:
        """The sum over k of (L_k - L_{k+1}) x max(0, alone - k x share); absent lengths are 0.

        `add` adds lengths, which are whole numbers but for the mean."""
        count = self._count
        ps = self._alone * longest[0] - self._share * add(longest[:count])
        return ps - self._rest * longest[count] if len(longest) > count else ps
