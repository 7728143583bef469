"""Parses JSON and TOML that others wrote: every fault is a `ValueError` of one line.

The parsers of the standard library advise programmers about integers of thousands of digits. How
deep a nesting they take depends on the version of Python, so there is a limit of our own. What of
it names code is found, and refused where nobody here trusts it.

Whole numbers may have a suffix, as on vLLM's command line: 32K, 25.6k, 10G. Lower-case suffixes are
powers of 1,000, upper-case ones powers of 1,024. Source: vLLM 0.33.0, vllm/utils/argparse_utils.py,
`human_readable_int`. `10GiB`, which vLLM refuses, is `10G` here.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from kvsim.errors import ConfigError

DEEP = "nested too deeply; flatten it"
DIGITS = "an integer has too many digits"
_MOST_DIGITS = 300
"""Such integers are floats, too."""
_MOST_NESTED = 100
"""Levels of lists and tables; nothing that kvsim reads has as many."""


def parse_json(text: str | bytes, *, infinities: bool = False) -> Any:
    """The value of a JSON text without NaN and, but for `infinities`, without those. Raises
    `ValueError`."""
    decoder = _WITH_INFINITIES if infinities else _DECODER
    return _parsed(decoder.decode, text.decode() if isinstance(text, bytes) else text)


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises `ValueError`."""
    table: dict[str, Any] = _parsed(tomllib.loads, text)
    return table


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        value = parse(text)
    except RecursionError:
        raise ValueError(DEEP) from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError(DIGITS) from None
        raise
    # A text with few brackets cannot nest deeply: most need no walk through their values.
    brackets = text.count("[") + text.count("{")
    if brackets > _MOST_NESTED and not is_flat(value, _MOST_NESTED):
        raise ValueError(DEEP)
    return value


def typed(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """Plain values as the type `kind`: `msgspec.convert`, whose every fault is a `ValidationError`.

    A text with half a surrogate pair, such as a flag that is not UTF-8, is one of them.
    """
    import msgspec

    try:
        return msgspec.convert(value, kind, strict=strict)
    except UnicodeEncodeError:
        raise msgspec.ValidationError("A text is not UTF-8; write it as UTF-8") from None


def is_flat(value: Any, most: int = 30) -> bool:
    """Whether plain values are nested at most so deeply, so that functions may call themselves."""
    level = [value] if isinstance(value, (dict, list)) else []
    while level and most:
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for each in parts for inner in each if isinstance(inner, (dict, list))]
        most -= 1
    return not level


def _short(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(DIGITS)
    return int(text)


def refuse_constant(text: str) -> NoReturn:
    """Raise `ValueError` for NaN and infinities, which Python's parser takes."""
    raise ValueError(f"{text} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_finite, parse_int=_short)
_WITH_INFINITIES = json.JSONDecoder(
    parse_constant=lambda text: refuse_constant(text) if text == "NaN" else float(text),
    parse_float=_finite,
    parse_int=_short,
)


FILES = ("model", "hardware")
"""Settings that are no code, whatever the names of the files are; of a drafter, too."""


def refuse_code(
    named: Iterable[str], trusted: Collection[str], told: str, remedy: str = "add --trust {}"
) -> None:
    """Raise `ConfigError` for code that something from elsewhere names, unless it is `trusted`: it
    must not run what it likes. `told`: how the message begins."""
    for name in named:
        if name not in trusted:
            raise ConfigError(
                f"{told} {name!r}, which is not of kvsim; if you know that code,"
                f" {remedy.format(name)}"
            )


def named_code(value: Any) -> Iterator[str]:
    """Whatever would be imported of what settings hold, if it stood where a class can stand."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "class" or (str(key).endswith("module_path") and inner is not None):
                yield str(inner)
            else:
                yield from named_code(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from named_code(inner)
    elif isinstance(value, str) and ":" in value:
        yield value


_SIZE = re.compile(r"(\d+)(\.\d+)?(?:([kmgt])|([KMGT])(?:iB)?)?")


def human_readable_int(text: str) -> int:
    """The number that a text means; raises `ValueError` with the remedy.

    Decimals go with lower-case suffixes only, and are cut to a whole number.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a number; write it as 32768, 32K (x 1,024) or 32k (x 1,000)")
    whole, decimals, thousands, binary = match.groups()
    if binary:
        if decimals:
            raise ValueError(f"has decimals before {binary}; use {binary.lower()}, or no decimals")
        return int(whole) << 10 * ("KMGT".index(binary) + 1)
    if decimals and not thousands:
        raise ValueError("is not a whole number")
    places = 3 * ("kmgt".index(thousands) + 1) if thousands else 0
    digits = (decimals or "").lstrip(".").ljust(places, "0")
    return int(whole + digits[:places])
