"""Draws who waits for which LoRA adapter, and how the adapters' requests fare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsim.report.pages.figures import (
    Figure,
    Points,
    chart,
    compact,
    held,
    line,
    points,
    room_for,
    rows_axis,
    scale,
    time_unit,
    titled,
)
from kvsim.report.pages.view import BARS, View, lined
from kvsim.results.numerals import count, seconds
from kvsim.results.phases import defined, ints
from kvsim.results.statistics import percentiles

MOST_STACKED, MOST_LISTED = 5, 20
"""Most adapters with a colour of their own, and with a row."""
LONGEST = 24
"""Letters of a name that are written."""


def adapters(run: View) -> dict[str, np.ndarray]:
    """Which requests name which adapter, the one with most requests first; empty where the server
    has no adapters. Requests without one are those of the `base model`."""
    named = np.asarray(run.requests.get("lora", ()))
    if not (run.summary["meta"]["config"].get("enable_lora") and (named != "").any()):
        return {}
    names, numbers = np.unique(named, return_counts=True)
    order = np.argsort(-numbers, kind="stable")
    return {str(names[i]) or "base model": named == names[i] for i in order}


def waiting_by_adapter(run: View) -> Iterator[Figure]:
    """Requests in the queue over time, by adapter."""
    those = adapters(run)
    if not those:
        return
    sent, begun = (ints(run.requests[name]) for name in ("arrival_ns", "first_scheduled_ns"))
    begun = np.where(begun < 0, run.end_ns, begun)
    bins = run.sums(sent, BARS)
    waits = {name: _waiting(sent[of], begun[of], bins.edges_ns) for name, of in those.items()}
    ranked = sorted(waits, key=lambda name: -waits[name].sum())
    parts: list[tuple[Points, str, str]] = [
        (held(waits[name]), f"run-{i}", _short(name))
        for i, name in enumerate(ranked[:MOST_STACKED], 1)
    ]
    if others := ranked[MOST_STACKED:]:
        rest = np.sum([waits[name] for name in others], axis=0)
        parts.append((held(rest), "other", f"{count(len(others))} others"))
    most = run.summary["meta"]["config"].get("max_loras") or 1
    note = f"Requests before their first step; at most {count(most)} adapters run together."
    if "waiting_loras_ns" in run.requests:
        lost = ints(run.requests["waiting_loras_ns"])
        note += (
            f" In all, requests waited {seconds(lost.sum() / 1e9)} for a place of their adapter."
        )
    drawn, y = lined(bins.x, parts, "one"), titled("requests")
    yield run.figure("adapters", "Queue by adapter", note, drawn, y)


def _waiting(sent: np.ndarray, begun: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How many of these requests wait, on average over each bin."""
    waited = _elapsed(sent, edges) - _elapsed(begun, edges)
    mean: np.ndarray = np.diff(waited) / np.diff(edges)
    return mean


def _elapsed(instants: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The time that has passed since each of these instants, summed over those before `at`."""
    ordered = np.sort(instants).astype(float)
    before = np.searchsorted(ordered, at)
    sums: np.ndarray = before * at - np.append(0, np.cumsum(ordered))[before]
    return sums


def ttft_by_adapter(run: View) -> Iterator[Figure]:
    """TTFT p50 and p99 of each adapter's requests, the slowest first."""
    ttft, found = run.durations["ttft"], list[tuple[float, float, str]]()
    for name, of in adapters(run).items():
        if (values := defined(ttft[of])).size:
            p50, p99 = percentiles(values, (50, 99))
            found.append((p99, p50, f"{_short(name)} ({count(values.size)})"))
    if not found:
        return
    found = sorted(found, reverse=True)[:MOST_LISTED]
    unit, ns = time_unit([found[0][0]])
    drawn = [
        line(compact((p50 / ns, p99 / ns)), [i, i], "rule", width=3)
        for i, (p99, p50, _) in enumerate(found)
    ]
    ends = compact(p50 / ns for _, p50, _ in found), compact(p99 / ns for p99, *_ in found)
    for x, colour, label in zip(ends, ("running", "peak"), ("p50", "p99"), strict=True):
        dots = points(x, list(range(len(found))), colour, size=9, opacity=1)
        drawn.append(dots | {"name": label, "hovertemplate": "%{x:.3~g}"})
    both = [value for end in ends for value in end if value is not None]
    across, labels = titled(f"TTFT ({unit})", showgrid=True, **scale(both)), [x[2] for x in found]
    note = "In brackets: requests with a first token."
    if len(found) == MOST_LISTED:
        note += f" The {MOST_LISTED} slowest adapters."
    further: dict[str, Any] = {"hovermode": "closest", "height": max(280, 70 + 24 * len(found))}
    further["margin"] = room_for(labels)
    id, title = "ttft-adapter", "TTFT by adapter"
    yield chart(id, title, note, drawn, across, rows_axis(labels), **further)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
