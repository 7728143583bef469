"""Writes results to a folder, all files or none, and reads them back.

```
DIR/summary.json       figures and provenance
DIR/requests.parquet   one row per request
DIR/steps.parquet      one row per step
DIR/transitions.parquet  one row per preemption, swap and re-admission
DIR/block_map.parquet  which request holds which blocks, if it was watched
DIR/report.html        the page, if given; requests.csv and steps.csv, if asked for
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.core.schema import BLOCK_MAP, REQUESTS, STEPS, TRANSITIONS, Table
from kvsim.errors import OutputError
from kvsim.report import checked
from kvsim.results import tables
from kvsim.results.blockmap import BlockMap
from kvsim.settings.parsing import parse_json
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
    requests = read_table(folder, REQUESTS, meta, checked.problem_of_requests)
    steps = read_table(folder, STEPS, meta, checked.problem_of_steps)
    if len(requests["id"]) != summary["num_requests"] or len(steps["start_ns"]) != summary["steps"]:
        raise OutputError(
            f"{folder}: {SUMMARY} counts {summary['num_requests']} requests and {summary['steps']}"
            f" steps, its tables hold {len(requests['id'])} and {len(steps['start_ns'])}: files of"
            " different runs; run it again"
        )
    refuse(folder / SUMMARY, checked.problem_of_figures(summary, requests, steps), meta)
    return Results(summary, requests, steps)


def is_fleet(directory: str | Path) -> bool:
    """Whether a folder holds a run of several replicas."""
    return not (Path(directory) / SUMMARY).exists() and (Path(directory) / FLEET).exists()


def read_transitions(directory: str | Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Read the transitions of a run. Raises `OutputError` naming the file and the remedy."""
    problem_of = partial(checked.problem_of_transitions, requests=summary["num_requests"])
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
    problem_of = partial(checked.problem_of_block_map, **counts)
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


def read_summary(path: Path, *keys: str) -> dict[str, Any]:
    """Read figures that have `meta` and these keys. Raises `OutputError` naming the file."""
    with _reading(path):
        summary = parse_json(path.read_bytes())
    known = isinstance(summary, dict) and isinstance(summary.get("meta"), dict)
    if not known or not set(keys) <= summary.keys():
        raise OutputError(f"{path}: not a kvsim summary; {_REMEDY}")
    refuse(path, checked.problem_of_meta(summary["meta"]), summary["meta"])
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
    refuse(path, checked.problem_of_table(table, columns) or problem_of(columns), meta)
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
