"""Shows the ledger of a run: where the time of requests and steps and the prompt tokens went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvsim.ledger.parts import KERNEL_LABELS, PROMPT_LABELS, TIME_LABELS
from kvsim.report.html import Html, element, join, key_of, panel, strip, table
from kvsim.report.ledger_summary import SHOWN, bare
from kvsim.report.numerals import count, milliseconds, percent, seconds, show
from kvsim.report.statistics import ratio

_TIME = {bare(name): label for name, label in TIME_LABELS.items()}
_STEP = {bare(name): label for name, label in KERNEL_LABELS.items()}
_PROMPT = {bare(name): label for name, label in PROMPT_LABELS.items()}


def ledger_section(summary: Mapping[str, Any]) -> Html:
    """All panels of the ledger; empty for a run without one."""
    parts: list[object] = []
    if "time_ledger_mean_ms" not in summary:
        return Html("")
    if summary["completed"]:
        parts += [element("h3", "Requests, from arrival to end"), request_panel(summary)]
    if any(summary.get("step_time_s", {}).values()):
        parts += [element("h3", "Steps, by kernel"), step_panel(summary)]
    if summary.get("prompt_ledger_tokens"):
        parts += [element("h3", "Prompt tokens and the prefix cache"), prompt_panel(summary)]
    return join(parts or [element("p", "Nothing was completed and no step was run.")])


def request_panel(summary: Mapping[str, Any]) -> Html:
    """The mean request, the requests at p50 and p99 of E2EL, and every part over all requests."""
    bars = {"Mean request": summary["time_ledger_mean_ms"]}
    for name, one in summary["time_ledger_requests"].items():
        bars[f"{name} of E2EL: {one['id']}"] = one["parts_ms"]
    longest = max(sum(parts.values()) for parts in bars.values())
    seen = [name for name in _TIME if any(parts[name] for parts in bars.values())]
    rows = [
        (title, time_strip(parts, longest), milliseconds(sum(parts.values())))
        for title, parts in bars.items()
    ]
    lead = "Parts add up, to the nanosecond. Percentiles in the table are of each part by itself."
    return panel(
        None,
        element("p", lead),
        table(["", "Where its time went", "E2EL"], rows, text_columns=2),
        part_key(seen),
        _request_table(summary),
    )


def step_panel(summary: Mapping[str, Any]) -> Html:
    """The time of all steps by kernel."""
    return _shares(summary["step_time_s"], _STEP, "kernel", seconds)


def prompt_panel(summary: Mapping[str, Any]) -> Html:
    """The tokens of all admitted prompts, by the outcome of their cache look-up."""
    found, lost = summary["prefix_cache_preempted_hit_tokens"], summary["recomputed_tokens"]
    again = (
        f"First admissions only. After preemptions, {count(found)} tokens were found again and"
        f" {count(lost)} were computed again."
    )
    shares = _shares(summary["prompt_ledger_tokens"], _PROMPT, "prompt", count)
    return join((shares, element("p", again)))


def time_strip(parts: Mapping[str, float], longest: float) -> Html:
    """A bar whose parts have the lengths of a request's parts, in milliseconds."""
    return strip(
        (
            f"var(--part-{name})",
            (parts[name] or 0.0) / longest,
            f"{label}: {milliseconds(parts[name])}",
        )
        for name, label in _TIME.items()
        if longest and parts[name]
    )


def part_key(names: Iterable[str]) -> Html:
    """The legend of a `time_strip`."""
    return key_of((f"var(--part-{name})", _TIME[name]) for name in names)


def _request_table(summary: Mapping[str, Any]) -> Html:
    total = summary["time_ledger_total_s"]
    whole = sum(total.values())
    figures = [summary[f"time_ledger_{statistic}_ms"] for statistic in SHOWN]
    rows = [
        [
            label,
            seconds(total[name]),
            show(ratio(total[name], whole), "share"),
            *(show(each[name], "ms") for each in figures),
        ]
        for name, label in _TIME.items()
        if total[name]
    ]
    return table(["Completed requests", "Total", "Share", *SHOWN], rows)


def _shares(
    values: Mapping[str, float], labels: Mapping[str, str], family: str, write: Any
) -> Html:
    """A bar of the parts of a whole, and their legend."""
    whole = sum(values.values())
    parts = [
        (f"var(--{family}-{name})", values[name] / whole, label)
        for name, label in labels.items()
        if values[name]
    ]
    words = [
        (colour, f"{label}: {write(share * whole)}, {percent(share)}")
        for colour, share, label in parts
    ]
    return panel(None, strip(parts), key_of(words))
