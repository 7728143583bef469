"""Prefill over a paged context, Triton and torch, against float64 loops on poisoned memory."""

import pytest
from batches import (
    DEVICE,
    DTYPES,
    NAN,
    Shape,
    assert_close,
    on_device,
    random_pages,
    random_query,
    torch,
)
from kvsim_kernels import reference, torch_impl, triton_decode, triton_prefill
from kvsim_kernels.pages import Attention, Pages
from marks import long

CHUNKS = [(1, 0), (7, 0), (1, 40), (0, 5), (20, 45), (33, 3), (64, 63)]
"""(tokens of the chunk, tokens of context before it) of each sequence."""

SLOPES = torch.tensor([2.0**-h for h in range(1, 9)])


def starts_of(chunks: list[tuple[int, int]]) -> torch.Tensor:
    sizes = torch.tensor([0, *(size for size, _ in chunks)])
    return sizes.cumsum(0).to(torch.int32)


def run_triton(
    query: torch.Tensor, starts: torch.Tensor, pages: Pages, attention: Attention
) -> torch.Tensor:
    """The kernel on the device, into an output full of NaN."""
    if attention.alibi_slopes is not None:
        attention = Attention(attention.scale, attention.window, attention.alibi_slopes.to(DEVICE))
    out = torch.full_like(query, NAN, device=DEVICE)
    return triton_prefill.prefill(
        query.to(DEVICE), starts.to(DEVICE), on_device(pages), attention, out=out
    )


def check(chunks: list[tuple[int, int]], shape: Shape, attention: Attention | None = None) -> None:
    attention = attention or Attention()
    generator = torch.Generator().manual_seed(0)
    pages = random_pages([size + context for size, context in chunks], shape, generator)
    starts = starts_of(chunks)
    query = random_query(int(starts[-1]), shape, generator)
    expected = reference.prefill(query, starts, pages, attention)
    assert_close(run_triton(query, starts, pages, attention), expected, shape.dtype)


@long
@pytest.mark.parametrize("layout", ["layer", "cross"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_with_context_in_every_dtype_and_layout(dtype: torch.dtype, layout: str) -> None:
    check(CHUNKS, Shape(heads=4, dtype=dtype, layout=layout))


@long
@pytest.mark.parametrize("block_size", [8, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    check([(1, 0), (block_size + 1, block_size - 1)], Shape(heads=4, block_size=block_size))


@long
@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups(group: int) -> None:
    check([(9, 20)], Shape(heads=group, kv_heads=1))


@long
@pytest.mark.parametrize("head_size", [128, 256])
def test_head_sizes(head_size: int) -> None:
    check([(18, 30), (1, 5)], Shape(heads=2, head_size=head_size, dtype=torch.float16))


def test_a_chunk_of_more_than_one_query_tile() -> None:
    check([(130, 10)], Shape(heads=1, kv_heads=1, dtype=torch.float16))


@long
@pytest.mark.parametrize("window", [1, 17, 50])
def test_sliding_window(window: int | None) -> None:
    check(CHUNKS, Shape(heads=4), Attention(window=window))


@long
@pytest.mark.parametrize("window", [None, 20])
def test_alibi(window: int | None) -> None:
    check(CHUNKS, Shape(), Attention(window=window, alibi_slopes=SLOPES))


def test_shared_prefix_blocks() -> None:
    check([(10, 40), (5, 33)], Shape(heads=4, shared_blocks=2))


def test_fp8_cache() -> None:
    shape = Shape(heads=2, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    check([(18, 30), (1, 5)], shape)


def test_a_chunk_of_one_is_a_decode() -> None:
    generator = torch.Generator().manual_seed(1)
    pages = random_pages([1, 17, 64], Shape(), generator)
    query = random_query(3, Shape(), generator)
    chunk = run_triton(query, torch.arange(4).int(), pages, Attention())
    decoded = triton_decode.decode_v1(query.to(DEVICE), on_device(pages))
    assert_close(chunk, decoded.double().cpu(), torch.float32)


def test_a_prompt_in_chunks_is_the_prompt_at_once() -> None:
    generator = torch.Generator().manual_seed(2)
    shape = Shape(heads=4)
    pages = random_pages([50], shape, generator)
    query = random_query(50, shape, generator)
    whole = run_triton(query, torch.tensor([0, 50]).int(), pages, Attention())
    parts = []
    for begin, end in ((0, 19), (19, 20), (20, 50)):
        so_far = Pages(pages.keys, pages.values, pages.block_table, torch.tensor([end]).int())
        starts = torch.tensor([0, end - begin]).int()
        parts.append(run_triton(query[begin:end], starts, so_far, Attention()))
    assert_close(torch.cat(parts), whole.double().cpu(), torch.float32)


@long
@pytest.mark.parametrize("layout", ["layer", "cross"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "attention",
    [Attention(), Attention(window=20), Attention(alibi_slopes=SLOPES)],
    ids=["plain", "window", "alibi"],
)
def test_torch_twin(attention: Attention, dtype: torch.dtype, layout: str) -> None:
    shape = Shape(dtype=dtype, layout=layout, poison=100.0)
    generator = torch.Generator().manual_seed(3)
    pages = random_pages([size + context for size, context in CHUNKS], shape, generator)
    starts = starts_of(CHUNKS)
    query = random_query(int(starts[-1]), shape, generator)
    expected = reference.prefill(query, starts, pages, attention)
    assert_close(torch_impl.prefill(query, starts, pages, attention), expected, dtype)
