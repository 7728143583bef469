"""Paged decode, v1 and v2 and the torch twins, against float64 loops on poisoned memory."""

from collections.abc import Callable
from types import ModuleType

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
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsim_kernels import dispatch, flex_impl, reference, torch_impl, triton_decode
from kvsim_kernels.pages import Attention, Pages
from marks import examples, long

SIZE = 256
"""Tokens of a partition of decode v2, beside what it chooses itself."""

EDGES = [0, 1, 15, 16, 17, SIZE - 1, SIZE, SIZE + 1]
"""Padding, one token, around a block of 16, around a partition."""

SHORT = [0, 1, 5, 33, 70]


def poisoned(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Runs `call` with every tensor from torch.empty filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def run_triton(
    version: str, query: torch.Tensor, pages: Pages, attention: Attention, **options: object
) -> torch.Tensor:
    """Decode v1 or v2 on the device, into an output full of NaN."""
    query, pages = query.to(DEVICE), on_device(pages)
    if attention.alibi_slopes is not None:
        attention = Attention(attention.scale, attention.window, attention.alibi_slopes.to(DEVICE))
    kernel = {"v1": triton_decode.decode_v1, "v2": triton_decode.decode_v2}[version]
    out = torch.full_like(query, NAN)
    return poisoned(lambda: kernel(query, pages, attention, out=out, **options))


def check_triton(
    lengths: list[int],
    shape: Shape,
    attention: Attention | None = None,
    seed: int = 0,
    sizes: tuple[int | None, ...] = (SIZE,),
) -> None:
    """Both kernels against the oracle and against each other. `sizes`: of partitions."""
    attention = attention or Attention()
    generator = torch.Generator().manual_seed(seed)
    pages = random_pages(lengths, shape, generator)
    query = random_query(len(lengths), shape, generator)
    expected = reference.decode(query, pages, attention)
    one = run_triton("v1", query, pages, attention)
    assert_close(one, expected, shape.dtype)
    for size in sizes:
        two = run_triton("v2", query, pages, attention, size=size)
        assert_close(two, expected, shape.dtype)
        assert_close(one, two.double().cpu(), shape.dtype)


@long
@pytest.mark.parametrize("layout", ["layer", "cross"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_lengths_in_every_dtype_and_layout(dtype: torch.dtype, layout: str) -> None:
    check_triton(EDGES, Shape(dtype=dtype, layout=layout), sizes=(SIZE, None))


@long
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_groups_and_block_sizes(group: int, block_size: int) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, SIZE + 1]
    check_triton(lengths, Shape(heads=2 * group, block_size=block_size))


@long
@pytest.mark.parametrize("block_size", [64, 128])
def test_large_blocks(block_size: int) -> None:
    check_triton([1, block_size - 1, block_size, block_size + 1], Shape(block_size=block_size))


@long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [128, 256])
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    check_triton(SHORT, Shape(head_size=head_size, dtype=dtype))


@long
def test_a_group_that_is_no_power_of_two() -> None:
    check_triton(SHORT, Shape(heads=6, kv_heads=2))


@long
def test_shared_prefix_blocks() -> None:
    check_triton([40, SIZE + 1, 100], Shape(shared_blocks=2))


@long
@pytest.mark.parametrize("window", [1, 16, 20, SIZE - 12, SIZE + 88])
def test_sliding_window(window: int | None) -> None:
    check_triton([0, 1, 19, 20, 21, SIZE + 1, 2 * SIZE + 6], Shape(), Attention(window=window))


@long
@pytest.mark.parametrize("window", [None, 20])
def test_alibi(window: int | None) -> None:
    slopes = torch.tensor([2.0**-h for h in range(1, 9)])
    check_triton(EDGES, Shape(), Attention(window=window, alibi_slopes=slopes))


@long
@pytest.mark.parametrize("window", [None, 17 * SIZE - 120])
def test_more_partitions_than_are_merged_at_once(window: int | None) -> None:
    """The bias puts the largest score of one head into the last merge, of the other the first."""
    slopes = torch.tensor([2e-3, -2e-3])
    shape = Shape(heads=2, kv_heads=1, block_size=32)
    check_triton([17 * SIZE + 40], shape, Attention(window=window, alibi_slopes=slopes))


@long
def test_a_scale_of_ones_own() -> None:
    check_triton(SHORT, Shape(), Attention(scale=0.03))


@long
@pytest.mark.parametrize("layout", ["layer", "cross"])
def test_fp8_cache(layout: str) -> None:
    shape = Shape(dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, layout=layout)
    check_triton([0, 1, 17, SIZE + 1], shape)


@long
def test_surplus_partitions_change_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    pages = random_pages([0, 3, SIZE + 88], Shape(), generator)
    query = random_query(3, Shape(), generator)
    few = run_triton("v2", query, pages, Attention(), max_seq_len=SIZE + 88, size=SIZE)
    many = run_triton("v2", query, pages, Attention(), max_seq_len=8192, size=SIZE)
    assert torch.equal(few, many)


@long
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_batch_of_padding_rows_gives_zeros(version: str) -> None:
    generator = torch.Generator().manual_seed(4)
    pages = random_pages([0, 0, 0], Shape(), generator)
    query = random_query(3, Shape(), generator)
    out = run_triton(version, query, pages, Attention())
    assert torch.equal(out.cpu(), torch.zeros(out.shape))


@long
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_block_ids_beyond_int32_offsets(version: str) -> None:
    """Block 5 starts past element 2**31; only the pages it touches are ever backed by memory."""
    stride = 2**29
    try:
        store = torch.empty(5 * stride + 4096, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("5 GiB of address space could not be reserved")
    keys = store.as_strided((6, 2, 16, 64), (stride, 1024, 64, 1))
    values = store.as_strided((6, 2, 16, 64), (stride, 1024, 64, 1), 2048)
    generator = torch.Generator().manual_seed(5)
    for cache in (keys, values):
        cache[5] = torch.randn(2, 16, 64, generator=generator)
    pages = Pages(keys, values, torch.tensor([[5]]).int(), torch.tensor([13]).int())
    query = random_query(1, Shape(dtype=torch.float16), generator)
    expected = reference.decode(query, pages)
    assert_close(run_triton(version, query, pages, Attention()), expected, torch.float16)


@long
@settings(max_examples=examples(8), deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 5]),
    block_size=st.sampled_from([8, 16, 32]),
    layout=st.sampled_from(["layer", "cross"]),
    window=st.none() | st.integers(1, 100),
    seed=st.integers(0, 2**31),
)
def test_any_small_batch(
    lengths: list[int],
    kv_heads: int,
    group: int,
    block_size: int,
    layout: str,
    window: int | None,
    seed: int,
) -> None:
    shape = Shape(heads=kv_heads * group, kv_heads=kv_heads, block_size=block_size, layout=layout)
    check_triton(lengths, shape, Attention(window=window), seed)


@long
@pytest.mark.parametrize("layout", ["layer", "cross"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "attention",
    [
        Attention(),
        Attention(window=20),
        Attention(alibi_slopes=torch.tensor([2.0**-h for h in range(1, 9)])),
    ],
    ids=["plain", "window", "alibi"],
)
@pytest.mark.parametrize("twin", [torch_impl, flex_impl], ids=["gather", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_torch_twins(
    twin: ModuleType, attention: Attention, dtype: torch.dtype, layout: str
) -> None:
    shape = Shape(dtype=dtype, layout=layout, poison=100.0)
    generator = torch.Generator().manual_seed(6)
    pages = random_pages(EDGES, shape, generator)
    query = random_query(len(EDGES), shape, generator)
    expected = reference.decode(query, pages, attention)
    assert_close(twin.decode(query, pages, attention), expected, dtype)


@long
@pytest.mark.parametrize("chosen", ["v1", "v2"])
def test_dispatch_launches_what_the_rule_says(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    pages = random_pages(SHORT, Shape(), generator)
    query = random_query(len(SHORT), Shape(), generator)
    other = {"v1": "decode_v2", "v2": "decode_v1"}[chosen]
    monkeypatch.setattr(triton_decode, other, None)
    seen = []

    def rule(*shape: int) -> str:
        seen.append(shape)
        return chosen

    out = dispatch.decode(query.to(DEVICE), on_device(pages), max_seq_len=70, rule=rule)
    assert seen == [(70, 5, 8)]
    assert_close(out, reference.decode(query, pages), torch.float32)


def test_partitions_keep_every_multiprocessor_busy() -> None:
    """The most tokens that still give each multiprocessor enough programs, by powers of two."""
    size, enough = triton_decode.partition_tokens, 132 * triton_decode.PROGRAMS
    assert size(8, 512, 132) == triton_decode.SMALLEST_PARTITION
    assert size(100_000, 8192, 132) == triton_decode.LARGEST_PARTITION
    for groups, longest in ((512, 8192), (64, 32768), (8, 131_072)):
        chosen = size(groups, longest, 132)
        assert groups * -(-longest // chosen) >= enough > groups * -(-longest // (2 * chosen))
