"""`calibrate`: time the project's own kernels on this machine and write a profile.

`kvsim_kernels.calibrate` does the work in a process of its own, which has torch and nothing of
kvsim. What a process is started with decides its times, above all the allocator's settings.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from kvsim.cli.console import run_module
from kvsim.cli.options import ProfileOut
from kvsim.errors import ConfigError

KERNELS = "kvsim_kernels.calibrate"

Gpus = Annotated[
    int | None, Option(min=1, metavar="N", help="GPUs between which all-reduces are timed.")
]
Count = Annotated[int | None, Option(min=1, metavar="N")]


def calibrate(
    out: ProfileOut,
    model: Annotated[
        str, Option(metavar="NAME", help="A name in configs/models, or a TOML file.")
    ] = "llama-3-8b",
    device: Annotated[str, Option(metavar="cuda|cpu", help="The device to time.")] = "cuda",
    block_size: Annotated[
        list[int] | None,
        Option(min=1, metavar="TOKENS", help="Tokens per block; repeat it for several."),
    ] = None,
    dtype: Annotated[
        str, Option(metavar="TYPE", help="auto, float32, float16 or bfloat16.")
    ] = "auto",
    kv_cache_dtype: Annotated[str, Option(metavar="TYPE", help="auto or fp8.")] = "auto",
    kv_layout: Annotated[
        str, Option(metavar="layer|cross", help="Layout of blocks in the pool.")
    ] = "cross",
    decode_kernel: Annotated[
        str, Option(metavar="v1|v2", help="The kernel that whole steps use.")
    ] = "v2",
    all_reduce_gpus: Gpus = None,
    max_num_seqs: Count = None,
    max_num_batched_tokens: Count = None,
    max_model_len: Count = None,
    limit_s: Annotated[
        float | None,
        Option(min=1, metavar="S", help="Stop measuring then; the same command continues."),
    ] = None,
) -> None:
    """Time the kernels here and write a profile with its own held-out error.

    Rows are kept beside the profile, so the same command continues after an interruption. Exit code
    1: the profile does not pass its own checks, or --limit-s came first.
    """
    from kvsim.cost.profile import refuse_special
    from kvsim.machine.models import load_model
    from kvsim.settings.library import find

    path = find("models", model)
    if path.suffix != ".toml":
        raise ConfigError(f"{model}: calibrate takes a TOML as in configs/models, not a JSON file")
    refuse_special(load_model(str(path)), ("experts",))
    given = {
        "--model": path,
        "--device": device,
        "--dtype": dtype,
        "--kv-cache-dtype": kv_cache_dtype,
        "--kv-layout": kv_layout,
        "--decode-kernel": decode_kernel,
        "--all-reduce-gpus": all_reduce_gpus,
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--max-model-len": max_model_len,
        "--limit-s": limit_s,
    }
    words = [str(w) for key, value in given.items() if value is not None for w in (key, value)]
    sizes = [str(size) for size in block_size or ()]
    run_module(KERNELS, [*words, *(["--block-size", *sizes] if sizes else []), "--out", out])
