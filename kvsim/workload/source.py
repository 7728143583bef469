"""Reads a trace file as a stream of clean lines, or as one JSON document, and reports where and why
it is faulty."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse, islice
from typing import Any

from kvsim.errors import TraceError
from kvsim.settings import limits
from kvsim.settings.parsing import refuse_constant

MAX_TOKENS = (1 << 24) - 1
"""Most tokens of one request, prompt and output together."""
NS_PER_S = 1_000_000_000
MAX_NS = 1 << 62
"""Times stay below this (146 years), so that they fit into 64 bits with room for a run."""

_BLOCK_BYTES = 1 << 16
_TEXT_BYTES = 1 << 20
_SAMPLE_ROWS, _FAR = 20_000, 1.5
"""Rows after which a file is refused that seems to have this many times the limit."""
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Source:
    """An open trace file: plain or gzip (recognised by the first two bytes), UTF-8.

    Iterate `lines()`, `blocks()` or `texts()` to the end. `line` is the number of the line last
    read (of the uncompressed text, from 1), `lines_read` counts blank ones after it, too, and
    `sha256` covers the uncompressed bytes read so far. Every fault of the file is raised as a
    `TraceError` of one line.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 0
        self.most_output_tokens = limits.most(limits.OUTPUT_TOKENS)
        self.lines_read = 0
        self._size = self._rows = self._blank = 0
        """Bytes of these lines, the rows among them, and the bytes of the others."""
        self._bytes_read = 0
        """Bytes of `_size` and of what is read ahead."""
        self._hash = hashlib.sha256()
        self._stored = _open(path)
        try:
            is_gzip = self._stored.peek(len(_GZIP)).startswith(_GZIP)
        except OSError as error:
            self._stored.close()
            raise self.error(_unreadable(error)) from None
        self._file = _unpacked(self._stored) if is_gzip else self._stored

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._stored.close()

    @property
    def sha256(self) -> str:
        """Digest of the uncompressed bytes read so far, in hexadecimal."""
        return self._hash.hexdigest()

    def beginning(self) -> str:
        """The first characters, for a look at the content before anything is read."""
        raw = self._guarded(lambda: self._file.peek(_BLOCK_BYTES), 1)
        return raw.removeprefix(_BYTE_ORDER_MARK).decode(errors="replace")

    def lines(self) -> Iterator[str]:
        """Every line that is not blank, without its line end. Call it once."""
        for block in self.blocks():
            yield from self.lines_of(block)

    def blocks(self) -> Iterator[bytes]:
        """The text in blocks of whole lines. Hand each to `lines_of` or to `takes` before the next
        one. Call it once."""
        longest = limits.most(limits.LINE_BYTES)
        next_bytes = partial(self._file.read1, _BLOCK_BYTES)
        parts: list[bytes] = []
        size = 0
        while raw := self._guarded(next_bytes, self.lines_read + 1):
            self._hash.update(raw)
            # The digest covers the mark, as that of `sha256sum` does; the text begins behind it.
            if not self._bytes_read:
                raw = raw.removeprefix(_BYTE_ORDER_MARK)
            self._bytes_read += len(raw)
            end = raw.rfind(b"\n") + 1
            if end:
                yield b"".join((*parts, raw[:end]))
                parts, size = [], 0
            parts.append(raw[end:])
            size += len(raw) - end
            if size > longest:
                raise self.excess("a line of bytes", longest, self.lines_read + 1)
        if size:
            yield b"".join(parts)

    def takes(self, block: bytes, rows: int) -> bool:
        """Count a block of `blocks` that holds `rows` rows, one on each line, as read; False, and
        nothing is counted, if some line of it is beyond a limit."""
        if (
            len(block) > limits.most(limits.LINE_BYTES)
            or self._size + len(block) > limits.most(limits.TRACE_BYTES)
            or self._rows + rows > limits.most(limits.ROWS)
        ):
            return False
        self._size += len(block)
        self.lines_read += rows
        self.line = self.lines_read
        self._count(rows)
        return True

    def lines_of(self, block: bytes) -> Iterator[str]:
        """Every line of a block of `blocks` that is not blank, without its line end."""
        most_bytes, most_rows = limits.most(limits.TRACE_BYTES), limits.most(limits.ROWS)
        longest, most_blank = limits.most(limits.LINE_BYTES), limits.most(limits.BLANK_BYTES)
        for raw in io.BytesIO(block):
            self.lines_read += 1
            self._size += len(raw)
            if len(raw) > longest:
                raise self.excess("a line of bytes", longest, self.lines_read)
            if self._size > most_bytes:
                raise self.excess("bytes", most_bytes, self.lines_read)
            try:
                text = raw.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                what = f"not UTF-8 at byte {error.start + 1} of the line; save it as UTF-8"
                raise self.error(what, line=self.lines_read) from None
            if text and not text.isspace():
                self._count(1)
                if self._rows > most_rows:
                    raise self.excess("rows", most_rows, self.lines_read)
                self.line = self.lines_read
                yield text
            else:
                self._blank += len(raw)
                if self._blank > most_blank:
                    raise self.excess("bytes of blank lines", most_blank, self.lines_read)

    def texts(self) -> Iterator[str]:
        """The whole text in pieces of about 1 MiB, for a file that is one document.

        Call it once, in place of `lines`; `line` stays 0.
        """
        decoder = getincrementaldecoder("utf-8")()
        raw, first = b"-", True
        while raw:
            raw = self._guarded(lambda: self._file.read(_TEXT_BYTES), 0)
            self._hash.update(raw)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError:
                raise self.error("not UTF-8; save it as UTF-8") from None
            yield text.removeprefix("\ufeff") if first else text
            first = False

    def error(self, what: str, field: str = "", line: int | None = None) -> TraceError:
        """The error `FILE:LINE: FIELD: what`, for the line last read or for `line`; 0: no line."""
        number = self.line if line is None else line
        where = f"{self.path}:{number}" if number else self.path
        return TraceError(f"{where}: {field + ': ' if field else ''}{what}")

    def excess(self, what: str, most: int, line: int | None = None) -> TraceError:
        """The error of `what` that is above a limit of `kvsim.settings.limits`."""
        return self.error(f"{what} above the limit of {most:,}; {limits.REMEDY}", line=line)

    def _count(self, rows: int) -> None:
        """Count rows. Refuses a file of far too many, by the part of it that the first take."""
        self._rows += rows
        # Once, when a block of rows passes the mark.
        if self._rows - rows < _SAMPLE_ROWS <= self._rows:
            size = os.fstat(self._stored.fileno()).st_size  # 0 for a pipe
            taken = self._stored.tell() * self._size
            # Rows per byte of text read, times text per stored byte, times the stored size.
            whole = self._rows * size * self._bytes_read // taken if size else 0
            most = limits.most(limits.ROWS)
            if whole > _FAR * most:
                raise self.excess(f"about {whole:,} rows, by its size, are", most, 0)
            if size and self._file is not self._stored and self._has_more_rows(most):
                # The first part of a gzip file says little about the rest of it.
                raise self.excess("rows", most, 0)

    def _has_more_rows(self, most: int) -> bool:
        """Whether a gzip file has more rows; a damaged one is not judged here."""
        longest = limits.most(limits.LINE_BYTES)
        with _open(self.path) as stored, _unpacked(stored) as text:
            lines = iter(partial(text.readline, longest), b"")
            try:
                return any(True for _ in islice(filterfalse(bytes.isspace, lines), most, None))
            except (OSError, EOFError, zlib.error):
                return False

    def _guarded(self, read: Callable[[], bytes], number: int) -> bytes:
        try:
            return read()
        except EOFError:
            what = "the gzip file ends too early; fetch it again"
        except (gzip.BadGzipFile, zlib.error):
            what = "the gzip file is damaged; fetch it again"
        except OSError as error:
            what = _unreadable(error)
        raise self.error(what, line=number)


def _unpacked(stored: io.BufferedReader) -> io.BufferedReader:
    """What a gzip file holds."""
    return io.BufferedReader(gzip.GzipFile(fileobj=stored), _BLOCK_BYTES)


def _open(path: str) -> io.BufferedReader:
    try:
        return io.BufferedReader(io.FileIO(path), _BLOCK_BYTES)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file; give the path of a trace") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: a folder; give one trace file") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {_unreadable(error)}") from None


def _unreadable(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else error
    return f"cannot be read: {reason}; check the path and the disk"


def parse(source: Source, text: str) -> dict[str, Any]:
    """The JSON object of a line; no NaN, no infinity, no repeated key."""
    plain = _plain(text)
    if plain is not None:
        return plain
    try:
        value, _ = decode(source, text, whole=True)
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at column {error.colno}; write one object a line"
        raise source.error(what) from None
    if not isinstance(value, dict):
        raise source.error(f"a JSON {_kind(value)}, not an object; write one object a line")
    return value


def tables(source: Source) -> Iterator[dict[str, Any]]:
    """The JSON object of each line (`parse`)."""
    return (parse(source, line) for line in source.lines())


def _plain(text: str) -> dict[str, Any] | None:
    """The object, if its quotation marks are those of its keys and texts: then no key is there
    twice, at any depth. None where a closer look is needed."""
    try:
        value, end = _SCAN(text)
    except (ValueError, RecursionError):
        return None
    if type(value) is not dict or end != len(text):
        return None
    # Of the quotation marks that the keys leave, texts must have all: none is within a text or a
    # table.
    marks = text.count('"') - 2 * len(value)
    if marks and marks != 2 * sum(type(each) is str for each in value.values()):
        return None
    return value


def decode(source: Source, text: str, start: int = 0, *, whole: bool = False) -> tuple[Any, int]:
    """A strict JSON value that begins at `start`, and where it ends; `whole`: nothing follows.

    Raises `json.JSONDecodeError` where `text` is not JSON, or not yet, and `TraceError` where it
    is JSON that no file may have.
    """
    try:
        return (_DECODER.decode(text), len(text)) if whole else _DECODER.raw_decode(text, start)
    except RecursionError:
        raise source.error("not JSON: nested too deeply; flatten it") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        what = str(error)
        # Python's own words about `sys.set_int_max_str_digits` help nobody here.
        if "integer string conversion" in what:
            what = "an integer has too many digits"
        raise source.error(f"not strict JSON: {what}; fix the line") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {shown(twice)} is given twice")
    return table


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)[1:-1]} is too large for a number")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_repeats, parse_constant=refuse_constant, parse_float=_finite
)
_SCAN = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_finite).raw_decode


def shown(value: object) -> str:
    """A value for a message: as JSON would write it, on one line, cut at 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _kind(value: object) -> str:
    names = {list: "list", str: "string", bool: "truth value", type(None): "null"}
    return names.get(type(value), "number")


PARQUET = "PAR1"
"""The first four bytes of a Parquet file."""
_KEY = re.compile(r'"([^"\\]+)"\s*:')
_SEPARATORS = ",\t;"


@dataclass(frozen=True, slots=True)
class Head:
    """What a recogniser may look at."""

    text: str
    """The first characters of the file, about 64 Ki at most."""
    keys: Set[str]
    """Keys of the first JSON object; empty if the file does not begin with JSON. If that object
    spans lines or is damaged: all keys in `text`, inner ones too. The value of `schema` is one."""
    columns: tuple[str, ...]
    """Cells of the first line without quotes, if the file does not begin with JSON."""

    @property
    def is_json(self) -> bool:
        """Whether the file begins as JSON does."""
        return self.text.lstrip()[:1] in ("{", "[")

    @property
    def is_parquet(self) -> bool:
        """Whether this is a Parquet file."""
        return self.text.startswith(PARQUET)


def look(source: Source) -> Head:
    """The head of a file, of which nothing is read."""
    text = source.beginning()
    first = next((line for line in text.splitlines() if line.strip()), "")
    if text.lstrip()[:1] in ("{", "["):
        return Head(text, _keys(first, text), ())
    cells = first.split(separator_of(first))
    return Head(text, frozenset(), tuple(cell.strip().strip('"') for cell in cells))


def separator_of(header: str) -> str:
    """What separates the columns: a comma, a tab or a semicolon, whichever comes first."""
    return next((each for each in header if each in _SEPARATORS), ",")


def _keys(first: str, text: str) -> Set[str]:
    try:
        table = json.loads(first)
    except (ValueError, RecursionError):
        return frozenset(_KEY.findall(text))
    if not isinstance(table, dict):
        return frozenset(_KEY.findall(text))
    schema = table.get("schema")
    return {*table, schema} if isinstance(schema, str) else table.keys()


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
            # What ends with the text may go on in the next piece, as 12 in 123.
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
