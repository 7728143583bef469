"""Describes the tables of a profile, and how two profiles differ, in plain rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import msgspec

from kvsim.cost.kernels import Fused
from kvsim.cost.profile import Curve, Fit, Grid, Interpolation, MixedGrid, Profile

Point = tuple[float, ...]


class Part(NamedTuple):
    """One table of a profile."""

    name: str
    axes: dict[str, tuple[float, float, int]]
    """Axis → (first point, last point, number of points)."""
    points: int
    """Number of times in the table."""
    us: tuple[float, float]
    """Least and greatest time in microseconds."""


class Ratio(NamedTuple):
    """Times of a table in another profile over those in this one."""

    name: str
    points: int
    """Grid points within both tables; without any, the ratios are 1."""
    median: float
    least: float
    greatest: float


def parts(profile: Profile) -> list[Part]:
    """The tables of a profile, in the order of the file."""
    found = []
    for name, table in _tables(profile):
        times = [us for _, us in points(table)]
        axes = {axis: (x[0], x[-1], len(x)) for axis, x in _axes(table).items()}
        found.append(Part(name, axes, len(times), (min(times), max(times))))
    return found


def ratios(one: Profile, other: Profile) -> list[Ratio]:
    """The tables that both have: `other`, interpolated, over `one` at the grid points of `one`."""
    tables = dict(_tables(other))
    found = []
    for name, table in _tables(one):
        if name in tables:
            at = reader(tables[name])
            near = [(us, at(point)) for point, us in points(table)]
            quotients = [b / a for a, b in near if b is not None and a > 0] or [1.0]
            count = sum(b is not None and a > 0 for a, b in near)
            found.append(
                Ratio(name, count, median(quotients), min(quotients), max(quotients)),
            )
    return found


def settings_that_differ(one: Profile, other: Profile) -> list[tuple[str, str, str]]:
    """(key, value, other value) of everything except the tables."""
    left, right = _flat(one), _flat(other)
    keys = [*left, *(key for key in right if key not in left)]
    rows = [(key, left.get(key, "-"), right.get(key, "-")) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def _tables(profile: Profile) -> Iterator[tuple[str, Curve | Grid | MixedGrid]]:
    for name in Fit.__struct_fields__:
        table = getattr(profile.fit, name)
        if isinstance(table, Curve | Grid | MixedGrid):
            yield name, table


def _axes(table: Curve | Grid | MixedGrid) -> dict[str, list[float]]:
    """Axes by the names that they have in the file."""
    named = zip(table.__struct_fields__, table.__struct_encode_fields__, strict=True)
    values = {written: getattr(table, key) for key, written in named if key != "us"}
    return {key: axis for key, axis in values.items() if isinstance(axis, list)}


def points(table: Curve | Grid | MixedGrid) -> Iterator[tuple[Point, float]]:
    """Every grid point with its time."""

    def walk(times: Any, axes: list[list[float]], point: Point) -> Iterator[tuple[Point, float]]:
        if not axes:
            yield point, times
            return
        for x, inner in zip(axes[0], times, strict=False):
            yield from walk(inner, axes[1:], (*point, x))

    return walk(table.us, list(_axes(table).values()), ())


def reader(table: Curve | Grid | MixedGrid) -> Callable[[Point], float | None]:
    """A function that looks a point up in a table; it returns None outside the table."""
    if isinstance(table, MixedGrid):
        fused = Fused(table)

        def in_one_launch(point: Point) -> float | None:
            q, ctx, n, kv = point
            us = fused.us([(q, ctx)], int(n), kv)
            return None if fused.outside else us

        return in_one_launch

    def at(point: Point) -> float | None:
        look = Interpolation()
        if isinstance(table, Grid):
            us = look.between(table.x, table.ctx, table.us, *point)
        else:
            us = look.along(table.x, table.us, *point)
        return None if look.outside else us

    return at


def _flat(profile: Profile) -> dict[str, str]:
    """Everything except tables and rows, as `key.inner` → text."""
    plain: dict[str, Any] = msgspec.to_builtins(profile)
    tables = {name for name, _ in _tables(profile)}
    plain["fit"] = {key: value for key, value in plain["fit"].items() if key not in tables}
    plain["ceilings"] = {k: v for k, v in plain["ceilings"].items() if k != "achieved"}
    return dict(_words({key: plain[key] for key in plain if key not in ("rows", "others")}))


def _words(table: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _words(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)
