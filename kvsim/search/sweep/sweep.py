"""A sweep in a folder: what was to be run, the parts of it, and its results.

```
DIR/sweep.json      what was to be run: trace, settings, points with their keys
DIR/points/         what has been run
DIR/sweep.parquet   one row per point, once all are there
DIR/sweep.html      the page
```
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvsim.errors import ConfigError, OutputError
from kvsim.results.plain import plain
from kvsim.results.tables import optional, texts, truths
from kvsim.run.simulation import simulate
from kvsim.search.runner import figures_of
from kvsim.search.slo import parse_slo
from kvsim.search.store import ENGINE_FACTS, Count, Record, Store, Versioned, address
from kvsim.search.sweep.grid import Point, Settings
from kvsim.settings.parsing import is_flat, parse_json
from kvsim.version import __version__
from kvsim.workload.trace import Row, Trace
from kvsim.writing import encoded, json_text, write_bytes

if TYPE_CHECKING:
    import pyarrow as pa


MANIFEST = "sweep.json"
_REMEDY = "give a folder that `kvsim sweep --out` wrote"


class Traced(Struct, frozen=True):
    """The trace of a sweep."""

    name: str
    """Of its file."""
    format: str
    sha256: str
    requests: Count


class Planned(Struct, frozen=True, forbid_unknown_fields=True):
    """A point of a sweep and the key of its result."""

    settings: Settings
    seed: Count
    key: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class Outcome(NamedTuple):
    """A point of a sweep and its result."""

    settings: Settings
    seed: int
    record: Record


class Plan(Versioned, frozen=True, kw_only=True):
    """What a sweep runs, without anything specific to this machine: the content of `sweep.json`."""

    trace: Traced
    base: dict[str, Any]
    """The given settings that all points share."""
    slo: str | None
    ledger: bool = False
    """Whether the results have the figures of the ledger."""
    points: Annotated[list[Planned], Meta(min_length=1)]

    @property
    def axes(self) -> tuple[str, ...]:
        """The settings that are varied, without the seed."""
        return tuple(self.points[0].settings)

    def describe(self) -> dict[str, Any]:
        """The plan as plain values."""
        described: dict[str, Any] = plain(msgspec.to_builtins(self))
        return described


def make_plan(
    trace: Trace,
    base: Mapping[str, Any],
    points: Sequence[Point],
    slo: str | None = None,
    *,
    ledger: bool = False,
) -> Plan:
    """The plan of these points on a trace."""
    keys = (address(point.config, trace, ledger=ledger) for point in points)
    return Plan(
        __version__,
        trace=Traced(Path(trace.path).name, trace.format, trace.sha256, len(trace.rows)),
        base=dict(base),
        slo=slo,
        ledger=ledger,
        points=[Planned(p.settings, p.config.seed, k) for p, k in zip(points, keys, strict=True)],
    )


def gather(store: Store, plan: Plan, folder: str | Path) -> list[Outcome]:
    """The results of all points, in order. Raises `OutputError` if some are missing."""
    records = {point.key: store.load(point.key) for point in plan.points}
    missing = sum(record is None for record in records.values())
    if missing:
        raise OutputError(
            f"{folder}: {missing} of {len(records)} runs are missing; run the sweep, or the"
            " shards that are not done, again with this --out"
        )
    return [Outcome(p.settings, p.seed, dict(records[p.key] or {})) for p in plan.points]


def manifest(plan: Plan) -> str:
    """The content of `sweep.json`."""
    return json_text(plan.describe())


def write_plan(folder: str | Path, plan: Plan, *results: str) -> None:
    """Write `sweep.json`, whole or not at all. Raises `OutputError`.

    `results`: names of files that are removed if they belong to another plan.
    """
    path, content = Path(folder) / MANIFEST, encoded(manifest(plan))
    try:
        if path.exists() and path.read_bytes() != content:
            for place in map(path.with_name, results):
                if place.is_file():  # A link stays, and so does a device.
                    place.resolve().unlink()
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from None
    write_bytes(path, content)


def read_plan(folder: str | Path) -> Plan:
    """Read `sweep.json`. Raises `OutputError` naming the file and the remedy."""
    path = Path(folder) / MANIFEST
    try:
        table = parse_json(path.read_bytes())
        version = msgspec.convert(table, Versioned).kvsim_version
        if version != __version__:
            raise OutputError(
                f"{path}: kvsim {version} wrote it, this is {__version__}; run it again"
            )
        plan = msgspec.convert(table, Plan)
        if not is_flat(table) or len({tuple(point.settings) for point in plan.points}) > 1:
            raise ValueError
        if plan.slo is not None:
            parse_slo(plan.slo)
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}; {_REMEDY}") from None
    except (ConfigError, ValueError):  # also of msgspec
        raise OutputError(f"{path}: damaged or not written by kvsim; {_REMEDY}") from None
    return plan


def shard_of(number_of_points: int, text: str | None) -> range:
    """The positions in the part `K/N`: every N-th from the K-th on. Raises `ConfigError`."""
    if text is None:
        return range(number_of_points)
    number, slash, of = text.partition("/")
    digits = slash and number.isascii() and of.isascii() and number.isdigit() and of.isdigit()
    if not digits or not 1 <= int(number) <= int(of):
        raise ConfigError(f"--shard {text}: expected K/N with K from 1 to N, as in --shard 1/4")
    return range(int(number) - 1, number_of_points, int(of))


def merge(folders: Sequence[str], into: str | Path) -> Plan:
    """Copy the runs of one sweep from several folders into one; returns their plan.

    Raises `OutputError` if the folders hold different sweeps, or a run is in none of them.
    """
    plans = [read_plan(folder) for folder in folders]
    plan = plans[0]
    for folder, other in zip(folders, plans, strict=True):
        if [point.key for point in other.points] != [point.key for point in plan.points]:
            raise OutputError(
                f"{folder}: part of another sweep than {folders[0]}; merge its own shards"
            )
    stores = [Store(folder) for folder in folders]
    target = Store(into)
    target.make()
    for point in plan.points:
        found = (record for store in stores if (record := store.load(point.key)) is not None)
        record = next(found, None)
        if record is not None:
            target.fetch(point.key, lambda record=record: record)  # type: ignore[misc]
    gather(target, plan, into)
    write_plan(into, plan)
    return plan


TABLE = "sweep.parquet"


def table_bytes(plan: Plan, outcomes: Sequence[Outcome]) -> bytes:
    """The content of `sweep.parquet`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(sweep_table(plan, outcomes), buffer, compression="zstd")
    content: bytes = buffer.getvalue().to_pybytes()
    return content


def sweep_table(plan: Plan, outcomes: Sequence[Outcome]) -> pa.Table:
    """One row per point, in the order of the plan."""
    import pyarrow as pa

    records = [outcome.record for outcome in outcomes]
    columns: dict[str, pa.Array] = {
        key: _settings_column([outcome.settings[key] for outcome in outcomes]) for key in plan.axes
    }
    columns["seed"] = optional([outcome.seed for outcome in outcomes], whole=True)
    columns["key"] = texts(record["key"] for record in records)
    columns["outcome"] = _text_column([record["outcome"]["kind"] for record in records])
    columns["reason"] = _text_column([reason(record) for record in records])
    if plan.slo is not None:
        objectives = parse_slo(plan.slo)
        columns["meets_slo"] = truths([objectives.met(record) for record in records])
    for key in ENGINE_FACTS:
        values = [record.get("engine", {}).get(key) for record in records]
        columns[f"engine.{key}"] = optional(values, whole=True)
    for key, is_whole in _all_kinds(records, plan.ledger).items():
        values = [record["figures"].get(key) for record in records]
        columns[key] = optional(values, whole=is_whole)
    described = {key: value for key, value in plan.describe().items() if key != "points"}
    about = {"kvsim": encoded(json.dumps(described, ensure_ascii=False))}
    return pa.Table.from_arrays(list(columns.values()), list(columns), metadata=about)


def reason(record: Record) -> str:
    """Why a run did not finish, in words; empty if it did."""
    outcome = record["outcome"]
    return "" if outcome["kind"] == "finished" else str(outcome.get("explanation", ""))


@cache
def figure_kinds(ledger: bool = False) -> Mapping[str, bool]:
    """Every figure of a summary, in order, and whether it is a whole number; those of the ledger,
    too, if asked for.

    The figures are those of a run of one request. So columns are the same in every table, even if
    no point could be run.
    """
    row = Row(0, "0", 0, 0, 1, 1)
    trace = Trace(path="", format="native", sha256="", rows=[row])
    result = simulate(trace, {"cost": {"model": "constant"}})
    figures = figures_of(result.summary if ledger else result.figures)
    return {key: isinstance(value, int) for key, value in figures.items()}


def _all_kinds(records: Sequence[Record], ledger: bool) -> dict[str, bool]:
    """All figures of these records, and whether each is whole; those of the cost model last."""
    kinds = dict(figure_kinds(ledger))
    for record in records:
        for key, value in record["figures"].items():
            kinds[key] = kinds.get(key, True) and not isinstance(value, float)
    return kinds


def _settings_column(values: Sequence[Any]) -> pa.Array:
    """Values as a column of integers, floats or booleans, else of text."""
    if all(isinstance(value, bool) for value in values):
        return truths(values)
    if all(type(value) is int and abs(value) < 1 << 63 for value in values):
        return optional(values, whole=True)
    try:
        if any(isinstance(value, bool) for value in values):
            raise TypeError
        return optional([float(value) for value in values], whole=False)
    except (TypeError, ValueError):
        return _text_column([_text(value) for value in values])


def _text_column(written: Iterable[str]) -> pa.Array:
    return texts(encoded(text).decode() for text in written)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
