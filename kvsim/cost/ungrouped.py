"""What decodes take longer in a launch that also serves a prompt, by FlashAttention-2.

Heads that share keys and values are served together only where every sequence computes one token.
In a launch with a prompt, each query head reads keys and values for itself; the level-2 cache
spares it part of that. With g query heads for each KV head, decodes take

    1 + (g - 1) x (0.23 + 0.77 x max(0, 1 - cache / bytes of one query head per KV head))

times as long as alone. Measured mixed launches, none of which any run of `docs/results` decides
(RTX PRO 6000, g 4 and 8; RTX 4090, g 4; 8,440 launches of at least 8 decodes beside 256 tokens or
more): the median error falls from 29, 52 and 41 % to 14, 11 and 14 %. 0.23 is what they show where
all fits into the cache.

Source: `seqlenq_ngroups_swapped` needs `max_seqlen_q == 1`, github.com/Dao-AILab/flash-attention,
`csrc/flash_attn/flash_api.cpp`; vLLM V1 serves chunks and decodes in one launch
(`v1/attention/backends/flash_attn.py`). FlashAttention 3 groups heads in any launch.
"""

from __future__ import annotations

from kvsim.cost.profile import DecodeGrid

IN_CACHE = 0.23
"""Time of a read that hits the level-2 cache, of one that does not."""
LABEL = "FlashAttention-2 reads keys and values for each query head (kvsim.cost.ungrouped)"


def beside_prompts(grid: DecodeGrid, group: int, row_bytes: int, l2_mib: float) -> DecodeGrid:
    """The grid for launches that serve a prompt, too: `group` query heads for each of the KV heads
    of one GPU. `row_bytes`: a key and a value of one token and one head."""
    rows = [
        [
            us * _longer(group, n * ctx * row_bytes, l2_mib)
            for us, ctx in zip(row, grid.ctx, strict=False)
        ]
        for n, row in zip(grid.x, grid.us, strict=True)
    ]
    return DecodeGrid(grid.x, grid.ctx, rows)


def _longer(group: int, read_bytes: float, l2_mib: float) -> float:
    missed = max(0.0, 1 - l2_mib * 2**20 / read_bytes) if read_bytes else 0.0
    return 1 + (group - 1) * (IN_CACHE + (1 - IN_CACHE) * missed)
