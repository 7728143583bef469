"""Times the kernels of a model on this device and writes a profile: `kvsim calibrate`.

`python -m kvsim_kernels.calibrate` is the same command where only a checkout is there; it needs
torch and numpy, on CUDA also triton, and nothing of kvsim. Rows are kept beside the profile while
they are measured, so a run that was killed goes on where it was.

Exit codes: 0 a profile that is trusted; 1 a profile that its own held-out rows do not bear out, or
a sweep that `--limit-s` stopped; 2 bad input; 130 interrupted.
"""

# ruff: noqa: T201 - this module is a command

import argparse
import dataclasses
import datetime
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kvsim_kernels import provenance
from kvsim_kernels.fit import joined, make_profile, to_json
from kvsim_kernels.geometry import DTYPE_BYTES, LAYOUTS, Geometry, read_model
from kvsim_kernels.grid import MOST_CHUNKS, Limits, plan
from kvsim_kernels.rows import RowsError, RowStore, read_rows
from kvsim_kernels.summary import lines

USABLE_MEMORY, WORKSPACE_BYTES = 0.85, 8 << 30
"""Share of the GPU's memory that is taken, and what of it is neither weights nor pool."""

DEFAULTS = {
    True: {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 32768},
    False: {"max_num_seqs": 24, "max_num_batched_tokens": 256, "max_model_len": 1024},
}
"""Largest steps that are measured, by whether the device is CUDA."""


class CalibrationError(Exception):
    """Something the user can mend; its text is one line."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; exits."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    try:
        code = _run(options, given)
    except (CalibrationError, RowsError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or options.out}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("\nkvsim: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    sys.exit(code)


def calibrate(
    options: argparse.Namespace, geometry: Geometry, deadline_s: float
) -> dict[str, Any] | None:
    """Measures what is missing and fits; None if `deadline_s` of `time.monotonic` came first."""
    from kvsim_kernels.sweep import bar, missing, sweep
    from kvsim_kernels.timing import make_clock

    experts = geometry.experts
    limits = dataclasses.replace(
        _limits(options, geometry),
        experts=None if experts is None else (experts.num_experts, experts.num_experts_per_tok),
        gpus=_gpus(options),
        token_bytes=geometry.hidden * DTYPE_BYTES[geometry.dtype],
    )
    clock = make_clock(options.device)
    samples = plan(limits, clock.rounds)
    name = options.out.name.removesuffix(".json")
    path = options.out.with_name(f"{name}.{geometry.block_size}.rows.jsonl")
    store = RowStore(path, _header(options, geometry, limits))
    complete = True
    if missing(store, samples):
        bench, facts = _bench(options, geometry, limits, clock)
        report = partial(bar, started_s=time.monotonic())
        try:
            complete = sweep(
                bench, clock, store, samples, report=report, deadline_s=deadline_s, facts=facts
            )
        finally:
            bench.close()
        del bench
        _free_memory(limits.cuda)
    return make_profile(store.header, store.rows) if complete else None


def _bench(
    options: argparse.Namespace, geometry: Geometry, limits: Limits, clock: Any
) -> tuple[Any, dict[str, Any]]:
    """A decoder to be measured, its kernels compiled and checked; how that went."""
    from kvsim_kernels import checks
    from kvsim_kernels.forward import Decoder
    from kvsim_kernels.measure import Bench

    started_s = time.monotonic()
    decoder = Decoder(
        geometry.sized(num_blocks=limits.num_blocks),
        device=options.device,
        max_tokens=max(limits.max_tokens, limits.max_seqs),
        max_seqs=limits.max_seqs + MOST_CHUNKS,
        max_seq_len=limits.max_seq_len,
        capture_sizes=limits.capture_sizes,
        decode_kernel=options.decode_kernel,
    )
    bench = Bench(decoder, clock)
    built_s = time.monotonic()
    bench.compile(limits.decode_kernels)
    compiled_s = time.monotonic()
    try:
        errors = checks.check(decoder)
    except checks.CheckError as error:
        raise CalibrationError(f"{error}; run pytest tests/kernels on this device") from None
    return bench, {
        "checks": errors,
        "build_s": round(built_s - started_s, 2),
        "compile_s": round(compiled_s - built_s, 2),
    }


def _free_memory(cuda: bool) -> None:
    """Before the next block size takes as much again."""
    gc.collect()
    if cuda:
        import torch

        torch.cuda.empty_cache()


def _run(options: argparse.Namespace, given: Sequence[str]) -> int:
    _require_writable(options.out)
    if options.fit:
        return _written([make_profile(*read_rows(path)) for path in options.fit], options.out)
    cuda = options.device == "cuda"
    _refuse_missing(cuda)
    if not cuda:
        _restart_with_settings(given)
    geometry = _geometry(options)
    deadline_s, profiles = time.monotonic() + options.limit_s, []
    for size in dict.fromkeys(options.block_size):
        sized = geometry.sized(block_size=size, layout=options.kv_layout)
        profiles.append(calibrate(options, sized, deadline_s))
        if profiles[-1] is None:
            break
    complete = [profile for profile in profiles if profile is not None]
    code = _written(complete, options.out) if complete else 0
    if len(complete) < len(profiles):
        line = f"stopped after {options.limit_s:g} s; the same command goes on from here"
        print(f"kvsim: {line}", file=sys.stderr)
        return 1
    return code


def _written(profiles: Sequence[dict[str, Any]], out: Path) -> int:
    """Writes one profile of all block sizes, whole or not at all, and prints what it says."""
    profile = joined(profiles)
    real = out.resolve()  # A link stays, and the file behind it is replaced.
    partial_out = real.with_name(real.name + ".partial")
    partial_out.write_text(to_json(profile), encoding="utf-8", newline="\n")
    partial_out.replace(real)
    for each in profiles:
        print("\n".join(lines(each)), end="\n\n")
    print(f"written to {out}: use it with --cost-model table --set cost.profile={out}")
    return 0 if profile["error"]["trusted"] else 1


def _limits(options: argparse.Namespace, geometry: Geometry) -> Limits:
    """The largest steps, as asked for or by default, and a pool that holds them."""
    cuda = options.device == "cuda"
    seqs, tokens, length = (
        getattr(options, key) or default for key, default in DEFAULTS[cuda].items()
    )
    length = min(length, geometry.max_positions)
    per_seq = -(-length // geometry.block_size)
    tile = 1
    if cuda:
        from kvsim_kernels.triton_prefill import prefill_launch

        tile = prefill_launch(geometry.head_dim, DTYPE_BYTES[geometry.dtype])["ROWS"]
    for key, value, least in (
        ("num-seqs", seqs, 2),
        ("num-batched-tokens", tokens, max(32, 4 * tile)),
        ("model-len", length, max(128, 4 * tile)),
    ):
        if value < least:
            raise CalibrationError(f"--max-{key}: {value} leaves no grid; {least} is the least")
    if not cuda:
        return Limits(False, tokens, seqs, length, seqs * per_seq, geometry.block_size)
    import torch

    total = torch.cuda.get_device_properties().total_memory
    room = int(total * USABLE_MEMORY) - geometry.weight_bytes - WORKSPACE_BYTES
    blocks = min(room // geometry.block_bytes, seqs * per_seq)
    if blocks < 2 * per_seq:
        raise CalibrationError(
            f"{geometry.name}: {total >> 20} MiB of GPU memory leave no room for two sequences of"
            f" {length} tokens; lower --max-model-len, or take a smaller model"
        )
    return Limits(
        cuda=True,
        max_tokens=tokens,
        max_seqs=seqs,
        max_seq_len=length,
        num_blocks=blocks,
        block_size=geometry.block_size,
        tile=tile,
        capture_sizes=tuple(sorted({1, 2, 4, *range(8, seqs + 1, 8), seqs})),
        decode_kernels=("v1", "v2"),
    )


def _gpus(options: argparse.Namespace) -> int:
    """Between how many GPUs all-reduces are measured: by default, all that are there."""
    import torch

    there = torch.cuda.device_count() if options.device == "cuda" else 1
    gpus: int = options.all_reduce_gpus or there
    if options.device == "cuda" and gpus > there:
        raise CalibrationError(f"--all-reduce-gpus: {gpus} asked for, torch sees {there}")
    return gpus


def _header(options: argparse.Namespace, geometry: Geometry, limits: Limits) -> dict[str, Any]:
    """On what the rows are measured; rows of two headers are never mixed."""
    cuda = limits.cuda
    twins = {"v1": "torch gather, padded to the longest", "v2": "torch gather, one by one"}
    return {
        "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "git": provenance.revision(),
        "device": provenance.device(cuda),
        "software": provenance.software(cuda),
        "model": geometry.model(),
        "engine": {
            "block_size": geometry.block_size,
            "graph": cuda,
            "kv_layout": geometry.layout,
            "num_blocks": limits.num_blocks,
            "decode_kernel": f"decode_{options.decode_kernel}",
            "kernels": "triton" if cuda else twins,
            "tile": limits.tile,
            "capture_sizes": list(limits.capture_sizes),
            "max_num_seqs": limits.max_seqs,
            "max_num_batched_tokens": limits.max_tokens,
            "max_model_len": limits.max_seq_len,
            "all_reduce_gpus": limits.gpus,
        },
    }


def _refuse_missing(cuda: bool) -> None:
    for name in ("torch", "triton") if cuda else ("torch",):
        if importlib.util.find_spec(name) is None:
            raise CalibrationError(f'{name} is not installed; pip install "kvsim[kernels]"')
    if cuda:
        import torch

        if not torch.cuda.is_available():
            raise CalibrationError(
                "--device cuda: torch sees no GPU here; use --device cpu, or a CUDA build of torch"
            )


def _restart_with_settings(given: Sequence[str]) -> None:
    """Starts this process anew with the allocator's settings, which are read at its start."""
    settings = {**provenance.ALLOCATOR, "OMP_NUM_THREADS": "1"}
    if all(os.environ.get(key) == value for key, value in settings.items()):
        return
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    settings["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "kvsim_kernels.calibrate", *given]
    os.execve(sys.executable, command, {**os.environ, **settings})


def _geometry(options: argparse.Namespace) -> Geometry:
    """The model; a CPU computes in float32 unless told otherwise: 16 bits are emulated there."""
    dtype = options.dtype
    if dtype == "auto" and options.device == "cpu":
        dtype = "float32"
    try:
        return read_model(_model_path(options.model), dtype, options.kv_cache_dtype)
    except ValueError as error:
        raise CalibrationError(str(error)) from None


def _model_path(name: str) -> Path:
    """A TOML file as given, or the shipped one of that name."""
    path = Path(name)
    if path.is_file():
        return path
    here = Path(__file__).parents
    folders = (here[2] / "configs" / "models", here[1] / "kvsim" / "_configs" / "models")
    shipped = {each.stem: each for folder in folders for each in sorted(folder.glob("*.toml"))}
    if name in shipped:
        return shipped[name]
    raise CalibrationError(
        f"no model named {name!r}; give one of {', '.join(shipped)}, or the path of a TOML file"
    )


def _require_writable(out: Path) -> None:
    """Finds out before minutes of measuring, not after."""
    if not out.parent.is_dir():
        raise CalibrationError(f"{out.parent}: no such folder; make it, or give another --out")
    if out.exists() and not out.is_file():
        raise CalibrationError(f"{out}: is no regular file; give another --out")
    if not os.access(out.resolve().parent, os.W_OK):
        raise CalibrationError(f"{out}: cannot be written; give another --out")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvsim calibrate", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", default="llama-3-8b", help="A name in configs/models, or a TOML file.")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--out", type=Path, required=True, metavar="PROFILE.json")
    add(
        "--block-size",
        type=_positive,
        nargs="+",
        default=[16],
        metavar="TOKENS",
        help="With several, each makes a profile of its own: PROFILE-16.json, PROFILE-32.json.",
    )
    add("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    add("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    add("--kv-layout", choices=LAYOUTS, default="cross")
    add("--decode-kernel", choices=("v1", "v2"), default="v2", help="The one that steps use.")
    add(
        "--all-reduce-gpus",
        type=_positive,
        metavar="N",
        help="Between how many GPUs all-reduces are measured, or processes of a CPU.",
    )
    add("--max-num-seqs", type=_positive, metavar="N")
    add("--max-num-batched-tokens", type=_positive, metavar="N")
    add("--max-model-len", type=_positive, metavar="N")
    add(
        "--limit-s",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="Stop measuring then; the same command goes on.",
    )
    add(
        "--fit", type=Path, nargs="+", metavar="ROWS.jsonl", help="Measure nothing, fit these rows."
    )
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(message)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _fail(line: str) -> NoReturn:
    print("kvsim: " + " ".join(line.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
