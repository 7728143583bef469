"""Cache write, block copy and block swap: bit-exact, and nothing else is touched."""

from collections.abc import Callable

import pytest
from batches import DEVICE, DTYPES, torch
from kvsim_kernels import swap, torch_impl, triton_cache
from kvsim_kernels.pages import KVPool

LAYOUTS = ["layer", "cross"]
WRITERS = [triton_cache.write_cache, torch_impl.write_cache]
COPIERS = [triton_cache.copy_blocks, torch_impl.copy_blocks]
STORED = [*DTYPES, torch.float8_e4m3fn]


def filled_pool(layout: str, dtype: torch.dtype, seed: int, num_blocks: int = 9) -> KVPool:
    """A pool of random bits: NaN patterns and all."""
    pool = KVPool.allocate(
        layout,
        num_blocks=num_blocks,
        num_layers=3,
        num_kv_heads=3,
        block_size=16,
        head_size=64,
        dtype=dtype,
        device=DEVICE,
    )
    generator = torch.Generator().manual_seed(seed)
    words = pool.words()
    bits = torch.randint(-(2**31), 2**31, words.shape, generator=generator)
    words.copy_(bits.to(torch.int32))
    return pool


def bits_of(pool: KVPool) -> torch.Tensor:
    """A copy of the pool's words, [pieces, blocks, words], on the CPU."""
    return pool.words().cpu().clone()


def expected_write(
    pool: KVPool, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> KVPool:
    """The pool as plain loops would leave it."""
    data = pool.data.cpu().clone()
    keys, values = KVPool(pool.layout, data).layer(layer)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            keys[slot // 16, :, slot % 16] = torch_impl.to_cache_dtype(key[token], keys.dtype)
            values[slot // 16, :, slot % 16] = torch_impl.to_cache_dtype(value[token], keys.dtype)
    return KVPool(pool.layout, data)


@pytest.mark.parametrize("write", WRITERS, ids=["triton", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_cache(write: Callable[..., None], layout: str, dtype: torch.dtype) -> None:
    pool = filled_pool(layout, dtype, seed=0)
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(7, 8, 64, generator=generator).to(dtype)
    key, value = packed[:, 2:5], packed[:, 5:8]
    slots = torch.tensor([3, -1, 16, 143, 15, -1, 77])
    expected = expected_write(pool, 1, key, value, slots)
    write(key.to(DEVICE), value.to(DEVICE), *pool.layer(1), slots.to(DEVICE))
    assert torch.equal(bits_of(pool), bits_of(expected))


@pytest.mark.parametrize("write", WRITERS, ids=["triton", "torch"])
def test_write_cache_to_fp8_saturates(write: Callable[..., None]) -> None:
    """Only numbers that fp8 holds exactly or not at all: the interpreter rounds others wrongly."""
    pool = filled_pool("cross", torch.float8_e4m3fn, seed=2)
    generator = torch.Generator().manual_seed(3)
    key = torch.randn(4, 3, 64, generator=generator).to(torch.float8_e4m3fn).to(torch.bfloat16)
    key[:, :, ::7] *= 4096
    slots = torch.tensor([0, 31, -1, 100])
    expected = expected_write(pool, 2, key, -key, slots)
    write(key.to(DEVICE), (-key).to(DEVICE), *pool.layer(2), slots.to(DEVICE))
    assert torch.equal(bits_of(pool), bits_of(expected))
    stored = pool.layer(2)[0].float().cpu()
    assert stored[0, :, 0].abs().max() == 448.0


@pytest.mark.skipif(
    DEVICE == "cpu", reason="Triton's interpreter rounds to fp8 wrongly; needs a GPU"
)
def test_write_cache_rounds_to_fp8_as_torch_does() -> None:
    pool = filled_pool("cross", torch.float8_e4m3fn, seed=2)
    key = torch.randn(100, 3, 64, generator=torch.Generator().manual_seed(3))
    slots = torch.arange(100)
    expected = expected_write(pool, 0, key, -key, slots)
    triton_cache.write_cache(key.to(DEVICE), (-key).to(DEVICE), *pool.layer(0), slots.to(DEVICE))
    assert torch.equal(bits_of(pool), bits_of(expected))


@pytest.mark.parametrize("write", WRITERS, ids=["triton", "torch"])
def test_writing_only_padding_or_nothing_changes_nothing(write: Callable[..., None]) -> None:
    pool = filled_pool("layer", torch.float32, seed=4)
    before = bits_of(pool)
    tokens = torch.randn(2, 3, 64, device=DEVICE)
    write(tokens, tokens, *pool.layer(0), torch.tensor([-1, -1], device=DEVICE))
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    write(tokens[:0], tokens[:0], *pool.layer(0), nothing)
    assert torch.equal(bits_of(pool), before)


@pytest.mark.parametrize("copy", COPIERS, ids=["triton", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_copy_blocks(copy: Callable[..., None], layout: str, dtype: torch.dtype) -> None:
    pool = filled_pool(layout, dtype, seed=5)
    expected = bits_of(pool)
    expected[:, [0, 8, 4]] = expected[:, [7, 2, 2]]
    copy(pool, torch.tensor([[7, 0], [2, 8], [2, 4]], device=DEVICE))
    assert torch.equal(bits_of(pool), expected)
    copy(pool, torch.empty(0, 2, dtype=torch.int64, device=DEVICE))
    assert torch.equal(bits_of(pool), expected)


@pytest.mark.parametrize(("layout", "copies"), [("layer", 2 * 2 * 3), ("cross", 2)])
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_swap_out_and_in_again(layout: str, copies: int, dtype: torch.dtype) -> None:
    device_pool = filled_pool(layout, dtype, seed=6)
    host = filled_pool(layout, dtype, seed=7, num_blocks=4)
    host = KVPool(layout, host.data.cpu())
    before, expected = bits_of(device_pool), bits_of(host)
    expected[:, [3, 0]] = before[:, [5, 8]]
    assert swap.swap_blocks(device_pool, host, [(5, 3), (8, 0)]) == copies
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(bits_of(host), expected)
    assert torch.equal(bits_of(device_pool), before)
    swap.swap_blocks(host, device_pool, [(3, 1), (0, 2)])
    after = before.clone()
    after[:, [1, 2]] = before[:, [5, 8]]
    assert torch.equal(bits_of(device_pool), after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_staged_swap_is_the_piecewise_swap(layout: str) -> None:
    source = filled_pool(layout, torch.bfloat16, seed=8)
    one, two = (filled_pool(layout, torch.bfloat16, seed=9, num_blocks=4) for _ in range(2))
    swap.swap_blocks(source, one, [(1, 2), (6, 0)])
    torch_impl.swap_blocks(source, two, torch.tensor([[1, 2], [6, 0]]))
    assert torch.equal(bits_of(one), bits_of(two))


def test_swap_refuses_what_does_not_fit_and_moves_nothing() -> None:
    source = filled_pool("layer", torch.bfloat16, seed=10)
    target = filled_pool("layer", torch.bfloat16, seed=11, num_blocks=4)
    before = bits_of(target)
    with pytest.raises(ValueError, match="no such block in the pools: 1 -> 4"):
        swap.swap_blocks(source, target, [(0, 0), (1, 4)])
    with pytest.raises(ValueError, match="equal layout and geometry"):
        swap.swap_blocks(filled_pool("cross", torch.bfloat16, seed=12), target, [(0, 0)])
    with pytest.raises(ValueError, match="equal layout and geometry"):
        swap.swap_blocks(filled_pool("layer", torch.float16, seed=12), target, [(0, 0)])
    assert torch.equal(bits_of(target), before)
