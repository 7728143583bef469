"""Keeps results under the hash of their inputs, so that no run is repeated.

```
DIR/points/KEY.json    one finished run, written whole or not at all
DIR/points/locks       byte ranges claimed by the processes that are running a point
```
A claim ends with its process, however the process ends.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvsim.errors import ConfigError, OutputError
from kvsim.machine.hardware import hardware_path
from kvsim.results.metrics import METRICS
from kvsim.results.plain import plain
from kvsim.settings.config import RunConfig, to_table
from kvsim.settings.library import find, look_up
from kvsim.settings.parsing import is_flat, parse_json
from kvsim.version import __version__
from kvsim.workload.trace import Trace
from kvsim.writing import encoded, json_text, write_bytes

Record = dict[str, Any]
"""The result of one run: `key`, `kvsim_version`, `config`, `outcome`, `engine`, `time_source`,
`figures`."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Figure = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | float | None

_ALWAYS = {metric.key for metric in METRICS if metric.always} | {"failed"}
"""Figures of every run that was not refused."""
_WHOLE = {metric.key for metric in METRICS if metric.whole} | {"failed"}


class Versioned(Struct, frozen=True):
    """The version of kvsim that wrote a file."""

    kvsim_version: str


class _Outcome(Struct):
    kind: str
    explanation: str = ""


class _Engine(Struct):
    num_gpu_blocks: Count
    num_cpu_blocks: Count
    block_size: Count
    max_num_batched_tokens: Count
    watermark_blocks: Count
    kv_cache_bytes: Count


ENGINE_FACTS = _Engine.__struct_fields__
"""Figures that the engine derives from the settings, kept with every result: those of one replica,
and the bytes of all."""


class _TimeSource(Struct):
    kind: str
    source: str


class _Result(Versioned, frozen=True):
    key: str
    config: dict[str, Any]
    outcome: _Outcome
    figures: dict[str, Figure]
    engine: _Engine | None = None
    time_source: _TimeSource | None = None


def checked_record(record: Any, key: str) -> Record:
    """The record, if it is the whole result of the run with this key. Raises `ValueError`."""
    result = msgspec.convert(record, _Result)
    figures = result.figures
    if result.key != key or not is_flat(record):
        raise ValueError("of another run, or nested too deeply")
    if (result.engine is None) != (result.time_source is None):
        raise ValueError("a part is missing")
    if result.engine is not None and not figures.keys() >= _ALWAYS:
        raise ValueError("figures are missing")
    if any(type(figures.get(name)) is float for name in _WHOLE):
        raise ValueError("a count is not whole")
    return dict(record)


_KEY_CHARACTERS = 32
_CLASSES = ("engine", "block_manager", "victim", "router")
"""Settings that may be `package.module:Class`."""


def address(config: RunConfig, trace: Trace, *, ledger: bool = False) -> str:
    """The key of a run: a digest of its settings, seed, trace, version of kvsim and input files.

    Files that settings name (model, hardware, profile) and modules of the user's own policies count
    by content. `ledger`: whether the figures have those of the ledger. Equal keys mean equal
    results.
    """
    made_of = {
        "kvsim": __version__,
        "trace": [trace.format, trace.sha256],
        "config": plain(_given(config)),
        "files": _files(config),
        "ledger": ledger,
    }
    text = json.dumps(made_of, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_CHARACTERS]


class Store:
    """A folder of finished runs, shared by any number of processes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) / "points"
        """Where the results are."""
        self._scratch: Path | None = None
        self._locks: int | None = None

    def writing_in(self, scratch: Path) -> Store:
        """The same store, which writes what is temporary in a folder of its caller's."""
        store = copy(self)
        store._scratch = scratch
        return store

    def load(self, key: str) -> Record | None:
        """The result of a run; None if there is none or its file is damaged.

        Raises `OutputError` for a file that cannot be read.
        """
        path = self._path(key)
        try:
            return checked_record(parse_json(path.read_bytes()), key)
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise OutputError(f"{path}: cannot be read: {error.strerror}") from None

    def save(self, record: Record) -> None:
        """Store a result, whole or not at all. The caller must hold the claim on its key."""
        write_bytes(self._path(record["key"]), encoded(json_text(record)), self._scratch)

    def fetch(self, key: str, run: Callable[[], Record]) -> Record:
        """The result under `key`; if it is missing, runs it or waits for a process that does."""
        self.claim(key)
        try:
            record = self.load(key)
            if record is None:
                record = run()
                self.save(record)
            return record
        finally:
            self.release(key)

    def claim(self, key: str, *, wait: bool = True) -> bool:
        """Claim a key for this process. False if another process holds it and `wait` is False."""
        return lock(self._lock_file(), _place(key), wait=wait)

    def release(self, key: str) -> None:
        """End a claim."""
        unlock(self._lock_file(), _place(key))

    def make(self) -> None:
        """Make the folder. Raises `OutputError`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{self.folder}: cannot be made: {error.strerror}") from None

    def __getstate__(self) -> tuple[Path, Path | None]:
        return self.folder, self._scratch

    def __setstate__(self, state: tuple[Path, Path | None]) -> None:
        # A descriptor means nothing in the process that unpickles this: it opens its own.
        (self.folder, self._scratch), self._locks = state, None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _lock_file(self) -> int:
        """The one descriptor of the lock file: closing any other would end all claims."""
        if self._locks is None:
            try:
                self._locks = os.open(self.folder / "locks", os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise OutputError(f"{self.folder}: cannot be written: {error.strerror}") from None
        return self._locks


def _place(key: str) -> int:
    """The byte that stands for a key; keys that share a byte only wait for each other."""
    return int(key[:16], 16) % PLACES


def _given(config: RunConfig) -> dict[str, Any]:
    """The settings that differ from the defaults; the version of kvsim stands for the defaults."""
    defaults = to_table(RunConfig())
    return {
        key: value
        for key, value in to_table(config).items()
        if key not in defaults or value != defaults[key]
    }


def _files(config: RunConfig) -> dict[str, str]:
    """Digests of the files that the settings name."""
    named = {"models": config.model_name, "hardware": config.hardware_name}
    if "profile" in config.cost:
        named["profiles"] = str(config.cost["profile"])
    digests = {kind: _digest(_shipped, kind, name) for kind, name in named.items()}
    table = to_table(config)
    classes = {key: table.get(key) for key in _CLASSES} | {"cost": config.cost.get("model")}
    classes |= {**config.block_manager_args, **config.scheduler_args}
    for key, name in classes.items():
        if isinstance(name, str) and ":" in name:
            digests[key] = _digest(_source, key, name)
    return digests


def _shipped(kind: str, name: str) -> bytes:
    path = hardware_path(name) if kind == "hardware" else find(kind, name)
    return path.read_bytes()


def _source(kind: str, name: str) -> bytes:
    look_up(kind, {}, name)
    path = inspect.getsourcefile(sys.modules[name.partition(":")[0]])
    return Path(path).read_bytes() if path else b""


def _digest(read: Callable[[str, str], bytes], kind: str, name: str) -> str:
    """The digest of a file's content; empty if there is none, which the run itself refuses."""
    try:
        return hashlib.sha256(read(kind, name)).hexdigest()
    except (ConfigError, OSError, TypeError):
        return ""


if sys.platform == "win32":
    import msvcrt
    import os
    import time

    PLACES = 1 << 31
    """How many bytes can be locked, counted from the first; `msvcrt` takes no place beyond."""
    _POLL_S = 0.05

    def lock(file: int, place: int, *, wait: bool) -> bool:
        """Lock byte `place` of an open file; False if another holds it and `wait` is False."""
        while not _locked(file, place):
            if not wait:
                return False
            time.sleep(_POLL_S)
        return True

    def unlock(file: int, place: int) -> None:
        """End the lock on byte `place`."""
        os.lseek(file, place, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)

    def _locked(file: int, place: int) -> bool:
        os.lseek(file, place, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

else:
    import fcntl

    PLACES = 1 << 60
    """How many bytes can be locked, counted from the first."""

    def lock(file: int, place: int, *, wait: bool) -> bool:
        """Lock byte `place` of an open file; False if another holds it and `wait` is False."""
        how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.lockf(file, how, 1, place)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        return True

    def unlock(file: int, place: int) -> None:
        """End the lock on byte `place`."""
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)
