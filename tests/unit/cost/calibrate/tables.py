"""Small folders of kernel times, as LLMServingSim publishes them, from a formula."""

from itertools import product
from pathlib import Path

from places import ROOT

from kvsim.machine import load_model
from kvsim.machine.models import Experts

META = """\
profiler_version: 1.0.0
vllm_version: 0.19.0
cuda_version: '12.8'
gpu: Test GPU
profiled_at: '2026-01-02T03:04:05+00:00'
model: someone/Tiny
variant: bf16
tp_degrees: [1]
engine_effective:
  block_size: 16
  hf_overrides:
    num_hidden_layers: 1
    num_attention_heads: 4
skew_fit:
  enabled: false
"""
Q, CTX, N, KV = (16, 32, 64), (0, 16, 64), (1, 2, 8), (16, 64, 256)
TOKENS, SEQUENCES = (1, 2, 16, 64), (1, 8)
OPERATORS = {
    "embedding": 1,
    "final_layernorm": 2,
    "layernorm": 3,
    "qkv_proj": 5,
    "rotary_emb": 7,
    "o_proj": 11,
    "gate_up_proj": 13,
    "act_fn": 17,
    "down_proj": 19,
}


MLP = ("gate_up_proj", "act_fn", "down_proj")
"""Operators of layers without experts."""
EXPERTS = Experts(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64)
LAYERS = load_model("tiny").num_hidden_layers


def attention_us(q: float, ctx: float, n: float, kv: float) -> float:
    """Linear in each of the four, so that interpolation is exact."""
    return 2 + q * (1 + ctx / 8) + n * kv / 4 + q * n / 2


def write_tables(folder: Path, meta: str = META) -> Path:
    """Write `meta.yaml` and `tp1/*.csv` below `folder`; returns the folder."""
    tables = folder / "tp1"
    tables.mkdir(parents=True)
    (folder / "meta.yaml").write_text(meta)
    points = [
        *product((0,), (0,), N, KV),
        *product(Q, CTX, (0,), (0,)),
        *product(Q, CTX, N, KV),
    ]
    write_csv(
        tables / "attention.csv",
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us",
        [(*point, attention_us(*point)) for point in points],
    )
    dense = [(name, t, us * t) for name, us in OPERATORS.items() for t in TOKENS]
    write_csv(tables / "dense.csv", "layer,tokens,time_us", dense)
    heads = [(name, s, us + s) for name, us in (("lm_head", 50), ("sampler", 5)) for s in SEQUENCES]
    write_csv(tables / "per_sequence.csv", "layer,sequences,time_us", heads)
    return folder


def write_csv(path: Path, header: str, rows: list[tuple[object, ...]]) -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def measured_us(tokens: float, active: float) -> float:
    """A layer with experts, all of them on one GPU."""
    return 20 + 2 * tokens + 10 * active


def others_us(tokens: int) -> float:
    """Linear layers outside the experts, as `OPERATORS` are called."""
    once = OPERATORS["embedding"] + OPERATORS["final_layernorm"]
    layer = sum(us for name, us in OPERATORS.items() if name not in MLP) - once
    return tokens * (once + LAYERS * (layer + OPERATORS["layernorm"]))


def write_experts(folder: Path, ep: int = 0) -> Path:
    """`moe.csv` as published: powers of two, no more experts than the tokens can have; `ep`: as
    newer profilers write the share of one of so many GPUs."""
    rows = [
        (tokens, active, measured_us(tokens, active))
        for tokens in (*range(1, 17), 32, 64)
        for active in (2, 4, 8, 16)
        if active <= 2 * tokens
    ]
    head = "tokens,activated_experts,time_us"
    if ep:
        head, rows = f"ep,{head}", [(ep, tokens * ep, *rest) for tokens, *rest in rows]
    write_csv(folder / "tp1" / "moe.csv", head, rows)
    return folder


def write_sparse_model(folder: Path) -> str:
    """`tiny` with `EXPERTS` in every layer, as a file for the importer; returns its path."""
    path = folder / "sparse.toml"
    text = (ROOT / "configs" / "models" / "tiny.toml").read_text()
    lines = [f"{key} = {getattr(EXPERTS, key)}" for key in EXPERTS.__struct_fields__[:3]]
    path.write_text(text + "\n[experts]\n" + "\n".join(lines) + "\n")
    return str(path)
