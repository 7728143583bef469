"""Writes a trace file whole or not at all."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvsim.errors import OutputError


def write_lines(path: str, lines: Iterable[str]) -> None:
    """Write `lines` to `path`, each ended by LF; gzipped (without a time) if it ends in `.gz`.

    Written beside the target first, then moved into place. Raises `OutputError` naming the path.
    """
    target = Path(path)
    try:
        handle, partial = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            if target.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
                    packed.writelines(f"{line}\n".encode() for line in lines)
            else:
                file.writelines(f"{line}\n".encode() for line in lines)
        _share(partial)
        Path(partial).replace(target)
    except BaseException as error:
        with suppress(FileNotFoundError):
            Path(partial).unlink()
        if isinstance(error, OSError):
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
        raise


def _share(path: str) -> None:
    """Give a temporary file, made for its owner only, the rights of an ordinary new file."""
    mask = os.umask(0)
    os.umask(mask)
    Path(path).chmod(0o666 & ~mask)
