"""Turns the values that other tools write into token counts and exact times."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from kvsim.workload.source import MAX_NS, MAX_TOKENS, Source, shown

NS_PER_S = 1_000_000_000
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)


def tokens(source: Source, field: str, value: object, low: int = 1) -> int:
    """A number of tokens >= `low`: an integer, also as text or as `512.0`."""
    number = value
    if type(value) is float and value.is_integer():
        number = int(value)
    elif isinstance(value, str):
        text = value.strip().removesuffix(".0")
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdecimal() and len(digits) <= 18:
            number = int(text)
    if type(number) is not int or number < low:
        remedy = "leave failed requests out" if value == "" else "fix it"
        raise source.error(f"{shown(value)} is not an integer >= {low}; {remedy}", field)
    if number > MAX_TOKENS:
        raise source.error(f"{shown(value)} is above {MAX_TOKENS}; give less", field)
    return number


def instant(source: Source, field: str, value: object, unit_ns: int) -> int:
    """A time in nanoseconds, of a number of units of `unit_ns`, also as text; exact."""
    try:
        number = Decimal(value) if isinstance(value, (int, str)) else Decimal(repr(value))
    except (InvalidOperation, ValueError):
        number = Decimal("NaN")
    if isinstance(value, bool) or not number.is_finite():
        raise source.error(f"{shown(value)} is not a number; give one", field)
    if number.copy_abs() > (MAX_NS - 1) // unit_ns:
        what = f"{shown(value)} is too large for a time; is the unit right? fix it"
        raise source.error(what, field)
    return round(number * unit_ns)


def date(source: Source, field: str, text: str) -> int:
    """Nanoseconds since 1970 of a date, exact to nine decimals; without a zone: UTC."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        what = f"{shown(text)} is not a time YYYY-MM-DD HH:MM:SS.fffffff"
        raise source.error(f"{what}; fix it", field)
    second, fraction, zone = match.groups()
    try:
        return _second(second, zone or "") * NS_PER_S + int((fraction or "0").ljust(9, "0"))
    except (ValueError, OverflowError):
        raise source.error(f"{shown(text)} is not a date; fix it", field) from None


def is_date(text: str) -> bool:
    """Whether `date` understands the form of this text."""
    return _TIME.fullmatch(text.strip()) is not None


@lru_cache(maxsize=1024)
def _second(text: str, zone: str) -> int:
    time = datetime.fromisoformat(text + zone)
    return int((time if zone else time.replace(tzinfo=UTC)).timestamp())
