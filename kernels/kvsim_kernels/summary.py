"""What a profile says in a few lines: kernels beside the ceilings of the device, and its errors."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvsim_kernels.geometry import DTYPE_BYTES
from kvsim_kernels.rows import Row

Figures = dict[str, Any]

METHODS = ("alone", "warm")
"""Methods that time a kernel and nothing else."""

JUDGED = (
    "step", "decode_v1", "decode_v2", "uneven", "prefill", "dense", "head", "experts", "all_reduce",
    "repeat_noise",
)  # fmt: skip
"""Errors that are printed, where they were measured."""

SHOWN = 4
"""Shapes of each kernel."""


def achieved(model: dict[str, Any], rows: Sequence[Row], ceilings: Figures) -> dict[str, Figures]:
    """What kernels reach alone, by kernel and shape: GB/s or TFLOP/s, and percent of the ceiling.

    Decode counts the keys and values that it must read, prefill and the dense part their matrix
    products; the dense part of few tokens, its weights.
    """
    found: dict[str, Figures] = {}
    for row in rows:
        bytes_read, flops = _work(model, row["kernel"], row["shape"])
        if row["split"] != "fit" or row["method"] not in METHODS or not (bytes_read or flops):
            continue
        gb_s, tflop_s = bytes_read / row["us"] / 1e3, flops / row["us"] / 1e6
        of_copy = 100 * gb_s / ceilings.get("copy_gb_s", float("inf"))
        of_gemm = 100 * tflop_s / ceilings.get("gemm_tflop_s", float("inf"))
        figures = (
            {"gb_s": round(gb_s, 1), "of_copy_percent": round(of_copy, 1)}
            if of_copy > of_gemm
            else {"tflop_s": round(tflop_s, 2), "of_gemm_percent": round(of_gemm, 1)}
        )
        shape = " ".join(f"{key} {value}" for key, value in row["shape"].items() if key != "seed")
        unequal = " unequal" * ("seed" in row["shape"])
        found[f"{row['kernel']} {shape}{unequal}"] = {"us": row["us"], **figures}
    return found


def lines(profile: dict[str, Any]) -> Iterator[str]:
    """The table that is printed last."""
    ceilings, error = dict(profile["ceilings"]), profile["error"]
    kernels = ceilings.pop("achieved", {})
    yield f"{profile['device']['name']} x {profile['model']['name']}, block_size " + str(
        profile["engine"]["block_size"]
    )
    yield "ceilings    " + " · ".join(f"{key} {value:g}" for key, value in ceilings.items())
    yield f"{'kernel alone':44} {'us':>10} {'reaches':>16} {'of ceiling':>10}"
    for name in _chosen(kernels):
        figures = kernels[name]
        gb_s = "gb_s" in figures
        reached = f"{figures['gb_s']:,} GB/s" if gb_s else f"{figures['tflop_s']:,} TFLOP/s"
        percent = figures["of_copy_percent" if gb_s else "of_gemm_percent"]
        yield f"{name:44} {figures['us']:>10,.1f} {reached:>16} {percent:>8.1f} %"
    columns = " ".join(f"{column:>8}" for column in ("median", "p95", "max", "bias"))
    yield f"{'error on rows held out':44} {'rows':>10} {columns}"
    for name in JUDGED:
        found = error.get(name, {})
        if found.get("points"):
            keys = ("median_percent", "p95_percent", "max_percent", "bias_percent")
            figures = " ".join(f"{found[key]:>6.1f} %" for key in keys)
            yield f"{name:44} {found['points']:>10} {figures}"
    yield f"anchors drifted by {error['anchor_drift_percent']:g} % in the median"
    yield "trusted" if error["trusted"] else f"NOT trusted: {'; '.join(error['why'])}"


def _chosen(kernels: dict[str, Figures]) -> list[str]:
    """The slowest shapes of each kernel, and every shape of what has few."""
    by_kernel: dict[str, list[str]] = {}
    for name in kernels:
        by_kernel.setdefault(name.split()[0], []).append(name)
    return [
        name
        for names in by_kernel.values()
        for name in sorted(names, key=lambda name: kernels[name]["us"])[-SHOWN:]
    ]


def _work(model: dict[str, Any], kernel: str, shape: dict[str, Any]) -> tuple[float, float]:
    """(bytes that must be read, floating-point operations); zeros where neither is stated."""
    row_elements = model["kv_heads"] * model["head_dim"]
    if kernel.startswith("decode"):
        kv_bytes = 2 * row_elements * DTYPE_BYTES[model["kv_dtype"]]
        return shape["n"] * _mean_length(shape) * kv_bytes, 0.0
    heads = model["heads"] * model["head_dim"]
    if kernel == "prefill":
        q, ctx = shape["q"], shape["ctx"]
        return 0.0, 4 * heads * (q * ctx + q * (q + 1) / 2)
    attention = (2 * heads + 2 * row_elements) * model["hidden"]
    mlp = 0 if "experts" in model else 3 * model["hidden"] * model["ffn"]
    weights = model["layers"] * (attention + mlp)
    if kernel == "dense":
        return weights * DTYPE_BYTES[model["dtype"]], 2.0 * weights * shape["tokens"]
    if kernel == "head":
        table = model["vocab"] * model["hidden"]
        return table * DTYPE_BYTES[model["dtype"]], 2.0 * table * shape["samples"]
    return 0.0, 0.0


def _mean_length(shape: dict[str, Any]) -> float:
    longer = shape.get("longer", 0) / shape["n"]
    return float(shape["ctx"] + longer * (shape.get("long", 0) - shape["ctx"]))
