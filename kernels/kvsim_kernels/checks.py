"""Before anything is timed: the kernels of this geometry compute the right thing on this device.

A few batches in the decoder's own pool: on CUDA the Triton kernels against the torch twins in
float64, on CPU the twins against the oracle. `tests/kernels` checks far more.
"""

from collections.abc import Iterator

import torch

from kvsim_kernels import reference, torch_impl
from kvsim_kernels.forward import TORCH_DTYPES, Decoder
from kvsim_kernels.pages import Pages
from kvsim_kernels.swap import swap_blocks

BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
"""Largest relative L2 error of attention."""


class CheckError(RuntimeError):
    """A kernel computes something else than its reference; nothing it takes may be believed."""


def check(decoder: Decoder) -> dict[str, float]:
    """Relative L2 error of each kernel, 0 where bits must be equal; raises `CheckError`."""
    found = {}
    for name, error in [*_attention(decoder), *_moves(decoder)]:
        bound = BOUNDS[decoder.geometry.dtype] if name.startswith(("decode", "prefill")) else 0.0
        if not error <= bound:
            raise CheckError(f"{name} differs from its reference by {error:.2g}, allowed {bound:g}")
        found[name] = float(f"{error:.3g}")
    return found


@torch.inference_mode()
def _attention(decoder: Decoder) -> Iterator[tuple[str, float]]:
    size, most = decoder.geometry.block_size, decoder.max_seq_len
    wanted = (1, size, size + 1, 511, 512, 513, 1200) if decoder.cuda else (1, size, size + 1, 70)
    lengths = [length for length in wanted if length <= most]
    pages = _pages(decoder, lengths)
    query = _random(decoder, len(lengths))
    truth = torch_impl if decoder.cuda else reference
    wide = query.double()
    expected = truth.decode(wide, pages)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=decoder.device)
    if decoder.triton:
        from kvsim_kernels import triton_decode, triton_prefill

        yield "decode_v1", _error(triton_decode.decode_v1(query, pages), expected)
        yield "decode_v2", _error(triton_decode.decode_v2(query, pages), expected)
    else:
        yield "decode_v1", _error(torch_impl.decode(query, pages), expected)
        yield "decode_v2", _error(torch_impl.prefill(query, starts, pages), expected)
    length = lengths[-1]
    one = _pages(decoder, [length])
    chunk = _random(decoder, max(1, length // 2))
    span = torch.tensor([0, len(chunk)], dtype=torch.int32, device=decoder.device)
    expected = truth.prefill(chunk.double(), span, one)
    if decoder.triton:
        out = triton_prefill.prefill(chunk, span, one, max_query_len=len(chunk))
    else:
        out = torch_impl.prefill(chunk, span, one)
    yield "prefill", _error(out, expected)


@torch.inference_mode()
def _moves(decoder: Decoder) -> Iterator[tuple[str, float]]:
    """Blocks that are copied or swapped out and in again hold the same bits."""
    pool, words = decoder.pool, decoder.pool.words()
    pairs = torch.tensor([[1, 2], [3, 4]], device=decoder.device)
    if decoder.triton:
        from kvsim_kernels import triton_cache

        triton_cache.copy_blocks(pool, pairs)
    else:
        torch_impl.copy_blocks(pool, pairs)
    yield (
        "copy_blocks",
        float((words[:, 1] != words[:, 2]).sum() + (words[:, 3] != words[:, 4]).sum()),
    )
    host = decoder.new_pool(decoder.geometry.sized(num_blocks=2), "cpu")
    kept = words[:, 1].clone()
    swap_blocks(pool, host, [(1, 0)])
    swap_blocks(host, pool, [(0, 5)])
    yield "swap_blocks", float((words[:, 5] != kept).sum())


def _pages(decoder: Decoder, lengths: list[int]) -> Pages:
    """Pages of layer 0, blocks in falling order from the end of the pool."""
    used = [-(-length // decoder.geometry.block_size) for length in lengths]
    table = torch.zeros(len(lengths), max(used), dtype=torch.int32)
    free = decoder.geometry.num_blocks
    for row, blocks in enumerate(used):
        table[row, :blocks] = torch.arange(free - 1, free - 1 - blocks, -1)
        free -= blocks
    keys, values = decoder.pool.layer(0)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=decoder.device)
    return Pages(keys, values, table.to(decoder.device), on_device)


def _random(decoder: Decoder, tokens: int) -> torch.Tensor:
    geometry = decoder.geometry
    generator = torch.Generator(decoder.device).manual_seed(tokens)
    shape = (tokens, geometry.heads, geometry.head_dim)
    empty = torch.empty(shape, dtype=TORCH_DTYPES[geometry.dtype], device=decoder.device)
    return empty.normal_(generator=generator)


def _error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error; NaN if the result holds one."""
    wide = expected.double()
    return float((out.double() - wide).norm() / wide.norm())
