"""Writes files, whole or not at all; a failure is one line that says why.

```
a temporary folder beside it  ──written in full──► moved into place
                             ──anything fails──► gone, and what was there stays
```
A file behind a symlink is replaced where it is. What is no regular file, such as a device or a
FIFO, is never replaced: what was written in full is copied into it.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import copyfileobj, move, rmtree
from typing import BinaryIO

from kvsim.errors import OutputError

_PREFIX = ".kvsim-"
_SETTLED_S = 1.0
"""From this age on, an unclaimed temporary folder was left by a process that was killed."""


def write_text(path: str | Path, text: str) -> Path:
    """Write one text file, whole or not at all. Raises `OutputError` naming it."""
    return write_bytes(path, encoded(text))


def json_text(record: object) -> str:
    """A record as the text of a JSON file, readable, ended by LF."""
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def encoded(text: str) -> bytes:
    """A text as UTF-8; bytes of a file name that were none are written as `\\udcff`.

    JSON reads that as the name again.
    """
    return text.encode(errors="backslashreplace")


def write_bytes(path: str | Path, content: bytes, inside: Path | None = None) -> Path:
    """Write one file, whole or not at all; `inside` as for `replacing`. Raises `OutputError` naming
    it."""
    with replacing(path, inside) as partial:
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


def write_together(folder: str | Path, texts: Mapping[str, str | bytes]) -> None:
    """Write several files of a folder, by name: all of them or none. Raises `OutputError`."""
    out = Path(folder)
    with temporary_folder(out, out) as partial:
        for name, text in texts.items():
            content = encoded(text) if isinstance(text, str) else text
            (partial / name).write_bytes(content)
        move_all([partial / name for name in texts], out)


def move_all(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Move finished files into a folder, without a stop by a signal in between.

    Raises `OSError` for a place that is taken by what is no regular file.
    """
    moves = [(path, folder / path.name) for path in paths]
    for _, target in moves:
        if _is_special(target):  # A FIFO would wait for a reader, deaf to signals.
            raise OSError(f"{target.name} is no regular file there")
    with _undisturbed():
        for path, target in moves:
            if target.is_symlink():  # Which may lead to another file system.
                move(path, os.path.realpath(target))
            else:
                path.replace(target)
    return [target for _, target in moves]


@contextmanager
def replacing(path: str | Path, inside: Path | None = None) -> Iterator[Path]:
    """A temporary path to write to; on success, the file there replaces `path`, or is copied into
    what is no regular file.

    `inside` is the folder for what is temporary, on the same file system; None: beside the file.
    Raises `OutputError` naming `path`.
    """
    target, real = Path(path), Path(os.path.realpath(path))
    special = _is_special(target)
    beside = Path(tempfile.gettempdir()) if special else real.parent
    with temporary_folder(inside or beside, target) as folder:
        content = folder / "content"
        yield content
        if not special:
            content.replace(real)
            return
        with content.open("rb") as whole, target.open("wb") as taker:
            copyfileobj(whole, taker)


def _is_special(path: Path) -> bool:
    """Whether something other than a regular file is there, such as a device, a FIFO or a link to
    itself.

    So is an open file without a name, which `/dev/stdout` may be.
    """
    real = os.path.realpath(path)
    # Those of `Path` raise an error for names that no file can have.
    there = os.path.exists(path) or os.path.islink(real)  # noqa: PTH110, PTH114
    return there and not os.path.isfile(real)  # noqa: PTH113


@contextmanager
def temporary_folder(inside: Path, target: Path) -> Iterator[Path]:
    """A temporary folder inside `inside`, which is made if need be and, on failure, removed again.

    Raises `OutputError` naming `target` where anything cannot be written.
    """
    made = not inside.exists()
    try:
        inside.mkdir(parents=True, exist_ok=True)
        _remove_stale(inside)
        with tempfile.TemporaryDirectory(
            prefix=_PREFIX, dir=inside, ignore_cleanup_errors=True
        ) as folder:
            claim = _claim(Path(folder))
            try:
                yield Path(folder)
            finally:
                if claim >= 0:
                    os.close(claim)
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


def _remove_stale(inside: Path) -> None:
    """Remove temporary folders whose processes were killed."""
    for folder in inside.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _SETTLED_S and (claim := _claim(folder)) >= 0:
                rmtree(folder, ignore_errors=True)
                os.close(claim)


def _claim(folder: Path) -> int:
    """A descriptor that claims a folder until it is closed or its process ends.

    -1 where another process has the claim, and on systems without such claims.
    """
    if sys.platform == "win32":
        return -1
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that end the process take effect when this is over.

    Masks would not do: a signal that one thread blocks is handled in another one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP.
        if number is not None and (handler := signal.getsignal(number)) is not None:
            before[number] = handler
            signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)
