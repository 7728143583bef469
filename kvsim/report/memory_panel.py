"""Shows how the memory of a GPU was divided, and how many blocks that gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.report.html import Html, key_of, panel, strip
from kvsim.report.numerals import count, percent, size
from kvsim.report.provenance import facts, flat

PARTS = (
    ("weight_bytes", "weights", "var(--memory-weights)"),
    ("activation_bytes", "activations, estimated", "var(--memory-activations)"),
    ("sampler_bytes", "sampler, estimated", "var(--memory-sampler)"),
    ("overhead_bytes", "overhead, estimated", "var(--memory-overhead)"),
    ("communication_bytes", "communication, estimated", "var(--memory-communication)"),
    ("cudagraph_bytes", "CUDA graphs, estimated", "var(--memory-cudagraphs)"),
    ("kv_bytes", "KV blocks", "var(--used)"),
)
"""Terms of a budget, `kvsim.memory.Budget`, that add up to the memory the engine may use."""

SOMETIMES = ("sampler_bytes", "communication_bytes", "cudagraph_bytes")
"""Terms that are shown only where they are not 0."""


def memory_panel(meta: Mapping[str, Any]) -> Html:
    """The budget of one GPU term by term, and the resulting blocks."""
    budget = flat(meta.get("memory") or {})
    blocks = panel("Blocks", facts(_blocks(budget, meta)))
    if not budget.get("memory_bytes"):
        return blocks
    whole = budget["memory_bytes"]
    parts = [
        (colour, max(budget.get(key) or 0, 0), label)
        for key, label, colour in PARTS
        if budget.get(key) or key not in SOMETIMES
    ]
    rest = whole - sum(part for _, part, _ in parts)
    parts.append(("var(--free)", max(rest, 0), "left to others"))
    words = [
        (colour, f"{label}: {size(part)}, {percent(part / whole)}") for colour, part, label in parts
    ]
    bar = strip((colour, part / whole, label) for colour, part, label in parts)
    return Html(panel(f"Budget of one GPU, {size(whole)}", bar, key_of(words)) + blocks)


def _blocks(budget: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of blocks and how they were computed; the other terms unchanged."""
    named = {key for key, *_ in PARTS} | {"memory_bytes"}
    total = meta.get("num_gpu_blocks")
    slots = (total or 0) * (meta.get("block_size") or 0)
    run = None if total is None else f"{count(total)}, room for {count(slots)} tokens"
    return {
        "GPU blocks of the run": run,
        "Kept free at admission": meta.get("watermark_blocks"),
        "CPU blocks of the run": meta.get("num_cpu_blocks"),
        "Tokens per block": meta.get("block_size"),
        **{
            key: value
            for key, value in budget.items()
            if key not in named and key not in ("num_gpu_blocks", "num_cpu_blocks")
        },
    }
