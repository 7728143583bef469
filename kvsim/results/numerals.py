"""Writes numbers for people: grouped digits, three or four figures, a fitting unit."""

from __future__ import annotations

import math
from collections.abc import Callable

MISSING = "–"
SPACE = "\u00a0"
"""The space between a number and its unit, where no line breaks."""

_LEAST = 0.001
"""Numbers nearer to 0 are not told from each other."""
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def count(value: float) -> str:
    """`12,031`."""
    return f"{round(value):,}"


def number(value: float) -> str:
    """A number with three figures or more and no exponent: `0.0123`, `1.71`, `215`, `12,031`; one
    that is nearly none is `<0.001`."""
    if 0 < abs(value) < _LEAST:
        return f"{'−' if value < 0 else ''}<{_LEAST}"
    if isinstance(value, int) or abs(value) >= 100 or value == 0:
        return count(value)
    if abs(value) >= 1:
        return _three(value)
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def seconds(value: float) -> str:
    """`<1 µs`, `23.3 ms`, `1.41 s`, `69.6 s`, `2 min 4 s`, `3 h 25 min`."""
    if value < 0:
        return f"−{seconds(-value)}"
    if value >= 7200:
        return f"{int(value / 3600)}{SPACE}h{SPACE}{int(value / 60) % 60}{SPACE}min"
    if value >= 120:
        return f"{int(value / 60)}{SPACE}min{SPACE}{int(value) % 60}{SPACE}s"
    if value == 0:
        return f"0{SPACE}s"
    if value >= 1:
        return f"{_three(value)}{SPACE}s"
    if value >= 1e-3:
        return f"{_three(value * 1e3)}{SPACE}ms"
    if value >= 1e-6:
        return f"{_three(value * 1e6)}{SPACE}µs"
    return f"<1{SPACE}µs"


def milliseconds(value: float) -> str:
    """A duration given in milliseconds, in the unit that fits."""
    return seconds(value / 1e3)


def percent(value: float) -> str:
    """A share as `12.3 %`; one below 0 as `−2.4 %`."""
    if value < 0:
        return f"−{percent(-value)}"
    if value < 0.0005:
        return f"<0.1{SPACE}%" if value else f"0{SPACE}%"
    if 0.9995 <= value < 1:
        return f">99.9{SPACE}%"
    return f"{value * 100:.1f}{SPACE}%" if value < 1 else f"{value * 100:.0f}{SPACE}%"


def size(value: float) -> str:
    """Bytes as `55.0 GiB`."""
    power = 0
    while abs(value) >= 1024 and power < len(_BYTES) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.{0 if power == 0 else 1}f}{SPACE}{_BYTES[power]}"


def plural(value: int, noun: str) -> str:
    """`1 request`, `12,031 requests`."""
    return f"{count(value)}{SPACE}{noun}{'' if value == 1 else 's'}"


def show(value: float | None, unit: str) -> str:
    """A figure in its unit, one of `UNITS`; `MISSING` where it is undefined."""
    return MISSING if value is None else UNITS[unit](value)


def signed(value: float, unit: str) -> str:
    """A difference with its sign, in a unit of `UNITS`; shares in percentage points. One that is
    nearly none has no sign: `<1 µs`."""
    written = _points(abs(value)) if unit == "share" else show(abs(value), unit)
    sign = "" if written.startswith("<") else "−" if value < 0 else "+" if value > 0 else ""
    return f"{sign}{written}"


def interval(low: float, high: float, unit: str) -> str:
    """The ends of an interval of differences: `−2.41 s … −1.44 s`."""
    return f"{signed(low, unit)} … {signed(high, unit)}"


def signed_percent(value: float) -> str:
    """A relative difference: `+12.3 %`, `−45 %`."""
    return percent(value) if value < 0 else f"+{percent(value)}"


def _three(value: float) -> str:
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def _points(share: float) -> str:
    """Percentage points, to the second decimal at most."""
    points = share * 100
    if 0 < points < 0.005:
        return f"<0.01{SPACE}points"
    return f"{number(points) if points >= 1 else f'{round(points, 2):g}'}{SPACE}points"


def _per_second(what: str) -> Callable[[float], str]:
    return lambda value: f"{number(value)}{SPACE}{what}/s"


UNITS: dict[str, Callable[[float], str]] = {
    "s": seconds,
    "ms": milliseconds,
    "share": percent,
    "bytes": size,
    "requests": count,
    "tokens": count,
    "blocks": count,
    "steps": count,
    "preemptions": count,
    "": number,
    "requests/s": _per_second("req"),
    "tokens/s": _per_second("tok"),
}
"""How each unit is written."""
