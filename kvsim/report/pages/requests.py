"""Shows every request of a run: maps of their lengths, and a table to search, filter and open."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsim.report.pages.figures import (
    Axis,
    Figure,
    chart,
    compact,
    log_ticks,
    ratios,
    time_unit,
    titled,
)
from kvsim.report.pages.html import Html, element, embedded, join, lead, text_of
from kvsim.report.pages.view import View
from kvsim.results.ledger import TIME_LABELS, TIME_PARTS
from kvsim.results.numerals import count, plural
from kvsim.results.phases import completed
from kvsim.results.summary import bare, good_requests

MOST_BYTES = 400_000
"""Most bytes of packed requests; of a longer run, the page holds the slowest."""

_MOST = 25_000
"""More requests than `MOST_BYTES` can hold."""

_INSTANTS = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
_COUNTS = ("input_length", "output_tokens", "num_cached_tokens", "num_preemptions")
_FILTERS = {
    "": "all requests",
    "completed": "completed",
    "missed": "completed beyond a limit",
    "preempted": "preempted",
    "failed": "not completed",
}


def explorer(run: View) -> Html:
    """A table of requests, the slowest first, and what its script needs to fill it."""
    e2el = run.durations["e2el"]
    order = np.argsort(-np.nan_to_num(e2el, nan=np.inf), kind="stable")[:_MOST]
    packed = _packed(run, order)
    while len(packed) > MOST_BYTES:
        order = order[: int(0.95 * len(order) * MOST_BYTES / len(packed))]
        packed = _packed(run, order)
    words = "Every request: search by id, choose which, sort by a heading, click one for its story."
    if len(order) < len(e2el):
        words = f"The {plural(len(order), 'slowest request')} of {count(len(e2el))}."
        words += " `kvsim why` tells the story of any other."
    good = good_requests(run.durations, run.summary["meta"].get("goodput"))
    options = (
        element("option", label, value=value)
        for value, label in _FILTERS.items()
        if value != "missed" or good is not None
    )
    controls = element(
        "div",
        element("input", type="search", placeholder="Search by id", aria_label="Search by id"),
        element("select", *options, aria_label="Which requests"),
        element("span", class_="muted", id="requests-shown"),
        class_="controls",
    )
    data = embedded({"packed": b64encode(packed).decode()})
    return join(
        (
            lead(words),
            element(
                "div", controls, element("div", class_="scroll"), id="explorer", class_="panel"
            ),
            element("script", data, type="application/json", id="requests-data"),
            element("script", Html(text_of("requests.js"))),
        )
    )


def length_figures(run: View) -> list[Figure]:
    """How many requests have which lengths, and how long they take; nothing for few requests."""
    prompts, outputs = (np.asarray(run.requests[name], float) for name in _COUNTS[:2])
    e2el = run.durations["e2el"]
    done = completed(run.requests) & (prompts > 0) & (outputs > 0)
    if done.sum() < 2:
        return []
    x, y = _edges(prompts[done]), _edges(outputs[done])
    number, *_ = np.histogram2d(outputs[done], prompts[done], (y, x))
    total, *_ = np.histogram2d(outputs[done], prompts[done], (y, x), weights=e2el[done])
    mean = ratios(total, number)
    unit, ns = time_unit([float(np.nanmax(mean))])
    number[number == 0] = np.nan
    maps = (
        ("lengths-number", "How many", "requests", number, ":,.0f"),
        ("lengths-e2el", "How long they take", f"E2EL, mean ({unit})", mean / ns, ":.3~g"),
    )
    return [_map(id, title, unit, x, y, z, form) for id, title, unit, z, form in maps]


def _edges(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Powers of two around all lengths."""
    first, last = np.floor(np.log2(lengths.min())), np.floor(np.log2(lengths.max())) + 1
    return np.asarray(2.0 ** np.arange(first, last + 1))


def _map(
    id: str,
    title: str,
    unit: str,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    z: NDArray[np.float64],
    form: str,
) -> Figure:
    texts = [
        [f"prompt {_span(x, j)}, output {_span(y, i)}" for j in range(len(x) - 1)]
        for i in range(len(y) - 1)
    ]
    data = {
        "type": "heatmap",
        "x": x.tolist(),
        "y": y.tolist(),
        "z": [compact(row) for row in z],
        "text": texts,
        "hovertemplate": f"%{{text}}: <b>%{{z{form}}}</b><extra></extra>",
        "colorscale": [[0, "var(--least)"], [1, "var(--most)"]],
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": unit, "side": "right"}},
    }
    across, up = (
        titled(f"{name} tokens", **_within(edges)) for name, edges in (("prompt", x), ("output", y))
    )
    margin = {"r": 10}
    return chart(id, title, "", [data], across, up, height=320, hovermode="closest", margin=margin)


def _within(edges: NDArray[np.float64]) -> Axis:
    """A logarithmic axis from the first to the last edge; every second power of two is written."""
    powers = edges[:: max(1, len(edges) // 5)]
    return {
        **log_ticks(edges[0], edges[-1]),
        "tickvals": powers.tolist(),
        "ticktext": [f"{power:,.0f}" for power in powers],
        "range": [float(np.log10(edges[0])), float(np.log10(edges[-1]))],
    }


def _span(edges: NDArray[np.float64], i: int) -> str:
    return f"{count(edges[i])} to {count(edges[i + 1] - 1)} tokens"


def _packed(run: View, order: NDArray[np.intp]) -> bytes:
    """The requests in this order as compressed JSON: a list for each column."""
    # Level 6 makes it a tenth smaller, and takes longer than the rest of the page.
    return zlib.compress(msgspec.json.encode(dict(_columns(run, order))), level=1)


def _columns(run: View, order: NDArray[np.intp]) -> Iterator[tuple[str, Any]]:
    """Instants and parts in microseconds, -1 for what never happened."""
    requests = run.requests
    places = order.tolist()
    yield "index", places
    for name in ("id", "status", "reason"):
        texts = requests[name]
        yield name, [str(texts[i]) for i in places]
    for name in _INSTANTS:
        times = np.asarray(requests[name])[order]
        yield bare(name), np.where(times < 0, -1, times // 1000).tolist()
    for name in _COUNTS:
        yield name, np.asarray(requests[name])[order].tolist()
    good = good_requests(run.durations, run.summary["meta"].get("goodput"))
    yield "good", None if good is None else good[order].astype(int).tolist()
    there = TIME_PARTS[0] in requests
    named = {
        name: np.asarray(requests[name])[order] // 1000 for name in (TIME_PARTS if there else ())
    }
    yield "parts", {bare(name): us.tolist() for name, us in named.items() if us.any()}
    yield "labels", {bare(name): label for name, label in TIME_LABELS.items()}
