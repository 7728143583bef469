"""Takes apart what Python printed: `{'a': 1}`, `Namespace(a=1)`, `a=1, b=Config(c=[2])`.

Logs hold values that are no literals, as `dtype=torch.bfloat16` or `<Enum.A: 1>`; they stay text.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from typing import Any

from kvsim.errors import ConfigError

_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}


def pairs(text: str) -> Iterator[tuple[str, Any]]:
    """The names and values of a dictionary, a call, or of arguments without brackets.

    What follows the bracket that closes the first one is left aside, and so are parts without a
    name. Raises `ValueError` if the first bracket is never closed.
    """
    text = text.strip()
    head, bracket, _ = text.partition("{") if text.startswith("{") else text.partition("(")
    whole = bracket and "=" not in head and "," not in head
    for part in _parts(text[len(head) + 1 :], closed=True) if whole else _parts(text):
        name, value = _named(part, ":" if part.startswith(("'", '"')) else "=")
        if name:
            yield name, _value(value)


def whole_pairs(text: str, where: str) -> list[tuple[str, Any]]:
    """`pairs` of a line of a log at `where`. Raises `ConfigError` if the line is cut off."""
    try:
        return list(pairs(text))
    except ValueError:
        raise cut_off(where) from None


def cut_off(where: str) -> ConfigError:
    """The error for a line of a log that goes on in the next one, or is lost."""
    return ConfigError(
        f"{where}: the line is cut off, perhaps by the width of a terminal; give the log as the"
        " server wrote it"
    )


def _parts(text: str, closed: bool = False) -> Iterator[str]:
    """Split at commas outside brackets and quotes, up to a bracket that nothing opened; with
    `closed`, there has to be one."""
    expected: list[str] = []
    start = place = 0
    while place < len(text):
        character = text[place]
        if character in "'\"":
            place = _after_quote(text, place)
            continue
        if character in _PAIRS:
            expected.append(_PAIRS[character])
        elif expected and character == expected[-1]:
            expected.pop()
        elif character in ")]}" and not expected:
            break
        elif character == "," and not expected:
            yield text[start:place].strip()
            start = place + 1
        place += 1
    if closed and place >= len(text):
        raise ValueError("a bracket is not closed")
    yield text[start:place].strip()


def _after_quote(text: str, place: int) -> int:
    """The place after a quoted text, which ends with the line at the latest."""
    quote, at = text[place], place + 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == quote:
            return at + 1
        at += 1
    return len(text)


def _named(part: str, separator: str) -> tuple[str, str]:
    name, found, value = part.partition(separator)
    name = name.strip().strip("'\"")
    return (name, value.strip()) if found and name.isidentifier() else ("", "")


def _value(text: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in texts that are not ours
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
