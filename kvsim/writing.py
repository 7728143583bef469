"""Writes files, whole or not at all; a failure is one line that says why.

```
a temporary folder beside it  ──written in full──► moved into place
                             ──anything fails──► gone, and what was there stays
```
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvsim.errors import OutputError


def write_text(path: str | Path, text: str) -> Path:
    """Write one text file, whole or not at all. Raises `OutputError` naming it."""
    return write_bytes(path, encoded(text))


def encoded(text: str) -> bytes:
    """A text as UTF-8; bytes of a file name that were none are written as `\\udcff`.

    JSON reads that as the name again.
    """
    return text.encode(errors="backslashreplace")


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write one file, whole or not at all. Raises `OutputError` naming it."""
    with replacing(path) as partial:
        partial.write_bytes(content)
    return Path(path)


def write_lines(path: str | Path, lines: Iterable[str]) -> Path:
    """Write lines, each ended by LF, through `replacing_stream`."""
    with replacing_stream(path) as file:
        file.writelines(f"{line}\n".encode() for line in lines)
    return Path(path)


@contextmanager
def replacing_stream(path: str | Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """A stream of bytes that replaces the file `path` on success; gzipped if `path` ends in `.gz`.

    Gzipped files hold no time. Raises `OutputError` naming `path`.
    """
    with replacing(path) as partial, partial.open("wb") as plain:
        if not str(path).endswith(".gz"):
            yield plain
        else:
            with gzip.GzipFile("", "wb", compresslevel=6, fileobj=plain, mtime=0) as packed:
                yield packed


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to; on success, the file there replaces `path`.

    Raises `OutputError` naming `path`.
    """
    target = Path(path)
    with temporary_folder(target.parent, target) as folder:
        yield folder / "content"
        (folder / "content").replace(target)


@contextmanager
def temporary_folder(inside: Path, target: Path) -> Iterator[Path]:
    """A temporary folder inside `inside`, which is made if need be and, on failure, removed again.

    Raises `OutputError` naming `target` where anything cannot be written.
    """
    made = not inside.exists()
    try:
        inside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".kvsim-", dir=inside) as folder:
            yield Path(folder)
    except BaseException as error:
        if made:
            with suppress(OSError):
                inside.rmdir()
        if not isinstance(error, OSError):
            raise
        reason = (error.strerror or str(error)).splitlines()[0]
        raise OutputError(
            f"{target}: cannot be written: {reason}; free some space or choose another place"
        ) from None
