"""Checks a result that was read from a folder, so that nothing that uses it has to.

* A table has no negative numbers and no unknown codes where `kvsim.core.schema` has none. Places
  and instants are in order, ids are unique, and rows are about requests that exist.
* `meta` has the types that `Meta` states.
* Figures are those that the tables give. Gaps between tokens are not in the tables, so they only
  have to be numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Struct

from kvsim.core.schema import INTEGER, TEXT, Column, Table
from kvsim.results.summary import summarise
from kvsim.settings.parsing import DEEP, is_flat, typed

_FIGURES_AGREE = 1e-6
"""Relative difference between processors, far below what an edit of a file changes."""
_MOST = 1 << 62
_GAPS = "_itl_ms"
"""Keys of gaps between tokens end so."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Bytes = Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)]


class _Facts(Struct):
    path: str | None = None
    format: str | None = None
    sha256: str | None = None
    requests: Count | None = None
    notes: list[str] | None = None


class _Assumption(Struct):
    value: bool | int | float | str | None
    source: str


class _Outcome(Struct):
    kind: str
    time_s: float | None = None
    step: Count | None = None
    request: str | None = None
    explanation: str | None = None
    remedy: str | None = None
    rule: str | None = None


class _Cost(Struct):
    source: str | None = None
    kind: str | None = None
    priced_steps: Count | None = None
    extrapolated_steps: Count | None = None
    notes: list[str] | None = None


class _Budget(Struct):
    memory_bytes: _Bytes | None = None
    weight_bytes: _Bytes | None = None
    drafter_bytes: _Bytes | None = None
    adapter_bytes: _Bytes | None = None
    activation_bytes: _Bytes | None = None
    sampler_bytes: _Bytes | None = None
    overhead_bytes: _Bytes | None = None
    communication_bytes: _Bytes | None = None
    cudagraph_bytes: _Bytes | None = None
    kv_bytes: _Bytes | None = None


class _Map(Struct):
    samples: Count


class _Cache(Struct):
    block_lookups: Count | None = None
    block_hits: Count | None = None


class _Router(Struct):
    name: str
    args: dict[str, Any]


class Meta(Struct):
    """The types of what a summary keeps under `meta`; keys may be missing, and others there."""

    kvsim_version: str | None = None
    core: str | None = None
    command: str | None = None
    config: dict[str, Any] | None = None
    assumed: dict[str, _Assumption] | None = None
    trace: _Facts | None = None
    seed: Count | None = None
    engine: str | None = None
    model: str | None = None
    hardware: str | None = None
    block_manager: str | None = None
    scheduler: str | None = None
    prefix_caching: bool | None = None
    block_size: Count = 0
    num_gpu_blocks: Count | None = None
    num_cpu_blocks: Count | None = None
    steps_in_flight: Count = 1
    watermark_blocks: Count | None = None
    notes: list[str] | None = None
    memory: _Budget | None = None
    cost: _Cost | None = None
    link: dict[str, Any] | None = None
    cache: _Cache | None = None
    goodput: dict[str, float] | None = None
    oracles: list[str] | None = None
    outcome: _Outcome | None = None
    engine_errors: list[_Outcome] | None = None
    block_map: _Map | None = None
    server: dict[str, str] | None = None
    router: _Router | None = None
    replicas: Count | None = None


def problem_of_meta(meta: Any) -> str:
    """The first key of `meta` that is not as `Meta` says, in words; empty if all are."""
    if not is_flat(meta):
        return f"meta: {DEEP}"
    try:
        typed(meta, Meta)
    except msgspec.ValidationError as error:
        text, _, at = str(error).partition(" - at `$")
        return f"meta{at.rstrip('`')}: {text[:1].lower()}{text[1:]}"
    return ""


def problem_of_table(table: Table, columns: Mapping[str, Any]) -> str:
    """The first column with a value that it cannot have, in words; empty if there is none.

    `columns`: as read, with -1 for null.
    """
    for column in table.columns:
        if column.name in columns and (problem := _problem_of(column, columns[column.name])):
            return f"column {column.name}: {problem}"
    return ""


def problem_of_requests(requests: Mapping[str, Any]) -> str:
    """What is wrong between columns of requests, in words; empty if nothing is."""
    index, ids = requests["index"], requests["id"]
    if not np.array_equal(index, np.arange(len(index))):
        return "column index: not 0, 1, 2, ..."
    if len(set(ids)) < len(ids):
        return "column id: one id is given twice"
    if len(index) and int(np.min(requests["n"])) < 1:
        return "column n: a request of no sequence"
    done = np.asarray(requests["status"], dtype=np.str_) == "completed"
    lived = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
    for before, after in pairwise(lived):
        there = (requests[after] >= 0) if after != "finish_ns" else done
        if np.any(requests[after][there] < requests[before][there]):
            return f"column {after}: before {before}"
        if np.any(requests[after][done] < 0):
            return f"column {after}: null for a completed request"
    return ""


def problem_of_steps(steps: Mapping[str, Any]) -> str:
    """What is wrong between columns of steps, in words; empty if nothing is."""
    start, end = steps["start_ns"], steps["end_ns"]
    if np.any(np.diff(start) < 0):
        return "column start_ns: before that of the step before"
    if np.any(end < start):
        return "column end_ns: before start_ns"
    return ""


def problem_of_transitions(transitions: Mapping[str, Any], requests: int) -> str:
    """What is wrong with a log of this many requests, in words; empty if nothing is."""
    if np.any(transitions["request"] >= requests):
        return f"column request: not one of the {requests} requests"
    if np.any(np.diff(transitions["time_ns"]) < 0):
        return "column time_ns: before that of the row before"
    return ""


def problem_of_block_map(columns: Mapping[str, Any], samples: int, requests: int) -> str:
    """What is wrong with a map of this many samples and requests, in words; empty if nothing is."""
    time_ns = columns["time_ns"]
    groups = len(time_ns) // max(samples, 1)
    if groups * samples != len(time_ns) or len(np.unique(time_ns)) != samples:
        return f"not {samples} samples of equal length: the block map of another run"
    if not np.array_equal(time_ns, np.repeat(time_ns[:: groups or 1], groups)):
        return "column time_ns: samples are out of order"
    if np.any(columns["owner"] >= requests):
        return f"column owner: not one of the {requests} requests"
    for name in ("on_cpu", "first_block", "blocks"):
        whole = columns[name].reshape(samples, groups)
        if np.any(whole != whole[:1]):
            return f"column {name}: differs between samples"
    return ""


def problem_of_figures(
    summary: Mapping[str, Any], requests: Mapping[str, Any], steps: Mapping[str, Any]
) -> str:
    """The first figure that is not what checked tables give, in words; empty if all are."""
    return problem_of_summary(summary, summarise(steps, requests, {}, summary["meta"]))


def problem_of_summary(summary: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """The first figure that is not the `expected` one, in words; empty if all are. Of gaps between
    tokens, only that they are numbers."""
    for key, value in expected.items():
        if key == "meta":
            continue
        if key not in summary:
            return f"{key}: missing"
        found = summary[key]
        if key.endswith(_GAPS):
            if not (found is None or _is_number(found)):
                return f"{key}: not a number"
            continue
        for place, wrong, right in _differences(key, found, value):
            return f"{place}: {wrong!r}, but the tables give {right!r}"
    return ""


def _problem_of(column: Column, values: Any) -> str:
    if column.type == TEXT:
        return ""
    assert column.type == INTEGER
    if not len(values):
        return ""
    low, high = int(np.min(values)), int(np.max(values))
    least = min(column.least, -1 if column.null else 0)
    most = len(column.codes) - 1 if column.codes else _MOST
    if low < least or high > most:
        wrong = low if low < least else high
        return f"{wrong:,} is not in {least:,} .. {most:,}"
    return ""


def _differences(place: str, found: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two values differ: place, found, expected."""
    if (
        isinstance(expected, Mapping)
        and isinstance(found, Mapping)
        and found.keys() == expected.keys()
    ):
        for key, value in expected.items():
            yield from _differences(f"{place}.{key}", found[key], value)
    elif _is_number(expected) and _is_number(found):
        if not math.isclose(found, expected, rel_tol=_FIGURES_AGREE, abs_tol=_FIGURES_AGREE):
            yield place, found, expected
    elif type(found) is not type(expected) or found != expected:
        yield place, found, expected


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
