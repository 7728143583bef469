"""Block swap between device and host: one asynchronous copy per piece of a block.

The layout decides the granularity, and the granularity the speed: a 16-token block of a 32-layer
model is 64 copies of 32 KiB in layout "layer" and a single one of 2 MiB in layout "cross". Host
pools should be allocated with `pin_memory=True`; without it the copies block. The same code moves
blocks between two CPU pools, which is how it is tested without a device.
"""

from collections.abc import Sequence

from kvsim_kernels.pages import KVPool


def swap_blocks(source: KVPool, target: KVPool, pairs: Sequence[tuple[int, int]]) -> int:
    """Copies block i of `source` to block j of `target` for every pair (i, j).

    The copies are queued on the current stream; synchronise before host memory is read or blocks
    are reused. Returns how many copies were issued. Raises ValueError when the pools' blocks
    differ or a block id is out of range.
    """
    source.require_same_blocks(target)
    for read, written in pairs:
        if not (0 <= read < source.num_blocks and 0 <= written < target.num_blocks):
            raise ValueError(f"no such block in the pools: {read} -> {written}")
    sources, targets = source.words(), target.words()
    for read, written in pairs:
        for piece in range(sources.shape[0]):
            targets[piece, written].copy_(sources[piece, read], non_blocking=True)
    return len(pairs) * sources.shape[0]
