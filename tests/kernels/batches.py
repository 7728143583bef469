"""Random paged batches on poisoned memory, and how far a result may be from the oracle.

Test modules import this module first: it skips them where torch or triton is missing.
"""

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: kernels)")
pytest.importorskip("triton", reason="triton is not installed (extra: kernels)")

from kvsim_kernels.pages import KVPool, Pages  # noqa: E402 - needs torch

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DTYPES = tuple(BOUNDS)


@dataclass(frozen=True)
class Shape:
    """Geometry of a test batch; defaults are small but exercise grouped heads and strides."""

    heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    layout: str = "cross"
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    poison: float = NAN
    shared_blocks: int = 0


def random_pages(lengths: list[int], shape: Shape, generator: torch.Generator) -> Pages:
    """Pages of layer 1 of 2: a poisoned pool in which only the listed tokens hold numbers.

    Blocks are handed out in random order; the first `shared_blocks` of every sequence are common.
    Block 0 belongs to nobody, and table entries past a sequence's end point at it.
    """
    used = [-(-length // shape.block_size) for length in lengths]
    num_blocks = 2 + sum(used)
    pool = KVPool.allocate(
        shape.layout,
        num_blocks=num_blocks,
        num_layers=2,
        num_kv_heads=shape.kv_heads,
        block_size=shape.block_size,
        head_size=shape.head_size,
        dtype=shape.kv_dtype or shape.dtype,
    )
    pool.data.copy_(torch.full(pool.data.shape, shape.poison))
    keys, values = pool.layer(1)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    common = [free.pop() for _ in range(shape.shared_blocks)]
    table = torch.zeros(len(lengths), max(used) + 3, dtype=torch.int32)
    for row, length in enumerate(lengths):
        blocks = [*common[: used[row]], *(free.pop() for _ in range(used[row] - len(common)))]
        table[row, : used[row]] = torch.tensor(blocks, dtype=torch.int32)
        for start, block in zip(range(0, length, shape.block_size), blocks, strict=True):
            filled = slice(0, min(shape.block_size, length - start))
            for cache in (keys, values):
                size = (shape.kv_heads, filled.stop, shape.head_size)
                cache[block, :, filled] = torch.randn(size, generator=generator).to(cache.dtype)
    return Pages(keys, values, table, torch.tensor(lengths, dtype=torch.int32))


def random_query(tokens: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Queries [tokens, heads, head_size], a strided slice as a fused QKV product gives."""
    packed = torch.randn(tokens, shape.heads + 2, shape.head_size, generator=generator)
    return packed.to(shape.dtype)[:, : shape.heads]


def on_device(pages: Pages) -> Pages:
    """The same pages on the device under test, strides kept."""
    pool = pages.keys._base if pages.keys._base is not None else pages.keys
    moved = pool.to(DEVICE)
    keys, values = (
        moved.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        for cache in (pages.keys, pages.values)
    )
    return Pages(keys, values, pages.block_table.to(DEVICE), pages.lengths.to(DEVICE))


def assert_close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Every row within the bound of its dtype, as relative L2 and relative to the largest entry.

    Rows whose expected value is zero must be exactly zero. NaN anywhere fails.
    """
    out, bound = out.detach().double().cpu(), BOUNDS[dtype]
    assert bool(out.isfinite().all()), "the result holds NaN or infinity"
    difference, size = (out - expected).flatten(1), expected.flatten(1)
    relative = difference.norm(dim=1) - bound * size.norm(dim=1)
    assert bool((relative <= 0).all()), f"relative error above {bound}"
    assert difference.abs().max() <= bound * size.abs().max()
