"""Reads files that are one JSON document rather than a line per request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvsim.workload.source import Source, decode

MAX_BYTES = 1 << 30
"""A larger document, or element of a streamed list, is refused: it would fill the memory."""
_SPACE = " \t\r\n"


def read_objects(source: Source) -> list[dict[str, Any]]:
    """The JSON objects of a file, usually one. Raises `TraceError`."""
    text = _whole(source)
    found: list[dict[str, Any]] = []
    at = _skip(text, 0)
    while at < len(text):
        try:
            value, at = decode(source, text, at)
        except json.JSONDecodeError as error:
            what = f"not JSON: {error.msg} at column {error.colno}; write the file again"
            raise source.error(what, line=error.lineno) from None
        if not isinstance(value, dict):
            raise source.error("not a JSON object; give the file as its tool wrote it", line=0)
        found.append(value)
        at = _skip(text, at)
    return found


def read_elements(source: Source) -> Iterator[Any]:
    """The elements of a file that is one JSON list, one by one; the list is never held whole."""
    texts = source.texts()
    rest = next(texts).lstrip(_SPACE)
    if not rest.startswith("["):
        raise source.error("not a JSON list; give the file as its tool wrote it", line=0)
    rest, wants_comma, number = rest[1:], False, 0
    while True:
        rest = rest.lstrip(_SPACE)
        if rest.startswith("]"):
            _check_end(source, rest[1:], texts)
            return
        if wants_comma and rest.startswith(","):
            rest, wants_comma = rest[1:].lstrip(_SPACE), False
        try:
            if wants_comma and rest:
                raise json.JSONDecodeError("Expecting ',' delimiter", rest, 0)
            value, end = decode(source, rest)
            if end == len(rest):
                raise json.JSONDecodeError("Unfinished", rest, end)
        except json.JSONDecodeError as error:
            if not (more := _more(source, texts, len(rest))):
                where = f"element {number}"
                raise source.error(
                    f"not JSON: {error.msg}; write the file again", where, 0
                ) from None
            rest += more
            continue
        rest, wants_comma, number = rest[end:], True, number + 1
        yield value


def _more(source: Source, texts: Iterator[str], held: int) -> str:
    """At least as much text as is held, so that what is decoded again stays in proportion."""
    if held > MAX_BYTES:
        raise source.error("one element has more than 1 GiB; split it", line=0)
    found = ""
    while (piece := next(texts, "")) and len(found) < held:
        found += piece
    return found + piece


def _check_end(source: Source, rest: str, texts: Iterator[str]) -> None:
    while not rest.strip(_SPACE):
        piece = next(texts, None)
        if piece is None:
            return
        rest = piece
    raise source.error("there is more after the list; give one JSON list", line=0)


def _whole(source: Source) -> str:
    pieces, size = [], 0
    for piece in source.texts():
        size += len(piece)
        if size > MAX_BYTES:
            raise source.error("one JSON document of more than 1 GiB; split it", line=0)
        pieces.append(piece)
    return "".join(pieces)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
