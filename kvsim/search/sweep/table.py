"""Writes a sweep as one Parquet file: a row per point, in a fixed order of columns.

Equal sweeps give equal bytes.

| columns | what |
|---|---|
| the varied settings, `seed`, `key` | what was run, and the file in `points/` |
| `outcome`, `reason` | how it ended: `finished`, `refused`, or as an engine ends |
| `meets_slo` | only with objectives |
| `engine.num_gpu_blocks`, ... | what the engine derived from the settings |
| the figures of `summary.json` | inner tables with dotted names; missing where undefined |
| those of the ledger | only if the sweep was asked for them |

The file's metadata hold `sweep.json` without its points, under `kvsim`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kvsim.results.tables import optional, texts, truths
from kvsim.run.simulation import simulate
from kvsim.search.points import ENGINE_FACTS, Record, figures_of
from kvsim.search.slo import parse_slo
from kvsim.search.sweep.sweep import Outcome, Plan
from kvsim.workload.trace import Row, Trace
from kvsim.writing import encoded

if TYPE_CHECKING:
    import pyarrow as pa

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
