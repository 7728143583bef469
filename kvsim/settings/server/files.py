"""Reads what users hand over: logs line by line, commands and YAML whole, and what Python printed:
`{'a': 1}`, `Namespace(a=1)`, `a=1, b=Config(c=[2])`.

Logs hold values that are no literals, as `dtype=torch.bfloat16` or `<Enum.A: 1>`; they stay text.
"""

from __future__ import annotations

import ast
import gzip
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kvsim.errors import ConfigError

CHUNK_BYTES = 1 << 20
"""If a line of a log is longer than two chunks of this size, only its beginning is read."""
MOST_COMMAND_BYTES = 1 << 20

_GZIP = b"\x1f\x8b"


def lines_with(words: Iterable[bytes], path: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a log, gzipped or not, that hold one of `words`; with their numbers from 1.

    What a terminal has wrapped is joined: a long line, and those after it that begin no record.

    Raises `ConfigError` for a file that cannot be read, holds nothing, or is not text.
    """
    try:
        with Path(path).open("rb") as stored:
            packed = stored.peek(2).startswith(_GZIP)
            file: BinaryIO = gzip.GzipFile(fileobj=stored) if packed else stored  # type: ignore[assignment]
            yield from _lines(file, path, tuple(words))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except EOFError:
        raise ConfigError(f"{path}: the gzip file ends too early; fetch it again") from None
    except (gzip.BadGzipFile, zlib.error):
        raise ConfigError(f"{path}: not a whole gzip file; fetch it again") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _lines(file: BinaryIO, path: str, words: tuple[bytes, ...]) -> Iterator[tuple[int, bytes]]:
    number, begins = 1, True
    while chunk := file.read(CHUNK_BYTES):
        chunk += file.readline(CHUNK_BYTES)
        if b"\0" in chunk:
            raise ConfigError(f"{path}: not a text in UTF-8; give the text that the server printed")
        if any(word in chunk for word in words):
            lines = chunk.split(b"\n")
            place = 0
            while place < len(lines):
                end = _end_of_record(lines, place)
                record = b"".join(lines[place:end])
                if (begins or place) and any(word in record for word in words):
                    yield number + place, record
                place = end
        number += chunk.count(b"\n")
        begins = chunk.endswith(b"\n")
    if number == 1 and begins:
        raise ConfigError(f"{path}: the file is empty; give the text that the server printed")


_WRAPPED_AT = 80
"""Columns of the narrowest terminal; shorter lines were not wrapped."""
_RECORD = re.compile(
    rb"(?:\S+ +\| )?(?:\x1b\[[0-9;]*m)*"
    rb"(?:[(\[]|INFO|WARNING|ERROR|DEBUG|CRITICAL|\d{4}-\d\d|[A-Z]\w* \w+ \w+|\s*$)"
)
"""The beginning of a line that a logger or a launcher wrote, or of a sentence; an empty line."""


def _end_of_record(lines: list[bytes], first: int) -> int:
    """The place after a line and those in which it goes on."""
    place = first + 1
    while place < len(lines) and len(lines[place - 1]) >= _WRAPPED_AT:
        if _RECORD.match(lines[place]):
            break
        place += 1
    return place


def read_text(path: str | Path) -> str:
    """A small text file; raises `ConfigError` for what is none."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_COMMAND_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if len(raw) > MOST_COMMAND_BYTES:
        raise ConfigError(
            f"{path}: larger than {MOST_COMMAND_BYTES:,} bytes; give a file with one command"
        )
    if not raw.strip():
        raise ConfigError(f"{path}: the file is empty")
    if b"\0" in raw:
        raise ConfigError(f"{path}: not a text file")
    return raw.decode("utf-8-sig", errors="replace")


def read_yaml(text: str, where: str) -> Any:
    """The content of a YAML text; raises `ConfigError` where it is none."""
    import yaml

    try:
        return yaml.safe_load(text)
    # PyYAML raises plain exceptions for tags with values that are not theirs, as in `!!bool x`.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{where}: not YAML: {problem[:200]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not YAML: nested too deeply") from None


def _unreadable(path: str | Path, error: Exception) -> ConfigError:
    problem = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ConfigError(f"{path}: cannot be read: {problem}")


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
