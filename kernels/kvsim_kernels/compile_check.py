"""Compiles every Triton kernel for sm_90 (Hopper) without a GPU and reads what the cubin holds.

`python -m kvsim_kernels.compile_check` prints one line per kernel variant: registers, bytes of
shared memory, stack bytes, local-memory instructions (spills), tensor-core instructions, and tiles
of keys or values that are buffered at once. It needs
triton with its bundled cuobjdump and must run in a process where TRITON_INTERPRET is not set.
"""

# ruff: noqa: T201 - this module is also a command

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvsim_kernels import triton_cache, triton_decode, triton_dense, triton_prefill
from kvsim_kernels.triton_attend import INTERPRETED

SM90 = GPUTarget("cuda", 90, 32)
MOST_REGISTERS = 255
MOST_SHARED_BYTES = 232_448
"""Shared memory that one program may use on sm_90: 227 KiB."""

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1}


@dataclass(frozen=True)
class Variant:
    """One compilation: a kernel, its compile-time constants and the types of its pointers."""

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel needs of an SM, and the instructions it is judged by."""

    name: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    local_instructions: int
    hmma: int
    hgmma: int
    buffers: int = 0
    """Copies of a tile of keys or values in shared memory: with one, each load is waited for."""

    def fits(self) -> bool:
        """No spill, no stack, and within the limits of sm_90."""
        return (
            self.stack_bytes == 0
            and self.local_instructions == 0
            and self.registers <= MOST_REGISTERS
            and self.shared_bytes <= MOST_SHARED_BYTES
        )


def variants() -> Iterator[Variant]:
    """Every kernel, the attention kernels over head sizes, block sizes, dtypes and options."""
    yield from _attention("bf16", "bf16", head_size=128, block_size=16)
    yield from _attention("bf16", "bf16", head_size=64, block_size=8, group=1)
    yield from _attention("bf16", "bf16", head_size=256, block_size=32, group=8)
    yield from _attention("fp16", "fp16", head_size=128, block_size=64)
    yield from _attention("fp32", "fp32", head_size=128, block_size=128)
    yield from _attention("bf16", "fp8e4nv", head_size=128, block_size=16)
    yield from _attention("bf16", "bf16", head_size=128, block_size=16, window=True)
    yield from _attention("bf16", "bf16", head_size=128, block_size=16, alibi=True)
    for kv_dtype in ("bf16", "fp8e4nv"):
        yield Variant(
            f"write_cache {kv_dtype}",
            triton_cache.write_cache_kernel,
            {
                "HEADS": 8,
                "PADDED_HEADS": 8,
                "BLOCK_SIZE": 16,
                "HEAD_SIZE": 128,
                "SATURATE": kv_dtype == "fp8e4nv",
            },
            kv_dtype=kv_dtype,
        )
    yield Variant(
        "copy_blocks", triton_cache.copy_blocks_kernel, {"CHUNK": triton_cache.COPY_WORDS}
    )
    norm = {"WIDTH": 5120, "PADDED": 8192, "HAS_RESIDUAL": True}
    yield Variant("rms_norm", triton_dense.rms_norm_kernel, norm, options={"num_warps": 8})
    heads = {"HEADS": 40, "PADDED_HEADS": 64, "HALF": 64}
    yield Variant("rope", triton_dense.rope_kernel, heads)
    activation = {"WIDTH": 14336, "PIECE": triton_dense.ACTIVATED}
    yield Variant("silu_mul", triton_dense.silu_mul_kernel, activation)


def _attention(
    dtype: str,
    kv_dtype: str,
    *,
    head_size: int,
    block_size: int,
    group: int = 4,
    window: bool = False,
    alibi: bool = False,
) -> Iterator[Variant]:
    """Decode v1, v2 with its reduction, and prefill for one geometry."""
    name = f"{dtype}/{kv_dtype} D{head_size} BS{block_size} G{group}"
    name += " window" * window + " alibi" * alibi
    shared: dict[str, Any] = {
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HEAD_SIZE": head_size,
        "HAS_WINDOW": window,
        "HAS_ALIBI": alibi,
        "UPCAST": False,
    }
    if not alibi:
        shared["slopes"] = None
    launch = triton_decode.decode_launch(head_size, ITEMSIZE[dtype], ITEMSIZE[kv_dtype])
    one_pass = {**shared, "ROWS": triton_decode.tile_rows(group), "TILE": launch.pop("TILE")}
    types: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype}
    yield Variant(
        f"decode_v1 {name}", triton_decode.decode_v1_kernel, one_pass, **types, options=launch
    )
    yield Variant(
        f"decode_v2 {name}",
        triton_decode.decode_v2_kernel,
        one_pass,
        **types,
        options=launch,
    )
    yield Variant(
        f"decode_reduce {name}",
        triton_decode.decode_reduce_kernel,
        {
            "HEAD_SIZE": head_size,
            "MERGED": triton_decode.MERGED_PARTITIONS,
            "HAS_WINDOW": window,
        },
        **types,
    )
    launch = triton_prefill.prefill_launch(head_size, ITEMSIZE[dtype])
    tiles = {"ROWS": launch.pop("ROWS"), "TILE": launch.pop("TILE")}
    yield Variant(
        f"prefill {name}",
        triton_prefill.prefill_kernel,
        {**shared, **tiles},
        **types,
        options=launch,
    )


def compile_variant(variant: Variant) -> Usage:
    """Compiles one variant to a cubin and disassembles it.

    Pointers and strides are declared divisible by 16, as the run-time launch finds them; without
    that, loads would be narrow. Raises RuntimeError under the interpreter.
    """
    if INTERPRETED:
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET is set")
    kernel = variant.kernel
    signature = {name: _type_of(name, variant) for name in kernel.arg_names}
    free = {param.num for param in kernel.params if param.do_not_specialize}
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") or name.startswith("stride")) and index not in free
    }
    source = ASTSource(kernel, signature, dict(variant.constants), attrs)
    built = triton.compile(source, target=SM90, options=dict(variant.options))
    usage = _usage(variant.name, built.asm["cubin"], built.metadata.shared)
    tiles = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", built.asm["ttgir"])
    return replace(usage, buffers=min(map(int, tiles), default=0))


POINTERS = {
    **dict.fromkeys(("table", "lengths", "query_start", "words"), "*i32"),
    **dict.fromkeys(("slots", "pairs", "positions"), "*i64"),
    **dict.fromkeys(("partial", "peaks", "totals", "slopes", "angles"), "*fp32"),
}
"""Arguments that point to fixed types."""


def _type_of(name: str, variant: Variant) -> str:
    """The Triton type of one kernel argument, told by its name."""
    if name in variant.constants:
        return "constexpr"
    if name in POINTERS:
        return POINTERS[name]
    if name in ("out", "query", "key", "value", "stream", "x", "residual", "weight", "gate_up"):
        return f"*{variant.dtype}"
    if name in ("keys", "values"):
        return f"*{variant.kv_dtype}"
    return "fp32" if name in ("scale", "eps") else "i32"


def _usage(name: str, cubin: bytes, shared_bytes: int) -> Usage:
    """Reads registers, stack and instructions out of a cubin with the bundled cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        resources, sass = (
            subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    numbers = {key: int(number) for key, number in re.findall(r"(REG|STACK):(\d+)", resources)}
    return Usage(
        name,
        registers=numbers["REG"],
        shared_bytes=shared_bytes,
        stack_bytes=numbers["STACK"],
        local_instructions=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        hmma=len(re.findall(r"\bHMMA\b", sass)),
        hgmma=len(re.findall(r"\bHGMMA\b", sass)),
    )


def main() -> None:
    """Compiles everything, prints a table, and exits with 1 if a kernel does not fit."""
    names = ("regs", "shared", "stack", "local", "HMMA", "HGMMA", "buffers")
    print(f"{'kernel':52} {names[0]:>4} {names[1]:>7} {' '.join(names[2:])}")
    fine = True
    for variant in variants():
        used = compile_variant(variant)
        fine &= used.fits()
        print(
            f"{used.name:52} {used.registers:4} {used.shared_bytes:7} {used.stack_bytes:5} "
            f"{used.local_instructions:5} {used.hmma:4} {used.hgmma:5} {used.buffers:7}"
        )
    if not fine:
        raise SystemExit("some kernels spill or exceed the limits of sm_90")


if __name__ == "__main__":
    main()
