"""What a run copied to and from the tiers below the GPU, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.results.numerals import count, plural, seconds, size


def tier_figures(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Label and parts of each line; none for a run without a KV connector."""
    moved = summary["meta"].get("kv_offload")
    if not moved:
        return []
    lines = [
        (
            way,
            [
                plural(moved[f"{way}_blocks"], "block"),
                size(moved[f"{way}_bytes"]),
                f"{seconds(moved[f'{way}_copy_s'])} of copies",
            ],
        )
        for way in ("stored", "loaded")
    ]
    below = summary["tier2_hit_tokens"]
    hits = [f"{count(summary['tier1_hit_tokens'])} prompt tokens loaded from CPU memory"]
    hits += [f"{count(below)} from {moved.get('storage', 'the tier below')}"] * bool(below)
    waits = [
        text.format(count(moved[key]))
        for key, text in (
            ("waited_for_stores", "{} requests for a store"),
            ("waited_for_loads_of_others", "{} for the load of another"),
            ("flushed_jobs", "{} stores held up a step"),
            ("refused_stores", "{} stores refused for lack of room"),
        )
        if moved.get(key)
    ]
    flushed = summary["flush_s"]
    waits += [f"steps waited {seconds(flushed)}"] * bool(flushed)
    return [*lines, ("hits", hits), *([("waits", waits)] if waits else [])]
