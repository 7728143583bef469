"""How layers of compressed attention fill the blocks of a pool, as vLLM plans it (DeepSeek-V4).

| what is kept | tokens of a block | of which tokens |
|---|---|---|
| vectors of 4 and of 128 tokens, keys of the indexer | 256 | all |
| vectors of single tokens | 64 | the window |
| states of compressing 4 tokens | 4 | the last 8 |
| states of compressing 128 tokens | 8 | the last 128 |

Each has block tables of its own, in one pool. Layers stand in as many groups as make their pages
fit together, and a block has room for those of the widest group.

Sources: vLLM 0.33.0, v1/core/kv_cache_planning.py, `_get_packed_kv_cache_groups`;
models/deepseek_v4/compressor.py, `CompressorStateCache`; v1/attention/backends/mla/sparse_swa.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvsim.machine.models import Model
from kvsim.settings.versions import Release

PACKED_TOKENS = 256
"""Of a block of what is compressed; the only size that its kernels take."""
_PAGE_BYTES = 576
"""Pages are multiples of it."""
_WINDOW_TOKENS = 64
_STATE_BYTES = 4
"""Of an element of a state."""


class Packed(NamedTuple):
    """Layers of compressed attention that share a block table."""

    block_size: int
    window: int | None
    """Tokens that they keep; None: all."""
    pages: tuple[tuple[int, int], ...]
    """Bytes of a page, and how many layers have one in a block."""

    @property
    def used_bytes(self) -> int:
        """What a block of theirs holds."""
        return sum(size * layers for size, layers in self.pages)

    @property
    def layers(self) -> int:
        """The most layers with pages of one size."""
        return max(layers for _, layers in self.pages)

    @property
    def even(self) -> bool:
        """Whether as many layers have pages of each size."""
        return len({layers for _, layers in self.pages}) == 1


def packed_groups(model: Model, stage: range, drafts: bool) -> tuple[Packed, ...]:
    """The groups of the layers of a pipeline stage; what keeps all tokens comes first.

    With `drafts`, a drafter's layer is among those that keep a window alone.
    """
    parts, index, width = model.compressed, model.indexer, model.head_dim
    assert parts is not None and index is not None
    ratios = Counter(parts.compress_ratios[layer] for layer in stage)
    vector, key = parts.vector_bytes(width), index.group(1).further_bytes
    # Keys and scores are summed up; windows of 4 overlap, so they have twice as many.
    fours, many = 4 * width * _STATE_BYTES, 2 * width * _STATE_BYTES
    found = (
        _pages(
            (PACKED_TOKENS, None),
            (PACKED_TOKENS // 4 * vector, ratios[4]),
            (PACKED_TOKENS // 4 * key, ratios[4]),
            (PACKED_TOKENS // 128 * vector, ratios[128]),
        ),
        _pages(
            (_WINDOW_TOKENS, model.sliding_window), (_WINDOW_TOKENS * vector, len(stage) + drafts)
        ),
        _pages(
            (4, 8),
            (4 * fours, ratios[4]),
            (4 * 4 * index.index_head_dim * _STATE_BYTES, ratios[4]),
        ),
        _pages((8, 128), (8 * many, ratios[128])),
    )
    return _split([each for each in found if each.pages])


def _pages(keeps: tuple[int, int | None], *pages: tuple[int, int]) -> Packed:
    padded = ((-(-size // _PAGE_BYTES) * _PAGE_BYTES, layers) for size, layers in pages if layers)
    return Packed(*keeps, tuple(padded))


def _split(found: list[Packed]) -> tuple[Packed, ...]:
    """Cut those with many layers, so that little room is left over in their last groups."""
    even = [each.layers for each in found if each.even]
    least = max((each.layers for each in found if each.even and len(each.pages) > 1), default=1)
    size = min(range(least, max(even) + 1), key=lambda n: (sum(-each % n for each in even), -n))
    groups = []
    for each in found:
        number = -(-each.layers // size) if each.even else 1
        for place in range(number):
            pages = ((page, len(range(place, layers, number))) for page, layers in each.pages)
            groups.append(each._replace(pages=tuple(pages)))
    return tuple(groups)


_DENSE_SINCE = (0, 27)
"""Since then, groups fill a block each by itself, and a request takes whole blocks. Before, layers
with equal pages stood in the same places, states padded to the next larger page, and a log counted
the bytes of a request (vLLM 0.26.0 and 0.27.0, v1/core/kv_cache_utils.py)."""


def packed_bytes(groups: Sequence[Packed], version: Release) -> int:
    """Bytes of one block of the pool."""
    if version >= _DENSE_SINCE:
        return max(each.used_bytes for each in groups)
    places = [dict(each.pages) for each in _padded(groups)]
    return sum(size * max(each.get(size, 0) for each in places) for size in places[0])


def packed_request(groups: Sequence[Packed], held: Sequence[int], version: Release) -> int:
    """Blocks that a log counts for a request that holds so many of each group."""
    if version >= _DENSE_SINCE:
        return sum(held)
    used = sum(each.used_bytes * n for each, n in zip(_padded(groups), held, strict=True))
    return -(-used // groups[0].used_bytes)


def _padded(groups: Sequence[Packed]) -> list[Packed]:
    sizes = sorted(size for size, _ in groups[0].pages)
    return [
        each._replace(
            pages=tuple(
                (next(size for size in sizes if size >= page), layers)
                for page, layers in each.pages
            )
        )
        for each in groups
    ]
