"""Spoils files, reproducibly: values of other kinds, absurd numbers, missing and repeated parts."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable

STRANGE = (
    *(b"", b"-1", b"0", b"-0.0", b"1e400", b"1e18", b"NaN", b"inf", b"null", b"true", b"[]", b"{}"),
    *(b'"', b'"x"', b"'", b",", b":", b"=", b"]", b"}", b"\\", b"# ", b"[x]\n", b"\n", b"\r\n"),
    *(b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1f\x8b", "é\u2028ß".encode()),
    *(b'"\\ud800"', b"[" * 2000, b"9" * 400, b"1" * 5000, b"../../x", b"%s{0}$HOME"),
    b"<script>alert(1)</script>",
)
NUMBERS = (
    *(b"-1", b"0", b"1", b"2", b"3.5", b"1e-300", b"1e300", b"-2.5", b"7e3", b"1e9999", b"00"),
    *(b"1048576", b"16777215", b"16777216", b"2147483648", b"4294967296", b"9007199254740993"),
    *(b"9223372036854775807", b"18446744073709551616", b"9" * 60, b'"5"', b"null", b"0x10", b"5_0"),
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_][A-Za-z_0-9]+")


def spoil(data: bytes, rng: random.Random) -> bytes:
    """The same with one to four faults; some of them leave a file that is sound."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(_FAULTS)(data, rng)
    return data


def _number(data: bytes, rng: random.Random) -> bytes:
    return _replaced(data, rng, _NUMBER, rng.choice(NUMBERS))


def _word(data: bytes, rng: random.Random) -> bytes:
    """One word becomes another one of the file."""
    words = _WORD.findall(data)
    return _replaced(data, rng, _WORD, rng.choice(words) if words else b"x")


def _replaced(data: bytes, rng: random.Random, what: re.Pattern[bytes], new: bytes) -> bytes:
    found = list(what.finditer(data))
    if not found:
        return data + new
    place = rng.choice(found)
    return data[: place.start()] + new + data[place.end() :]


def _stretch(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data) + 1), rng.choice((0, 1, 2, 5, 40))
    return data[:start] + rng.choice(STRANGE) + data[start + length :]


def _bit(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\n")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _lines(data: bytes, rng: random.Random) -> bytes:
    """One line is dropped, repeated, moved, or put in the place of another."""
    lines = data.splitlines(keepends=True) or [b"\n"]
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[place]
        case 1:
            lines.insert(other, lines[place])
        case 2:
            lines.insert(other, lines.pop(place))
        case _:
            lines[place] = lines[other]
    return b"".join(lines)


def _packed(data: bytes, rng: random.Random) -> bytes:
    return gzip.compress(data, 1, mtime=0)


_FAULTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_number, _number, _number, _number, _word, _word, _stretch, _stretch, _stretch),
    *(_bit, _cut, _lines, _lines, _packed),
)
"""As often as they go deep."""
