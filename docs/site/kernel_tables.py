"""Turns public kernel tables of a GPU into the folder that `kvsim profile import` reads.

    python docs/site/kernel_tables.py FOLDER/b200_sxm OUT

`FOLDER` is `aiconfigurator_core/systems/data` of the wheel aiconfigurator-core 0.12.0 (PyPI). Rows
of dense attention and bf16, of vLLM 0.24.0; the shipped profiles of B200, B300, GB200, GB300 and
L40S are made of them. Milliseconds become microseconds, and repeated rows their median.
"""

import sys
from pathlib import Path

import pandas as pd

RELEASE = "vllm/0.24.0"
HEADS = ["q_heads", "kv_heads", "head_dim", "kv_dtype", "n_seqs"]


def attention(path: Path, tokens: str) -> pd.DataFrame:
    """Rows of full attention; `tokens` is the context of a decode, or the length of a prompt."""
    table = pd.read_parquet(path)
    table = table[(table.window_size == 0) & table.head_dim.isin([64, 128])]
    table = table[table.kv_cache_dtype == "bfloat16"].rename(
        columns={"num_heads": "q_heads", "batch_size": "n_seqs"}
    )
    kv_heads = table.num_key_value_heads
    table["kv_heads"] = kv_heads.where(kv_heads > 0, table.q_heads)
    table["kv_dtype"] = "bf16"
    table[tokens] = table.step + 1 if tokens == "ctx" else table.isl
    return averaged(table, [*HEADS, tokens])


def averaged(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """A row for each of the keys, in microseconds."""
    table = table.assign(us=(1e3 * table.latency).round(3))
    return table.groupby(keys, as_index=False).us.median()


def main(gpu: Path, out: Path) -> None:
    """Write the files."""
    out.mkdir(parents=True)
    folder = gpu / "attention" / RELEASE
    decodes = attention(folder / "generation_attention_perf.parquet", "ctx")
    decodes.to_csv(out / "decode.csv", index=False)
    prompts = attention(folder / "context_attention_perf.parquet", "q_tokens")
    prompts.to_csv(out / "prefill.csv", index=False)
    products = pd.read_parquet(gpu / "gemm" / RELEASE / "gemm_perf.parquet")
    products = products[products.gemm_dtype == "bfloat16"]
    products = products[(products.n >= 512) & (products.k >= 512)]
    averaged(products, ["m", "n", "k"]).to_csv(out / "gemm.csv", index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
