"""Repeats measurements, compares them with stored ones, and says what their tables show."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from kvsim.against.bench.measure import (
    Measurement,
    Peer,
    Whole,
    in_fresh_process,
    kvsim_run,
    measure,
    measure_peer,
    write_requests,
)
from kvsim.against.bench.workloads import WORKLOADS, Case
from kvsim.errors import ConfigError
from kvsim.version import __version__

T = TypeVar("T")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one case, once for each repeat."""

    workload: str
    settings: str
    runs: list[Measurement]
    whole: list[Whole] = []
    """Measurements of `kvsim run --out`, if there are any."""
    peer: list[Peer] = []

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(self.workload, self.settings)


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements on one machine."""

    kvsim_version: str
    python: str
    machine: str
    load_average: float | None
    """Load average of the last minute at the start."""
    peer: str | None
    rows: list[Row]


def run(
    cases: Iterable[Case],
    repeats: int,
    trace: str | None,
    done: Callable[[Case], None],
    peer: tuple[str, str] | None = None,
) -> Bench:
    """Measure all cases in turns, `repeats` times; `done` is called after each measurement.

    `peer`: the name of another simulator, and the Python that runs it.
    """
    rows = [Row(workload=case.workload, settings=case.settings, runs=[]) for case in cases]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with tempfile.TemporaryDirectory() as folder:
        paths = {row.workload: str(Path(folder) / f"{row.workload}.jsonl") for row in rows}
        for workload, path in paths.items():
            in_fresh_process(write_requests, workload, trace, path)
        for row in rows * repeats:
            _measure(row, paths[row.workload], peer)
            done(row.case)
    return Bench(
        kvsim_version=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        load_average=load,
        peer=None if peer is None else peer[0],
        rows=rows,
    )


def _measure(row: Row, path: str, peer: tuple[str, str] | None) -> None:
    """Add one measurement of each kind to a row."""
    row.runs.append(in_fresh_process(measure, row.case, path))
    if WORKLOADS[row.workload].replicas > 1:
        return
    if WORKLOADS[row.workload].whole or peer is not None:
        row.whole.append(in_fresh_process(kvsim_run, row.case, path))
    if peer is not None:
        row.peer.append(in_fresh_process(measure_peer, *peer, row.case, path))


def over_base(bench: Bench) -> dict[Case, float]:
    """CPU time of each case over that of its `Case.base`, in `bench` as well: a feature's and a
    policy's per step, a fleet's per request."""
    rows = {row.case: row for row in bench.rows}
    found = {}
    for case, row in rows.items():
        if case.base in rows:
            base = rows[case.base]
            is_fleet = WORKLOADS[case.workload].replicas > 1
            found[case] = _share_s(row, is_fleet) / _share_s(base, is_fleet)
    return found


def _share_s(row: Row, is_fleet: bool) -> float:
    """CPU time of a request in a fleet, of a step elsewhere."""
    one = row.runs[0]
    return least(row.runs, lambda m: m.cpu_s) / (one.requests if is_fleet else one.steps)


def least(found: Iterable[T], figure: Callable[[T], float]) -> float:
    """The least of a figure, because disturbances only ever increase it."""
    return min(map(figure, found))


def middle(found: Iterable[T], figure: Callable[[T], float]) -> float:
    """The median of a figure."""
    return median(map(figure, found))


def to_json(bench: Bench) -> str:
    """The text that `load` reads."""
    return msgspec.json.format(msgspec.json.encode(bench), indent=1).decode() + "\n"


def load(path: str) -> Bench:
    """The bench that `kvsim bench --json` printed. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Bench)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        text = str(error)
        raise ConfigError(
            f"{path}: {text[:1].lower()}{text[1:]}; give what `kvsim bench --json` printed"
        ) from None


def ratios(now: Bench, then: Bench) -> dict[Case, float]:
    """CPU time of each case in both benches: the least of now over the least of then."""
    before = {row.case: row.runs for row in then.rows}
    return {
        row.case: least(row.runs, lambda m: m.cpu_s) / least(before[row.case], lambda m: m.cpu_s)
        for row in now.rows
        if before.get(row.case)
    }


Column = tuple[str, Callable[[Row], str]]


def columns_of(bench: Bench) -> Iterator[tuple[list[Row], list[Column]]]:
    """Each table: its rows, where there is something to show, and its columns."""

    def cpu_s(row: Row) -> float:
        return least(row.runs, lambda m: m.cpu_s)

    def whole_s(row: Row) -> float:
        return least(row.whole, lambda w: w.cpu_s)

    def peer_s(row: Row) -> float:
        return least(row.peer, lambda p: p.core_s)

    def peer_whole_s(row: Row) -> float:
        return least(row.peer, lambda p: p.whole.cpu_s)

    over = over_base(bench)
    yield (
        bench.rows,
        [
            ("CPU s", lambda row: f"{cpu_s(row):.3f}"),
            ("median", lambda row: f"{middle(row.runs, lambda m: m.cpu_s):.3f}"),
            ("us/req", lambda row: f"{cpu_s(row) * 1e6 / row.runs[0].requests:,.1f}"),
            ("us/step", lambda row: f"{cpu_s(row) * 1e6 / row.runs[0].steps:,.2f}"),
            ("ns/seq", lambda row: f"{cpu_s(row) * 1e9 / max(row.runs[0].seq_steps, 1):,.0f}"),
            ("over base", lambda row: f"{over[row.case]:.2f}" if row.case in over else "-"),
            ("requests", lambda row: f"{row.runs[0].requests:,}"),
            ("steps", lambda row: f"{row.runs[0].steps:,}"),
            ("preemptions", lambda row: f"{row.runs[0].preemptions:,}"),
            ("MB", lambda row: f"{least(row.runs, lambda m: m.rss_mb):,.0f}"),
        ],
    )
    yield (
        [row for row in bench.rows if row.peer],
        [
            ("CPU s", lambda row: f"{cpu_s(row):.3f}"),
            (bench.peer or "", lambda row: f"{peer_s(row):.3f}"),
            ("ratio", lambda row: f"{cpu_s(row) / peer_s(row):.2f}"),
            ("whole CPU s", lambda row: f"{whole_s(row):.3f}"),
            (bench.peer or "", lambda row: f"{peer_whole_s(row):.3f}"),
            ("ratio", lambda row: f"{whole_s(row) / peer_whole_s(row):.2f}"),
        ],
    )
    yield (
        [row for row in bench.rows if row.whole],
        [
            ("kvsim run --out: CPU s", lambda row: f"{whole_s(row):.3f}"),
            ("median", lambda row: f"{middle(row.whole, lambda w: w.cpu_s):.3f}"),
            ("MB", lambda row: f"{least(row.whole, lambda w: w.rss_mb):,.0f}"),
        ],
    )
