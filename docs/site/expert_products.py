"""What kernels of experts reach: fits `expert_products` of `configs/hardware` to public tables.

    python docs/site/expert_products.py FOLDER

`FOLDER` is `aiconfigurator_core/systems/data` of the wheel aiconfigurator-core 0.12.0 (PyPI). A
line for each GPU and way to store weights: the two figures, and by which factor the times of at
least 256 tokens are missed in the median and at p90: with them, where each shape is left out of the
fit in turn, and by the data sheet alone.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from kvsim.machine.hardware import load_hardware

VLLM = "vllm/0.24.0"
TABLES = {
    "a100-sxm-80gb": [
        ("a100_sxm", "vllm/0.14.0", "bfloat16"),
        ("a100_sxm", "sglang/0.5.10", "int4"),
    ],
    **{
        name: [(folder, VLLM, weights) for weights in ("bfloat16", "fp8", "int4", "mxfp4", "nvfp4")]
        for name, folder in (
            ("h100-sxm", "h100_sxm"),
            ("h200-sxm", "h200_sxm"),
            ("b200-sxm", "b200_sxm"),
            ("b300-sxm", "b300_sxm"),
            ("gb200", "gb200"),
            ("gb300", "gb300"),
            ("l40s", "l40s"),
            ("rtx-pro-6000-server", "rtx_pro_6000_server"),
        )
    },
}
"""GPU → its tables, with what is read of them. Kernels of A100 are measured in older releases."""
NAMES = {"fp8": "fp8_block", "int4": "int4_wo", "mxfp4": "w4a16_mxfp4"}
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "int4": 0.53, "mxfp4": 0.53, "nvfp4": 0.56}
MANY = 256
"""Tokens from which on arithmetic is the limit, mostly."""


class Launches(NamedTuple):
    """Measured times, and the work of each."""

    tokens: np.ndarray
    rows: np.ndarray
    active: np.ndarray
    flops: np.ndarray
    """Of a row."""
    traffic_us: np.ndarray
    us: np.ndarray
    shape: np.ndarray
    """Number of the layer's shape."""

    def missed(self, tflop_s: float, padding_rows: float) -> np.ndarray:
        """Logarithm of what the law says over what was measured."""
        rows = self.rows + padding_rows * self.active
        return np.log(np.maximum(rows * self.flops / tflop_s / 1e6, self.traffic_us) / self.us)


def launches(path: Path, weights: str, byte_us: float) -> Launches | None:
    """Of the kernel with the most measurements; experts as a power law spreads tokens."""
    table = pd.read_parquet(path / "moe_perf.parquet")
    table = table[(table.moe_dtype == NAMES.get(weights, weights)) & (table.moe_ep_size == 1)]
    table = table[table.distribution == "power_law_1.01"]
    if table.empty:
        return None
    table = table[table.kernel_source == table.kernel_source.mode()[0]]
    tokens, experts, of_token = table.num_tokens, table.num_experts, table.topk
    active = experts * (1 - (1 - of_token / experts) ** tokens)
    values = 3 * table.hidden_size * table.inter_size / table.moe_tp_size
    traffic_us = active * values * BYTES[weights] * byte_us
    shape = table.groupby(["hidden_size", "inter_size", "num_experts"]).ngroup()
    found = (tokens, tokens * of_token, active, 2 * values, traffic_us, 1e3 * table.latency, shape)
    return Launches(*(each.to_numpy(float) for each in found))


def fitted(found: Launches, peak: float) -> tuple[float, int]:
    """The figures with the least error: in the median, at the edges and where traffic limits."""
    many = found.tokens >= MANY
    best = (np.inf, 0.0, 0)
    for share in np.arange(0.05, 0.8, 0.01):
        for padding in range(0, 132, 4):
            error = np.abs(found.missed(share * peak, padding))
            least = np.median(error[many]) + 0.3 * np.quantile(error[many], 0.9)
            least += 0.3 * np.median(error[~many])
            best = min(best, (float(least), round(float(share * peak)), padding))
    return best[1], best[2]


def left_out(found: Launches, peak: float) -> np.ndarray:
    """What is missed of each shape by a fit to the others; empty where there is only one."""
    errors = [np.zeros(0)]
    for shape in np.unique(found.shape):
        own = found.shape == shape
        if not own.all():
            law = fitted(Launches(*(each[~own] for each in found)), peak)
            error = Launches(*(each[own] for each in found)).missed(*law)
            errors.append(error[found.tokens[own] >= MANY])
    return np.concatenate(errors)


def main(folder: Path) -> None:
    """Print the table."""
    for name, tables in TABLES.items():
        hardware = load_hardware(name)
        byte_us = 1 / (hardware.memory_bandwidth_gb_s * hardware.bandwidth_efficiency * 1e3)
        for gpu, release, weights in tables:
            found = launches(folder / gpu / "moe" / release, weights, byte_us)
            if found is None:
                continue
            peak = hardware.tflop_s["fp8" if weights == "fp8" else "bfloat16"]
            tflop_s, padding_rows = fitted(found, peak)
            sheet = (peak * hardware.compute_efficiency, 0)
            words = []
            for error in (
                found.missed(tflop_s, padding_rows)[found.tokens >= MANY],
                left_out(found, peak),
                found.missed(*sheet)[found.tokens >= MANY],
            ):
                if len(error):
                    cuts = np.exp(np.quantile(np.abs(error), (0.5, 0.9)))
                    words.append(f"x {cuts[0]:.2f}, {cuts[1]:.2f}")
                else:
                    words.append("none")
            sys.stdout.write(
                f"{name} {weights}: {tflop_s:g} TFLOP/s, {padding_rows} rows; {len(found.us)} times"
                f" of {release}: {words[0]}; shapes left out {words[1]}; data sheet {words[2]}\n"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
