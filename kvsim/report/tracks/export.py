"""Puts the tracks of a run into one file, event by event."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import OutputError
from kvsim.report.tracks.engine import counter_events, engine_names, step_events
from kvsim.report.tracks.events import Window
from kvsim.report.tracks.requests import request_events, stays_of
from kvsim.results.ledger import standings
from kvsim.results.numerals import seconds
from kvsim.results.timeline import run_end_ns
from kvsim.writing import replacing_stream

Ints = NDArray[np.int64]

_NS_PER_S = 1_000_000_000
_AT_ONCE = 4096
"""Events that are written together."""


def run_window(
    steps: Mapping[str, Ints],
    requests: Mapping[str, Any],
    begin_s: float | None,
    end_s: float | None,
) -> Window:
    """The window from `begin_s` to `end_s`; None stands for the start or the end of the run.

    Raises `OutputError` if no part of the run is in it.
    """
    whole = run_end_ns(steps, requests)
    begin = 0 if begin_s is None else _ns(begin_s)
    end = whole if end_s is None else min(_ns(end_s), whole)
    if (begin_s, end_s) != (None, None) and not 0 <= begin < end:
        last = "the end" if end_s is None else f"{end_s:g} s"
        raise OutputError(
            f"--from/--to: nothing lies between {begin_s or 0:g} s and {last};"
            f" the run goes from 0 s to {seconds(whole / _NS_PER_S)}"
        )
    return Window(begin, end)


def _ns(time_s: float) -> int:
    """Seconds as nanoseconds; -1 for NaN and infinities."""
    return round(time_s * _NS_PER_S) if math.isfinite(time_s) else -1


def events(
    summary: Mapping[str, Any],
    requests: Mapping[str, Any],
    steps: Mapping[str, Ints],
    transitions: Mapping[str, Ints],
    window: Window,
    chosen: Collection[int] | None = None,
) -> Iterator[str]:
    """Every event of a run in the window, a JSON object each; `chosen`: indexes of requests."""
    spells = standings.lay_out(
        requests, transitions, steps["start_ns"], steps["end_ns"], run_end_ns(steps, requests)
    )
    return chain(
        engine_names(),
        step_events(steps, window),
        counter_events(steps, summary["meta"], window),
        request_events(stays_of(spells, window, chosen), requests),
    )


def write_tracks(path: str | Path, meta: Mapping[str, Any], listed: Iterator[str]) -> Path:
    """Write events as a Chrome trace, gzipped if the name ends in `.gz`, whole or not at all.

    Equal events give equal bytes. Raises `OutputError` naming the file.
    """
    with replacing_stream(path) as file:
        _write(file, meta, listed)
    return Path(path)


def _write(file: BinaryIO | gzip.GzipFile, meta: Mapping[str, Any], listed: Iterator[str]) -> None:
    """Write one event per line, encoding a group of them at once."""
    trace = (meta.get("trace") or {}).get("sha256", "")
    known = {"kvsim": meta.get("kvsim_version", ""), "engine": meta.get("engine", "")}
    head = json.dumps({**known, "trace_sha256": trace}, ensure_ascii=False)
    file.write(f'{{"displayTimeUnit":"ms","otherData":{head},"traceEvents":['.encode())
    separator = "\n"
    while group := list(islice(listed, _AT_ONCE)):
        file.write((separator + ",\n".join(group)).encode())
        separator = ",\n"
    file.write(b"\n]}\n")
