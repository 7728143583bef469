"""A file is read as clean lines, however it is stored."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from kvsim.workload.source import Source, shown

TEXT = '{"a":1}\n\n{"b":"ü"}\n'.encode()


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(TEXT, id="plain"),
        pytest.param(TEXT.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(TEXT.rstrip(b"\n"), id="no last line end"),
        pytest.param(b"\xef\xbb\xbf" + TEXT, id="byte-order mark"),
        pytest.param(gzip.compress(TEXT), id="gzip"),
        pytest.param(gzip.compress(TEXT[:9]) + gzip.compress(TEXT[9:]), id="gzip of two members"),
    ],
)
def test_lines_are_the_same_however_they_are_stored(stored: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(stored)
    with Source(str(path)) as source:
        seen = [(source.line, line) for line in source.lines()]
    assert seen == [(1, '{"a":1}'), (3, '{"b":"ü"}')]


def test_lines_are_the_same_whatever_blocks_they_are_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    for ending in ("", "\n"):
        path.write_text(f"\ufeffab\n\n  \n{'c' * 40}\r\nd{ending}", encoding="utf-8")
        for size in range(4, 60):
            monkeypatch.setattr("kvsim.workload.source._BLOCK_BYTES", size)
            with Source(str(path)) as source:
                seen = [(source.line, line) for line in source.lines()]
            assert seen == [(1, "ab"), (4, "c" * 40), (5, "d")]
            assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_digest_covers_the_uncompressed_bytes(tmp_path: Path) -> None:
    for number, stored in enumerate((TEXT, gzip.compress(TEXT))):
        path = tmp_path / str(number)
        path.write_bytes(stored)
        with Source(str(path)) as source:
            list(source.lines())
            assert source.sha256 == hashlib.sha256(TEXT).hexdigest()


@pytest.mark.parametrize("stored", [TEXT, b"\xef\xbb\xbf" + TEXT, gzip.compress(TEXT, mtime=0)])
def test_looking_ahead_loses_nothing(stored: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(stored)
    for _ in range(2):
        with Source(str(path)) as source:
            assert source.beginning() == TEXT.decode() == source.beginning()
            assert source.line == 0
            assert len(list(source.lines())) == 2
        with Source(str(path)) as source:
            assert source.beginning() and "".join(source.texts()) == TEXT.decode()


def test_values_are_shown_on_one_short_line() -> None:
    assert shown("a\nb") == '"a\\nb"'
    assert shown([1, None, True]) == "[1, null, true]"
    assert len(shown("x" * 1000)) == 40
