"""Expands a space of settings into points: grids, lists of rows and random samples, by seeds."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from io import StringIO
from itertools import chain, product
from math import prod
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, get_type_hints

import msgspec

from kvsim.errors import ConfigError
from kvsim.fleet import FleetConfig, make_settings
from kvsim.settings.config import RunConfig, nearest
from kvsim.settings.parsing import parse_json, parse_toml, typed

Draw = Callable[[Random], Any]

MOST_VALUES = 10_000
"""Most values of one setting; a sweep may have ten times as many points. More are a typing
error."""

_CALL = re.compile(r"(\w+)\((.*)\)")
_DIGITS = 4
"""Significant digits of values that are computed or drawn."""


class Axis(NamedTuple):
    """A setting and the values that it takes, in order."""

    key: str
    """A key of `FleetConfig`, or `table.key`."""
    values: tuple[Any, ...]


class Law(NamedTuple):
    """A setting that is drawn at random."""

    key: str
    draw: Draw


def parse_axis(option: str, text: str, *, twice: bool = False) -> Axis:
    """`KEY=1,2,3`, `KEY=lin(0,0.1,5)` or `KEY=log(1,64,7)`; ranges include both ends.

    Values are TOML, or bare words taken as text. Ranges of an integer setting are rounded, and
    equal values of a range are tried once. `twice`: whether a listed value may come more than once.
    Raises `ConfigError` naming `option`.
    """
    where = f"{option} {text}"
    key, written = _assignment(where, text)
    call = _CALL.fullmatch(written)
    if call is None:
        values = _listed(where, key, written)
        for place, value in enumerate(values):
            if value in values[:place] and not twice:
                raise ConfigError(f"{where}: {_shown(value)} is given twice; leave one out")
        return Axis(key, tuple(values))
    name, arguments = call[1], _numbers(where, call[2])
    if name not in ("lin", "log"):
        raise ConfigError(
            f"{where}: unknown range {name!r}; use lin(FIRST,LAST,N) or log(FIRST,LAST,N)"
        )
    values = [_fitting(key, value) for value in _range(where, name, arguments)]
    return Axis(key, tuple(dict.fromkeys(values)))


def parse_law(option: str, text: str) -> Law:
    """`KEY=uniform(A,B)`, `KEY=loguniform(A,B)` or `KEY=choice(X,Y,...)`.

    Raises `ConfigError` naming `option`.
    """
    where = f"{option} {text}"
    key, written = _assignment(where, text)
    call = _CALL.fullmatch(written)
    name = call[1] if call else ""
    if call is None or name not in ("uniform", "loguniform", "choice"):
        raise ConfigError(
            f"{where}: expected uniform(A,B), loguniform(A,B) or choice(X,Y,...), as in"
            f" {key}=uniform(0,1)"
        )
    if name == "choice":
        choices = _listed(where, key, call[2])
        return Law(key, lambda random: random.choice(choices))
    ends = _numbers(where, call[2])
    if len(ends) != 2 or not ends[0] < ends[1]:
        raise ConfigError(f"{where}: {name} takes two ends, the lower one first")
    low, high = ends
    if name == "uniform":
        return Law(key, lambda random: _fitting(key, random.uniform(low, high)))
    if low <= 0:
        raise ConfigError(f"{where}: {_shown(low)} has no logarithm; begin above 0")
    a, b = math.log(low), math.log(high)
    return Law(key, lambda random: _fitting(key, math.exp(random.uniform(a, b))))


def value_of(key: str, text: str) -> Any:
    """One value: TOML, or a bare word taken as text."""
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text.strip()
    # A release such as 0.10 is no number.
    return text.strip() if _textual(key) and not isinstance(value, str) else value


def check_key(where: str, key: str) -> None:
    """Refuse a key that is no setting, naming the nearest one. Raises `ConfigError`."""
    known = FleetConfig.__struct_fields__
    name, dot, inner = key.partition(".")
    if name not in known:
        raise ConfigError(
            f"{where}: unknown key {name!r};{nearest(name, known)}"
            " `kvsim run --help` lists them all"
        )
    if bool(dot and inner) != (name in _tables()):
        shape = f"{name}.KEY" if name in _tables() else name
        raise ConfigError(f"{where}: {key!r} is not a setting; write {shape}=VALUES")


@cache
def whole(key: str) -> bool:
    """Whether a setting takes whole numbers only."""
    return _takes(key, 2) and not _takes(key, 1.5)


@cache
def _textual(key: str) -> bool:
    """Whether a setting takes words only."""
    return _takes(key, "word") and not _takes(key, 2)


def _tables() -> frozenset[str]:
    return frozenset(
        field.name
        for field in msgspec.structs.fields(FleetConfig)
        if field.default_factory is not msgspec.NODEFAULT
    )


def _takes(key: str, value: object) -> bool:
    try:
        typed(value, get_type_hints(FleetConfig, include_extras=True).get(key, float))
    except msgspec.ValidationError:
        return False
    return True


def _assignment(where: str, text: str) -> tuple[str, str]:
    key, equals, written = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"{where}: expected KEY=VALUES, as in watermark=0,0.01,0.05")
    check_key(where, key)
    if not written:
        raise ConfigError(f"{where}: no values; write {key}=FIRST,SECOND,...")
    return key, written


def _listed(where: str, key: str, written: str) -> list[Any]:
    """Values between commas; commas inside brackets and quotes do not separate."""
    try:
        values = list(parse_toml(f"values = [{written}]")["values"])
        if not _textual(key) or all(isinstance(value, str) for value in values):
            return values
    except ValueError:
        pass
    parts = written.split(",")
    if not all(part.strip() for part in parts):
        raise ConfigError(f"{where}: an empty value between commas")
    return [value_of(key, part) for part in parts]


def _numbers(where: str, written: str) -> list[float]:
    try:
        numbers = [float(part) for part in written.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{where}: ({written}) are not finite numbers")
    return numbers


def _range(where: str, name: str, arguments: Sequence[float]) -> list[float]:
    if len(arguments) != 3 or arguments[2] != int(arguments[2]):
        raise ConfigError(f"{where}: {name} takes FIRST,LAST,N with a whole N")
    first, last, number = arguments[0], arguments[1], int(arguments[2])
    if not 2 <= number <= MOST_VALUES:
        raise ConfigError(f"{where}: {number} values; N is 2 to {MOST_VALUES:,}")
    if not first < last:
        raise ConfigError(f"{where}: {_shown(first)} is not below {_shown(last)}")
    shares = [place / (number - 1) for place in range(number)]
    if name == "lin":
        return [first + share * (last - first) for share in shares]
    if first <= 0:
        raise ConfigError(f"{where}: {_shown(first)} has no logarithm; begin above 0, or use lin")
    return [first * (last / first) ** share for share in shares]


def _fitting(key: str, value: float) -> float | int:
    """A value rounded to an integer or to `_DIGITS`, as the setting takes it."""
    return round(value) if whole(key) else float(f"{value:.{_DIGITS}g}")


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


Settings = dict[str, Any]
"""Key of a setting → its value at a point; keys in tables are dotted."""

MOST_POINTS = 10 * MOST_VALUES
SAMPLES = 32
"""Default number of random points."""


class Point(NamedTuple):
    """One run of a sweep."""

    settings: Settings
    """The settings that the sweep sets here, without the seed."""
    config: RunConfig


class Space(NamedTuple):
    """Everything that a sweep tries: the product of its parts."""

    axes: tuple[Axis, ...]
    """Axes of a grid: every value of each is combined with every value of the others."""
    rows: tuple[Settings, ...]
    """Rows of settings that are tried together."""
    draws: tuple[Settings, ...]
    """Rows of settings that are drawn at random."""
    seeds: int | None
    """Number of seeds, from that of the base upwards; None: that seed alone."""


def parse_space(
    grids: Sequence[str] = (),
    lists: Sequence[str] = (),
    randoms: Sequence[str] = (),
    *,
    samples: int | None = None,
    sample_seed: int = 0,
    seeds: int | None = None,
) -> Space:
    """The space that the options of a command describe.

    `grids`: as for `parse_axis`. `lists`: either `KEY=VALUES` of equal length, taken together row
    by row, or files of rows (CSV with a header, or one JSON object a line). `randoms`: as for
    `parse_law`. Raises `ConfigError`.
    """
    axes = tuple(parse_axis("--grid", text) for text in grids)
    laws = [parse_law("--random", text) for text in randoms]
    rows = _rows(lists)
    if samples is not None and not laws:
        raise ConfigError("--samples: nothing is drawn; add --random KEY=uniform(A,B)")
    in_rows = rows[0] if rows else ()
    _check_keys([*(axis.key for axis in axes), *in_rows, *(law.key for law in laws)], seeds)
    drawn = (samples or SAMPLES) if laws else 0
    _check_number(*(len(axis.values) for axis in axes), len(rows), drawn, seeds or 1)
    return Space(axes, rows, _draws(laws, drawn, sample_seed), seeds)


def _draws(laws: Sequence[Law], number: int, seed: int) -> tuple[Settings, ...]:
    random = Random(f"kvsim sweep {seed}")
    return tuple({law.key: law.draw(random) for law in laws} for _ in range(number))


def _check_keys(keys: Sequence[str], seeds: int | None) -> None:
    """Raises `ConfigError` for a space that varies nothing, a setting twice, or the workload."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise ConfigError(f"{key}: varied twice; give all its values in one place")
        seen.add(key)
    if "workload" in seen:
        raise ConfigError("workload: all points of a sweep share one; make a sweep for each")
    if seeds is not None and "seed" in seen:
        raise ConfigError("--seeds: the seed is varied already; leave one of the two out")
    if not seen and seeds is None:
        raise ConfigError("nothing to sweep; give --grid KEY=VALUES, --list, --random or --seeds N")


def _check_number(*sizes: int) -> None:
    """Raises `ConfigError` if parts of these sizes, 0 where there is none, make too many points."""
    number = prod(max(1, size) for size in sizes)
    if number > MOST_POINTS:
        raise ConfigError(f"a sweep of {number:,} points; {MOST_POINTS:,} are the most")


def expand(space: Space, base: Mapping[str, Any]) -> list[Point]:
    """The points of a space over the settings `base`; seeds vary fastest, then the last part.

    Every value of a grid is checked by itself first. A combination that only the engine would
    refuse becomes a point, and its run reports the refusal. Raises `ConfigError`.
    """
    config = make_settings(base, "configuration")
    grid = [[{axis.key: value} for value in axis.values] for axis in space.axes]
    for settings in chain(*grid):
        make_settings(overlaid(base, settings), f"--grid {next(iter(settings))}")
    seeds = [{"seed": config.seed + number} for number in range(space.seeds or 0)]
    parts = (*grid, space.rows, space.draws, seeds)
    points = []
    for chosen in product(*(part or ({},) for part in parts)):
        settings = dict(chain(*(row.items() for row in chosen)))
        config = make_settings(overlaid(base, settings), "sweep")
        settings.pop("seed", None)
        points.append(Point(settings, config))
    return points


def overlaid(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The table `base` with these settings; dotted keys reach into its tables."""
    table = dict(base)
    for key, value in settings.items():
        name, _, inner = key.partition(".")
        table[name] = {**table.get(name, {}), inner: value} if inner else value
    return table


def _rows(lists: Sequence[str]) -> tuple[Settings, ...]:
    """The rows of a file, or those that the columns `KEY=VALUES` make together."""
    files = [text for text in lists if "=" not in text]
    if not files:
        return _side_by_side([parse_axis("--list", text, twice=True) for text in lists])
    if len(lists) > 1:
        raise ConfigError(f"--list {files[0]}: a file of rows stands alone; leave the others out")
    return _read_rows(files[0])


def _side_by_side(columns: Sequence[Axis]) -> tuple[Settings, ...]:
    keys = [axis.key for axis in columns]
    if len({len(axis.values) for axis in columns}) > 1:
        lengths = ", ".join(f"{axis.key} {len(axis.values)}" for axis in columns)
        raise ConfigError(f"--list: values are taken row by row, but there are {lengths}")
    if len(set(keys)) < len(keys):
        raise ConfigError("--list: a key is given twice; give all its values in one place")
    values = zip(*(axis.values for axis in columns), strict=True)
    return tuple(dict(zip(keys, row, strict=True)) for row in values)


def _read_rows(path: str) -> tuple[Settings, ...]:
    """The rows of a file, each of them settings that may be; every row has the same keys."""
    rows = _parsed_rows(path)
    keys = list(rows[0][1])
    for number, row in rows:
        if list(row) != keys:
            raise ConfigError(f"{path}:{number}: keys {', '.join(row)}; the first row's differ")
        for key in row:
            check_key(f"{path}:{number}", key)
        plain = {key: value for key, value in row.items() if "." not in key}
        make_settings(plain, f"{path}:{number}")
    return tuple(row for _, row in rows)


def _parsed_rows(path: str) -> list[tuple[int, Settings]]:
    """Rows of a file with the numbers of their lines: one JSON object a line, or CSV."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--list {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--list {path}: not a text file") from None
    if not text.strip():
        raise ConfigError(f"--list {path}: no rows; give JSON objects, or CSV with a header")
    read = _json_rows if text.lstrip().startswith("{") else _csv_rows
    rows = list(read(path, StringIO(text)))
    if not rows:
        raise ConfigError(f"--list {path}: a header and no rows")
    return rows


def _json_rows(path: str, lines: Iterable[str]) -> Iterator[tuple[int, Settings]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict) or not row:
            raise ConfigError(f"{path}:{number}: expected an object of settings")
        yield number, row


def _csv_rows(path: str, lines: Iterable[str]) -> Iterator[tuple[int, Settings]]:
    reader, header = csv.reader(lines, strict=True), list[str]()
    try:
        for cells in reader:
            number = reader.line_num
            if not cells[1:] and not "".join(cells).strip():
                continue
            if not header:
                header = [key.strip() for key in cells]
                if len(set(header)) < len(header):
                    raise ConfigError(f"{path}:{number}: a key is given twice; leave one out")
                continue
            if len(cells) != len(header):
                raise ConfigError(f"{path}:{number}: {len(cells)} values for {len(header)} keys")
            row = zip(header, cells, strict=True)
            yield number, {key: value_of(key, cell) for key, cell in row}
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: not CSV: {error}") from None
