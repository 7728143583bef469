"""What the JSON files of a sweep hold, and whether one that was read holds it.

Sweep folders are shared and copied, so their files are checked before anything uses them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvsim.results.metrics import METRICS
from kvsim.settings.parsing import is_flat

Record = dict[str, Any]
"""The result of one run: `key`, `kvsim_version`, `config`, `outcome`, `engine`, `time_source`,
`figures`."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Figure = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | float | None

_ALWAYS = {metric.key for metric in METRICS if metric.always} | {"failed"}
"""Figures of every run that was not refused."""
_WHOLE = {metric.key for metric in METRICS if metric.whole} | {"failed"}


class Versioned(Struct):
    """The version of kvsim that wrote a file."""

    kvsim_version: str


class _Point(Struct, forbid_unknown_fields=True):
    settings: dict[str, Any]
    seed: Count
    key: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class _Trace(Struct):
    name: str
    format: str
    sha256: str
    requests: Count


class Manifest(Versioned):
    """What `sweep.json` holds."""

    trace: _Trace
    base: dict[str, Any]
    points: Annotated[list[_Point], Meta(min_length=1)]
    slo: str | None
    ledger: bool = False


class _Outcome(Struct):
    kind: str
    explanation: str = ""


class _Engine(Struct):
    num_gpu_blocks: Count
    num_cpu_blocks: Count
    block_size: Count
    max_num_batched_tokens: Count
    watermark_blocks: Count
    kv_cache_bytes: Count


class _TimeSource(Struct):
    kind: str
    source: str


class _Result(Versioned):
    key: str
    config: dict[str, Any]
    outcome: _Outcome
    figures: dict[str, Figure]
    engine: _Engine | None = None
    time_source: _TimeSource | None = None


def checked_record(record: Any, key: str) -> Record:
    """The record, if it is the whole result of the run with this key. Raises `ValueError`."""
    result = msgspec.convert(record, _Result)
    figures = result.figures
    if result.key != key or not is_flat(record):
        raise ValueError("of another run, or nested too deeply")
    if (result.engine is None) != (result.time_source is None):
        raise ValueError("a part is missing")
    if result.engine is not None and not figures.keys() >= _ALWAYS:
        raise ValueError("figures are missing")
    if any(type(figures.get(name)) is float for name in _WHOLE):
        raise ValueError("a count is not whole")
    return dict(record)
