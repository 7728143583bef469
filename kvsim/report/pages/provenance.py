"""Shows where a run came from, how to repeat it, and how its memory was divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.report.pages.html import Html, columns, element, facts, join, panel, shares, written
from kvsim.report.wording import time_source
from kvsim.results.numerals import MISSING, count, size
from kvsim.results.plain import flat, to_toml

MEMORY = {
    "weight_bytes": ("weights", "memory-weights"),
    "drafter_bytes": ("drafter", "memory-drafter"),
    "adapter_bytes": ("slots for adapters", "memory-adapters"),
    "activation_bytes": ("activations, estimated", "memory-activations"),
    "sampler_bytes": ("sampler, estimated", "memory-sampler"),
    "overhead_bytes": ("overhead, estimated", "memory-overhead"),
    "communication_bytes": ("communication, estimated", "memory-communication"),
    "cudagraph_bytes": ("CUDA graphs, estimated", "memory-cudagraphs"),
    "kv_bytes": ("KV blocks", "used"),
}
"""Terms of a budget, `kvsim.machine.memory.Budget`, that add up to the memory the engine may
use."""


def provenance_panels(meta: Mapping[str, Any]) -> Html:
    """Command, trace, versions, time source and the full configuration."""
    trace, config = meta.get("trace") or {}, meta.get("config") or {}
    router = meta.get("router") or {}
    origin = {
        "Trace": trace.get("path"),
        "Trace format": trace.get("format"),
        "Trace SHA-256": trace.get("sha256"),
        "Requests in the trace": trace.get("requests"),
        "Seed": meta.get("seed"),
        "kvsim": meta.get("kvsim_version"),
        "Engine": meta.get("engine"),
        "Replicas": f"{meta['replicas']} behind {router['name']}" if router else None,
        **{f"Router, {key}": value for key, value in (router.get("args") or {}).items()},
        "Scheduler": meta.get("scheduler"),
        "Block manager": meta.get("block_manager"),
        "Step times": time_source(meta),
        "Oracles": ", ".join(meta.get("oracles") or ()) or None,
    }
    notes = _notes("Notes of the trace reader", trace), _notes("Notes", meta)
    assumed = {
        key: f"{written(key, each['value'])} ({each['source']})"
        for key, each in (meta.get("assumed") or {}).items()
    }
    server = {
        key: f"{written(key, config.get(key))} ({place})"
        for key, place in (meta.get("server") or {}).items()
    }
    panels = (
        panel("Origin", facts(origin), *notes),
        _listed("Assumed settings", assumed),
        _listed("From the server", server),
        panel("Configuration", element("pre", to_toml(config))),
        _listed("Cost model", flat(meta.get("cost") or {})),
        _listed("Link between GPU and CPU", flat(meta.get("link") or {})),
    )
    repeat = panel("To repeat it", element("pre", meta.get("command") or MISSING))
    return join((repeat, columns(panels)))


def memory_panel(meta: Mapping[str, Any]) -> Html:
    """The budget of one GPU term by term, and the resulting blocks."""
    budget = flat(meta.get("memory") or {})
    blocks = panel("Blocks", facts(_blocks(budget, meta)))
    whole = budget.get("memory_bytes")
    if not whole:
        return blocks
    terms = dict(budget)
    if budget.get("num_gpu_blocks_overridden"):
        terms["kv_bytes"] = (budget.get("num_gpu_blocks") or 0) * (budget.get("block_bytes") or 0)
    parts = [
        (colour, max(terms.get(key) or 0, 0), label) for key, (label, colour) in MEMORY.items()
    ]
    rest = whole - sum(amount for _, amount, _ in parts)
    bar = shares([*parts, ("free", max(rest, 0), "left to others")], size)
    beyond = f"; num_gpu_blocks_override takes {size(-rest)} more" if rest < 0 else ""
    return join((panel(f"Budget of one GPU, {size(whole)}{beyond}", bar), blocks))


def _listed(title: str, named: Mapping[str, Any]) -> Html | None:
    return panel(title, facts(named)) if named else None


def _blocks(budget: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of blocks and how they were computed; the other terms unchanged."""
    total = meta.get("num_gpu_blocks")
    slots = (total or 0) * (meta.get("block_size") or 0)
    told = {*MEMORY, "memory_bytes", "num_gpu_blocks", "num_cpu_blocks"}
    return {
        "GPU blocks of the run": total and f"{count(total)}, room for {count(slots)} tokens",
        "Kept free at admission": meta.get("watermark_blocks") or None,
        "CPU blocks of the run": meta.get("num_cpu_blocks") or None,
        "Tokens per block": meta.get("block_size"),
        **{key: value for key, value in budget.items() if value and key not in told},
    }


def _notes(title: str, table: Mapping[str, Any]) -> Html | None:
    """The `notes` of a table as a list under a title; none if there are none."""
    notes = [element("li", note) for note in table.get("notes") or ()]
    return join((element("h3", title), element("ul", *notes))) if notes else None
