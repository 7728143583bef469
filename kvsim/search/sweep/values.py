"""Reads the values of a setting: a list, a range, or a law to draw from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple, get_type_hints

import msgspec

from kvsim.errors import ConfigError
from kvsim.fleet.settings import FleetConfig
from kvsim.settings.config import nearest
from kvsim.settings.parsing import parse_toml, typed

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


def parse_axis(option: str, text: str) -> Axis:
    """`KEY=1,2,3`, `KEY=lin(0,0.1,5)` or `KEY=log(1,64,7)`; ranges include both ends.

    Values are TOML, or bare words taken as text. Ranges of an integer setting are rounded, and
    equal values are tried once. Raises `ConfigError` naming `option`.
    """
    where = f"{option} {text}"
    key, written = _assignment(where, text)
    call = _CALL.fullmatch(written)
    if call is None:
        values = _listed(where, written)
        for place, value in enumerate(values):
            if value in values[:place]:
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
        choices = _listed(where, call[2])
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


def value_of(text: str) -> Any:
    """One value: TOML, or a bare word taken as text."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


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
    hint = get_type_hints(FleetConfig, include_extras=True).get(key, float)
    return _takes(hint, 2) and not _takes(hint, 1.5)


def _tables() -> frozenset[str]:
    return frozenset(
        field.name
        for field in msgspec.structs.fields(FleetConfig)
        if field.default_factory is not msgspec.NODEFAULT
    )


def _takes(hint: Any, value: float) -> bool:
    try:
        typed(value, hint)
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


def _listed(where: str, written: str) -> list[Any]:
    """Values between commas; commas inside brackets and quotes do not separate."""
    try:
        return list(parse_toml(f"values = [{written}]")["values"])
    except ValueError:
        parts = written.split(",")
    if not all(part.strip() for part in parts):
        raise ConfigError(f"{where}: an empty value between commas")
    return [value_of(part) for part in parts]


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
