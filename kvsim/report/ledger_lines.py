"""Writes the ledger of a run as a few lines, with the largest parts only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.ledger.parts import KERNEL_LABELS, PROMPT_LABELS, TIME_LABELS
from kvsim.report.ledger_summary import bare
from kvsim.report.numerals import percent

SHOWN = 5
"""Most parts of a line."""


def ledger_lines(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Label and parts of each line, the largest first."""
    lines = [("mean request", _shares(summary["time_ledger_mean_ms"], TIME_LABELS))]
    slow = summary["time_ledger_requests"]["p99"]
    shares = _shares(slow["parts_ms"], TIME_LABELS)
    lines.append(("p99 request", [f"id {slow['id']}", *shares]))
    if any(summary.get("step_time_s", {}).values()):
        lines.append(("step time", _shares(summary["step_time_s"], KERNEL_LABELS)))
    if any((summary.get("prompt_ledger_tokens") or {}).values()):
        lines.append(("prompt tokens", _shares(summary["prompt_ledger_tokens"], PROMPT_LABELS)))
    return lines


def _shares(values: Mapping[str, float], labels: Mapping[str, str]) -> list[str]:
    named = {label: values[bare(name)] for name, label in labels.items()}
    order = sorted(named, key=lambda label: -named[label])
    whole = sum(named.values())
    return [f"{label} {percent(named[label] / whole)}" for label in order[:SHOWN] if named[label]]
