"""Writes results to a folder, all files or none, and reads them back.

```
DIR/summary.json       figures and provenance
DIR/requests.parquet   one row per request
DIR/steps.parquet      one row per step
DIR/transitions.parquet  one row per preemption, swap and re-admission
DIR/block_map.parquet  which request holds which blocks, if it was watched
DIR/report.html        the page, if given; requests.csv and steps.csv, if asked for
```

What is read is checked, so that nothing that uses it has to:

* A table has no negative numbers and no unknown codes where `kvsim.core.schema` has none. Places
  and instants are in order, ids are unique, and rows are about requests that exist.
* `meta` has the types that `Meta` states.
* Figures are those that the tables give. Gaps between tokens are not in the tables, so they only
  have to be numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from kvsim.core.schema import BLOCK_MAP, INTEGER, REQUESTS, STEPS, TEXT, TRANSITIONS, Column, Table
from kvsim.errors import OutputError
from kvsim.machine.memory import Budget
from kvsim.results import tables
from kvsim.results.blockmap import BlockMap
from kvsim.results.plain import numeric
from kvsim.results.summary import summarise
from kvsim.settings.config import RunConfig
from kvsim.settings.parsing import DEEP, is_flat, parse_json, typed
from kvsim.version import __version__
from kvsim.writing import encoded, json_text, move_all, temporary_folder

if TYPE_CHECKING:
    import pyarrow as pa


SUMMARY, PAGE = "summary.json", "report.html"
FLEET = "fleet.json"
"""The figures of a folder with several replicas (`kvsim.fleet.folder`)."""
_REMEDY = "give a folder that `kvsim run --out` wrote"


class Results(NamedTuple):
    """What a folder holds, in the shapes that `summarise` returns and takes."""

    summary: dict[str, Any]
    requests: dict[str, Any]
    steps: dict[str, Any]


def write_results(
    out_dir: str | Path,
    summary: Mapping[str, Any],
    requests: Mapping[str, Any],
    steps: Mapping[str, Any],
    *,
    transitions: Mapping[str, Any] | None = None,
    block_map: BlockMap | None = None,
    csv: bool = False,
    page: str | None = None,
) -> list[Path]:
    """Write a run's files into `out_dir`, which is made if need be; returns their paths.

    All files are written beside the target first and then moved into place, the summary last. Files
    of these names are replaced, others stay. Raises `OutputError` naming the folder.
    """
    out = Path(out_dir)
    with temporary_folder(out, out) as inside:
        (inside / SUMMARY).write_bytes(encoded(json_text(summary)))
        if page is not None:
            (inside / PAGE).write_bytes(encoded(page))
        _write_pieces(inside, REQUESTS, tables.requests_tables(requests), csv=csv)
        _write_pieces(inside, STEPS, tables.steps_tables(steps), csv=csv)
        if transitions is not None:
            write_table(inside, TRANSITIONS, transitions)
        if block_map is not None:
            write_table(inside, BLOCK_MAP, tables.block_map_columns(block_map))
        written = sorted(inside.iterdir(), key=lambda path: (path.name == SUMMARY, path))
        return move_all(written, out)


def read_results(directory: str | Path) -> Results:
    """Read what `write_results` wrote. Raises `OutputError` naming the file and the remedy."""
    folder = Path(directory)
    if not folder.is_dir():
        raise OutputError(f"{folder}: no such folder; {_REMEDY}")
    if is_fleet(folder):
        one = folder / "replica-0"
        raise OutputError(f"{folder}: holds several replicas; give the folder of one, as {one}")
    summary = read_summary(folder / SUMMARY, "num_requests", "steps")
    meta = summary["meta"]
    requests = read_table(folder, REQUESTS, meta, problem_of_requests)
    steps = read_table(folder, STEPS, meta, problem_of_steps)
    if len(requests["id"]) != summary["num_requests"] or len(steps["start_ns"]) != summary["steps"]:
        raise OutputError(
            f"{folder}: {SUMMARY} counts {summary['num_requests']} requests and {summary['steps']}"
            f" steps, its tables hold {len(requests['id'])} and {len(steps['start_ns'])}: files of"
            " different runs; run it again"
        )
    problem = problem_of_summary(summary, summarise(steps, requests, {}, meta))
    refuse(folder / SUMMARY, problem, meta)
    return Results(summary, requests, steps)


def is_fleet(directory: str | Path) -> bool:
    """Whether a folder holds a run of several replicas."""
    return not (Path(directory) / SUMMARY).exists() and (Path(directory) / FLEET).exists()


def read_transitions(directory: str | Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Read the transitions of a run. Raises `OutputError` naming the file and the remedy."""
    problem_of = partial(problem_of_transitions, requests=summary["num_requests"])
    return read_table(Path(directory), TRANSITIONS, summary["meta"], problem_of)


def read_block_map(directory: str | Path, summary: Mapping[str, Any]) -> BlockMap | None:
    """The block map of a run; None if the run has none. Raises `OutputError` naming the file.

    The summary says whether the run has a block map, so a map that another run left in the folder
    is ignored.
    """
    meta = summary["meta"]
    if not meta.get("block_map"):
        return None
    counts = {"samples": meta["block_map"]["samples"], "requests": summary["num_requests"]}
    problem_of = partial(problem_of_block_map, **counts)
    return tables.block_map_of(read_table(Path(directory), BLOCK_MAP, meta, problem_of))


def write_table(folder: Path, table: Table, columns: Mapping[str, Any]) -> None:
    """Write a table into a folder as Parquet."""
    _write_pieces(folder, table, iter([tables.arrow_table(table, columns)]), csv=False)


def _write_pieces(folder: Path, table: Table, pieces: Iterator[pa.Table], *, csv: bool) -> None:
    """Write a table as Parquet and, if asked, as CSV, piece by piece to bound the memory."""
    import pyarrow.parquet as pq

    piece, path = next(pieces), folder / table.name
    with ExitStack() as opened:
        # Open files, because Arrow takes no names that are not UTF-8.
        file = opened.enter_context(Path(f"{path}.parquet").open("wb"))
        parquet = pq.ParquetWriter(file, piece.schema, **_encodings(piece.schema))
        opened.enter_context(parquet)
        if csv:
            from pyarrow.csv import CSVWriter

            file = opened.enter_context(Path(f"{path}.csv").open("wb"))
            sheet = opened.enter_context(CSVWriter(file, piece.schema))
        for each in chain([piece], pieces):
            parquet.write_table(each)
            if csv:
                sheet.write_table(tables.without_formulas(each))


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """Encodings for columns that change little from row to row.

    Files are half as large as with the defaults, and faster to write and to read.
    """
    from pyarrow.types import is_floating, is_integer

    encodings = {field.name: "DELTA_BINARY_PACKED" for field in schema if is_integer(field.type)}
    encodings |= {field.name: "BYTE_STREAM_SPLIT" for field in schema if is_floating(field.type)}
    others = [name for name in schema.names if name not in encodings]
    return {"compression": "zstd", "use_dictionary": others, "column_encoding": encodings}


def read_summary(path: Path, *keys: str, types: type[Meta] | None = None) -> dict[str, Any]:
    """Read figures that have these keys, and a `meta` as `Meta` or `types` says. Raises
    `OutputError` naming the file."""
    with _reading(path):
        summary = parse_json(path.read_bytes())
    known = isinstance(summary, dict) and isinstance(summary.get("meta"), dict)
    if not known or not set(keys) <= summary.keys():
        raise OutputError(f"{path}: not a kvsim summary; {_REMEDY}")
    refuse(path, problem_of_meta(summary["meta"], types or Meta), summary["meta"])
    return dict(summary)


def refuse(path: Path, problem: str, meta: Mapping[str, Any]) -> None:
    """Raise `OutputError` if there is a problem; names the version of kvsim if it was another."""
    if not problem:
        return
    version = meta.get("kvsim_version")
    if isinstance(version, str) and version != __version__:
        raise OutputError(
            f"{path}: {problem}; kvsim {version} wrote it, this is {__version__}: run it again"
        )
    raise OutputError(f"{path}: {problem}; run it again with this version of kvsim")


def read_table(
    folder: Path,
    table: Table,
    meta: Mapping[str, Any],
    problem_of: Callable[[dict[str, Any]], str] = lambda columns: "",
) -> dict[str, Any]:
    """Read the columns of a table. Raises `OutputError` naming the file.

    `problem_of`: what else is wrong with the columns, in words; empty if nothing is.
    """
    import pyarrow.parquet as pq

    path = folder / f"{table.name}.parquet"
    # A file handle, so that a folder of this name is not read as a data set. No threads: one that
    # still closes its file when the interpreter exits aborts the process.
    with _reading(path), path.open("rb") as opened:
        file = pq.ParquetFile(opened, pre_buffer=False)
        refuse(path, tables.misfit(file.schema_arrow, table), meta)
        kept = [column.name for column in table.held(file.schema_arrow.names)]
        read = file.read(kept, use_threads=False)
        refuse(path, tables.missing(read, table), meta)
        columns = tables.columns_of(read)
    refuse(path, problem_of_table(table, columns) or problem_of(columns), meta)
    return columns


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn every way in which a file can be unreadable into one line."""
    try:
        yield
    except FileNotFoundError:
        raise OutputError(f"{path}: no such file; {_REMEDY}") from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, NotImplementedError) as error:  # of pyarrow and json
        line = str(error).splitlines()[0]
        raise OutputError(f"{path}: damaged or not written by kvsim: {line}") from None


_FIGURES_AGREE = 1e-6
"""Relative difference between processors, far below what an edit of a file changes."""
_MOST = 1 << 62
_GAPS = "_itl_ms"
"""Keys of gaps between tokens end so."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


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


class _Stages(Struct):
    layers: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]], msgspec.Meta(min_length=1)
    ]


class _Cost(Struct):
    source: str | None = None
    kind: str | None = None
    priced_steps: Count | None = None
    extrapolated_steps: Count | None = None
    priced_ns: Count | None = None
    extrapolated_ns: Count | None = None
    stages: _Stages | None = None
    notes: list[str] | None = None


class _Offload(Struct):
    stored_blocks: Count
    stored_bytes: Count
    stored_copy_s: float
    loaded_blocks: Count
    loaded_bytes: Count
    loaded_copy_s: float
    storage: str = ""
    waited_for_stores: Count = 0
    waited_for_loads_of_others: Count = 0
    flushed_jobs: Count = 0
    refused_stores: Count = 0


class _Map(Struct):
    samples: Count


class _Cache(Struct):
    block_lookups: Count | None = None
    block_hits: Count | None = None


class _Router(Struct):
    name: str
    args: dict[str, Any]


class Meta(Struct, kw_only=True):
    """The types of what a summary keeps under `meta`; most may be missing, and others there."""

    kvsim_version: str | None = None
    core: str | None = None
    command: str | None = None
    config: dict[str, Any]
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
    memory: dict[str, Any] | None = None
    cost: _Cost | None = None
    link: dict[str, Any] | None = None
    kv_offload: _Offload | None = None
    cache: _Cache | None = None
    goodput: dict[str, float] | None = None
    oracles: list[str] | None = None
    outcome: _Outcome | None = None
    engine_errors: list[_Outcome] | None = None
    block_map: _Map | None = None
    server: dict[str, str] | None = None
    router: _Router | None = None
    replicas: Count | None = None


class FleetMeta(Meta, kw_only=True):
    """Those of several replicas."""

    router: _Router
    replicas: Count
    prefix_caching: bool
    roles: list[Literal["prefill", "decode"]] | None = None


@cache
def _any_of(kind: type[Struct]) -> type[Struct]:
    """A struct with the fields of `kind`, each of which may be missing or null."""
    return msgspec.defstruct(
        kind.__name__,
        [(each.name, each.type | None, None) for each in msgspec.structs.fields(kind)],
    )


def problem_of_meta(meta: Any, types: type[Meta]) -> str:
    """The first key of `meta` that is not as `types` says, in words; empty if all are. Settings and
    terms of the budget are as their own classes say."""
    if not is_flat(meta):
        return f"meta: {DEEP}"
    place = "meta"
    try:
        typed(meta, types)
        for key, kind in (("memory", Budget), ("config", RunConfig)):
            place = f"meta.{key}"
            typed(numeric(meta.get(key) or {}), _any_of(kind))
    except msgspec.ValidationError as error:
        text, _, at = str(error).partition(" - at `$")
        return f"{place}{at.rstrip('`')}: {text[:1].lower()}{text[1:]}"
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
