"""Expands a space of settings into points: grids, lists of rows and random samples, by seeds."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.fleet.settings import make_settings
from kvsim.search.sweep.values import (
    MOST_VALUES,
    Axis,
    Law,
    check_key,
    parse_axis,
    parse_law,
    value_of,
)
from kvsim.settings.config import RunConfig
from kvsim.settings.parsing import parse_json

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


@dataclass(frozen=True, slots=True)
class Space:
    """Everything that a sweep tries: the product of its parts."""

    axes: tuple[Axis, ...] = ()
    """Axes of a grid: every value of each is combined with every value of the others."""
    rows: tuple[Settings, ...] = ()
    """Rows of settings that are tried together."""
    laws: tuple[Law, ...] = ()
    samples: int = SAMPLES
    sample_seed: int = 0
    seeds: int | None = None
    """Number of seeds, from that of the base upwards; None: that seed alone."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Every setting that is varied, without the seed, in order."""
        rows = tuple(self.rows[0]) if self.rows else ()
        return (*(axis.key for axis in self.axes), *rows, *(law.key for law in self.laws))


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
    laws = tuple(parse_law("--random", text) for text in randoms)
    rows = _rows(lists)
    if samples is not None and not laws:
        raise ConfigError("--samples: nothing is drawn; add --random KEY=uniform(A,B)")
    space = Space(axes, rows, laws, samples or SAMPLES, sample_seed, seeds)
    seen: set[str] = set()
    for key in space.keys:
        if key in seen:
            raise ConfigError(f"{key}: varied twice; give all its values in one place")
        seen.add(key)
    if "workload" in seen:
        raise ConfigError("workload: all points of a sweep share one; make a sweep for each")
    if seeds is not None and "seed" in seen:
        raise ConfigError("--seeds: the seed is varied already; leave one of the two out")
    if not seen and seeds is None:
        raise ConfigError("nothing to sweep; give --grid KEY=VALUES, --list, --random or --seeds N")
    return space


def expand(space: Space, base: Mapping[str, Any], where: str = "configuration") -> list[Point]:
    """The points of a space over the settings `base`; seeds vary fastest, then the last part.

    Every value is checked by itself first. A combination that only the engine would refuse becomes
    a point, and its run reports the refusal. Raises `ConfigError`.
    """
    config = make_settings(base, where)
    _check_size(space)
    for axis in space.axes:
        for value in axis.values:
            make_settings(overlaid(base, {axis.key: value}), f"--grid {axis.key}")
    points: list[Point] = []
    for settings in _settings(space):
        table = overlaid(base, settings)
        if space.seeds is None:
            points.append(_point(settings, table))
        else:
            seeds = range(config.seed, config.seed + space.seeds)
            points += [_point(settings, {**table, "seed": seed}) for seed in seeds]
    return points


def overlaid(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The table `base` with these settings; dotted keys reach into its tables."""
    table = dict(base)
    for key, value in settings.items():
        name, _, inner = key.partition(".")
        table[name] = {**table.get(name, {}), inner: value} if inner else value
    return table


def _point(settings: Settings, table: Mapping[str, Any]) -> Point:
    rest = {key: value for key, value in settings.items() if key != "seed"}
    return Point(rest, make_settings(table, "sweep"))


def _settings(space: Space) -> Iterator[Settings]:
    random = Random(f"kvsim sweep {space.sample_seed}")
    draws = [{law.key: law.draw(random) for law in space.laws} for _ in range(space.samples)]
    values = product(*(axis.values for axis in space.axes))
    names = [axis.key for axis in space.axes]
    parts = product(values, space.rows or ({},), draws if space.laws else ({},))
    for chosen, row, drawn in parts:
        yield {**dict(zip(names, chosen, strict=True)), **row, **drawn}


def _check_size(space: Space) -> None:
    number = prod(len(axis.values) for axis in space.axes)
    number *= max(1, len(space.rows)) * (space.samples if space.laws else 1) * (space.seeds or 1)
    if number > MOST_POINTS:
        raise ConfigError(f"a sweep of {number:,} points; {MOST_POINTS:,} are the most")


def _rows(lists: Sequence[str]) -> tuple[Settings, ...]:
    files = [text for text in lists if "=" not in text]
    if files and len(lists) > 1:
        raise ConfigError(f"--list {files[0]}: a file of rows stands alone; leave the others out")
    if files:
        return _read_rows(files[0])
    columns = [parse_column(text) for text in lists]
    if len({len(axis.values) for axis in columns}) > 1:
        lengths = ", ".join(f"{axis.key} {len(axis.values)}" for axis in columns)
        raise ConfigError(f"--list: values are taken row by row, but there are {lengths}")
    if len({axis.key for axis in columns}) < len(columns):
        raise ConfigError("--list: a key is given twice; give all its values in one place")
    values = zip(*(axis.values for axis in columns), strict=True)
    return tuple(dict(zip((a.key for a in columns), row, strict=True)) for row in values)


def parse_column(text: str) -> Axis:
    """`KEY=VALUES` in which a value may come twice. Raises `ConfigError`."""
    key, _, written = text.partition("=")
    parts = written.split(",")
    if len(set(parts)) == len(parts):
        return parse_axis("--list", text)
    check_key(f"--list {text}", key.strip())
    return Axis(key.strip(), tuple(value_of(part) for part in parts))


def _read_rows(path: str) -> tuple[Settings, ...]:
    """Rows of a file: one JSON object a line, or CSV. Every row has the same keys."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--list {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--list {path}: not a text file") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--list {path}: no rows; give JSON objects, or CSV with a header")
    if numbered[0][1].lstrip().startswith("{"):
        rows = [(number, _json_row(f"{path}:{number}", line)) for number, line in numbered]
    else:
        rows = list(_csv_rows(path, numbered))
    if not rows:
        raise ConfigError(f"--list {path}: a header and no rows")
    keys = list(rows[0][1])
    for number, row in rows:
        if list(row) != keys:
            raise ConfigError(f"{path}:{number}: keys {', '.join(row)}; the first row's differ")
        for key in row:
            check_key(f"{path}:{number}", key)
        plain = {key: value for key, value in row.items() if "." not in key}
        make_settings(plain, f"{path}:{number}")
    return tuple(row for _, row in rows)


def _json_row(where: str, line: str) -> Settings:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or not row:
        raise ConfigError(f"{where}: expected an object of settings")
    return row


def _csv_rows(path: str, numbered: list[tuple[int, str]]) -> Iterator[tuple[int, Settings]]:
    table = list(csv.reader(line for _, line in numbered))
    header = [key.strip() for key in table[0]]
    if len(set(header)) < len(header):
        raise ConfigError(f"{path}:{numbered[0][0]}: a key is given twice; leave one out")
    for (number, _), cells in zip(numbered[1:], table[1:], strict=True):
        if len(cells) != len(header):
            raise ConfigError(f"{path}:{number}: {len(cells)} values for {len(header)} keys")
        yield number, {key: value_of(cell) for key, cell in zip(header, cells, strict=True)}
