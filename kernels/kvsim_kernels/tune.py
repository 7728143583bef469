"""Times the launch numbers that the attention kernels could have: `python -m kvsim_kernels.tune`.

What wins is written into `decode_launch`, `partition_tokens` and `prefill_launch` by hand, with
where it was measured; nothing is tuned at run time, so that equal devices run equal kernels. Beside
the kernels stand torch's own attention, and the ceilings: a copy, and a matrix product.
"""

# ruff: noqa: T201 - this module is a command
# mypy: disable-error-code="no-untyped-call"

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvsim_kernels import triton_decode, triton_prefill
from kvsim_kernels.pages import KVPool, Pages
from kvsim_kernels.timing import CudaClock

Launch = dict[str, int]
Row = dict[str, Any]

HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 32, 8, 128, 32
"""Llama-3-8B's."""

DECODES = ((64, 8192), (128, 4096), (256, 2048), (256, 512), (16, 8192), (4, 32768), (1, 8192))
"""(sequences, tokens of each)."""

PREFILLS = ((8192, 0), (2048, 6144), (512, 8192), (128, 2048))
"""(queries, context)."""

PARTITIONS = (128, 256, 512, 1024, 2048, 4096, 8192)


def decode_launches() -> Iterator[Launch]:
    """Launch numbers of decode v1 and v2."""
    for tile, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
        if tile * stages <= 384 and warps <= tile // 8:
            yield {"TILE": tile, "num_warps": warps, "num_stages": stages}


def prefill_launches() -> Iterator[Launch]:
    """Launch numbers of prefill."""
    for rows, tile, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4)):
        if tile * stages <= 384 and (rows, warps) != (128, 4):
            yield {"ROWS": rows, "TILE": tile, "num_warps": warps, "num_stages": stages}


class Bench:
    """Random pages of one pool, and the kernels on them."""

    def __init__(self, tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = KVPool.allocate(
            "cross", num_blocks=-(-tokens // block_size), num_layers=LAYERS,
            num_kv_heads=KV_HEADS, block_size=block_size, head_size=HEAD_SIZE,
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        for part in self.pool.data:
            part.normal_()
        self.order = torch.randperm(self.pool.num_blocks, device="cuda").int()

    def pages(self, sequences: int, length: int, layer: int = 0) -> Pages:
        """Pages of equal lengths, blocks in random order."""
        width = -(-length // self.block_size)
        table = self.order[: sequences * width].view(sequences, width)
        lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
        return Pages(*self.pool.layer(layer), table, lengths)

    def decode(self, sequences: int, length: int, size: int | None = None) -> Callable[[], object]:
        """A call of decode v2 in four layers."""
        pages = [self.pages(sequences, length, layer) for layer in range(4)]
        query = torch.randn(sequences, HEADS, HEAD_SIZE, device="cuda").bfloat16()
        return lambda: [
            triton_decode.decode_v2(query, each, max_seq_len=length, size=size) for each in pages
        ]

    def prefill(self, queries: int, context: int) -> Callable[[], object]:
        """A call of prefill with one chunk."""
        pages = self.pages(1, queries + context)
        query = torch.randn(queries, HEADS, HEAD_SIZE, device="cuda").bfloat16()
        start = torch.tensor([0, queries], dtype=torch.int32, device="cuda")
        return lambda: triton_prefill.prefill(query, start, pages, max_query_len=queries)


def decode_row(us: float, sequences: int, length: int, **further: Any) -> Row:
    """A row with the rate at which keys and values were read."""
    moved = 4 * sequences * length * KV_HEADS * HEAD_SIZE * 2 * 2
    shape = {"kernel": "decode", "sequences": sequences, "length": length}
    return shape | further | {"us": round(us / 4, 2), "tb_s": round(moved / us / 1e6, 3)}


def prefill_row(us: float, queries: int, context: int, **further: Any) -> Row:
    """A row with the arithmetic of the pairs that see each other."""
    flops = 4 * HEADS * HEAD_SIZE * (queries * context + queries * (queries + 1) / 2)
    shape = {"kernel": "prefill", "queries": queries, "context": context}
    return shape | further | {"us": round(us, 2), "tflop_s": round(flops / us / 1e6, 1)}


def compiled(launch: Launch) -> None:
    """Fills the compiler's cache in a process of its own."""
    try:
        bench = Bench(1024, 16)
        _set(launch)
        (bench.prefill(256, 256) if "ROWS" in launch else bench.decode(2, 256))()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{launch}: {type(error).__name__}", file=sys.stderr)


def main() -> None:
    """Times everything and writes a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="ROWS.jsonl")
    parser.add_argument("--jobs", type=int, default=12, help="Processes that compile.")
    options = parser.parse_args()
    launches = [*decode_launches(), *prefill_launches()]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        pool.map(compiled, launches, chunksize=1)
    with options.out.open("w", encoding="utf-8") as out:
        for row in rows():
            print(json.dumps(row), file=out, flush=True)
            print(json.dumps(row), flush=True)


def rows() -> Iterator[Row]:
    """Launch numbers first; with the best of them, partitions, block sizes and peers."""
    clock, bench = CudaClock(), Bench(600_000, 16)
    tried: list[tuple[float, Launch]] = []
    for launch in decode_launches():
        _set(launch)
        found = [_timed(clock, bench.decode(*shape), decode_row, *shape, **launch)
                 for shape in (DECODES[0], DECODES[2], DECODES[4])]  # fmt: skip
        yield from (row for row in found if row)
        if all(found):
            tried.append((sum(1 / row["tb_s"] for row in found if row), launch))
    best = min(tried, key=lambda each: each[0])[1]
    _set(best)
    for shape in DECODES:
        for size in PARTITIONS:
            if size < 2 * shape[1]:
                row = _timed(clock, bench.decode(*shape, size), decode_row, *shape, size=size)
                yield from [row] if row else []
    tried = []
    for launch in prefill_launches():
        _set(launch)
        found = [_timed(clock, bench.prefill(*shape), prefill_row, *shape, **launch)
                 for shape in PREFILLS[:2]]  # fmt: skip
        yield from (row for row in found if row)
        if all(found):
            tried.append((sum(1 / row["tflop_s"] for row in found if row), launch))
    best_prefill = min(tried, key=lambda each: each[0])[1]
    yield {"kernel": "best", "decode": best, "prefill": best_prefill}
    _set(best_prefill)
    for shape in PREFILLS:
        yield from filter(None, [_timed(clock, bench.prefill(*shape), prefill_row, *shape)])
    yield from _peers(clock)
    del bench
    torch.cuda.empty_cache()
    for block_size in (16, 32, 64, 128):
        bench = Bench(600_000, block_size)
        for shape in DECODES[:4]:
            call = bench.decode(*shape)
            yield from filter(
                None, [_timed(clock, call, decode_row, *shape, block_size=block_size)]
            )
        shape = PREFILLS[0]
        call = bench.prefill(*shape)
        yield from filter(None, [_timed(clock, call, prefill_row, *shape, block_size=block_size)])
        del bench, call
        torch.cuda.empty_cache()


def _set(launch: Launch) -> None:
    """Lets kernels be launched with these numbers."""
    module, name = (
        (triton_prefill, "prefill_launch") if "ROWS" in launch else (triton_decode, "decode_launch")
    )
    setattr(module, name, lambda *_: dict(launch))


def _timed(
    clock: CudaClock, call: Callable[[], object], make: Callable[..., Row], *shape: int, **more: Any
) -> Row | None:
    """The row of a call; None if the device cannot run it."""
    try:
        return make(clock.alone(call).us, *shape, **more)
    except Exception as error:
        print(f"{shape} {more}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return None


def _peers(clock: CudaClock) -> Iterator[Row]:
    """The same work by torch's attention, on keys without pages; and the ceilings."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        query, key, value = (
            torch.randn(1, heads, 8192, HEAD_SIZE, device="cuda").bfloat16()
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )

        def attend(query=query, key=key, value=value) -> object:  # type: ignore[no-untyped-def]
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )

        with sdpa_kernel(backend):
            yield from filter(None, [_timed(clock, attend, prefill_row, 8192, 0, by=backend.name)])
    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    us = clock.alone(lambda: left @ right).us
    yield {"kernel": "gemm", "us": round(us, 1), "tflop_s": round(2 * 8192**3 / us / 1e6, 1)}
    source = torch.ones(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    us = clock.alone(lambda: target.copy_(source)).us
    yield {"kernel": "copy", "us": round(us, 1), "tb_s": round(2 * source.nbytes / us / 1e6, 3)}


if __name__ == "__main__":
    main()
