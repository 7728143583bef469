"""Compiled modules where they are installed, their sources otherwise: equal results, other speed.

`kvsim/core/hook.py` compiles modules while kvsim is installed. What it makes lies in a folder of
its own among the installed packages, `kvsim_compiled`, also for a checkout. So nothing compiled
hides a source by itself: the finder below hands out compiled modules, and only while the source of
each of them is the one that was compiled. After an edit all sources run, as compiled modules go
together.
"""

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import find_spec, source_hash, spec_from_file_location

VARIABLE = "KVSIM_INTERPRETED"
"""Set in the environment: the sources run, whatever is installed."""

FOLDER = "kvsim_compiled"
SOURCES = "sources.txt"
"""In that folder: a line for each compiled module, the hash of its source and its name."""

_ROOT = __file__.rsplit(os.sep, 3)[0]


class _Finder:
    """Finds compiled modules."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        """Module → what it was compiled to."""
        self.lack = "kvsim was imported without its finder"
        """Why no compiled modules run; empty if they do."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The compiled module of this name, if there is one."""
        file = self.files.get(name)
        return spec_from_file_location(name, file) if file else None


_FINDER = _Finder()


def find_compiled_first() -> None:
    """Lets compiled modules be imported instead of their sources. To be called before either is."""
    vectors = _has_vectors()
    if not vectors:
        import kvsim.core.vecs

        sys.modules["librt.vecs"] = kvsim.core.vecs
    _FINDER.files, _FINDER.lack = _usable() if vectors else ({}, "there is no librt.vecs")
    if _FINDER.files:
        sys.meta_path.insert(0, _FINDER)


def way() -> str:
    """How the core runs: `compiled` or `interpreted`."""
    return "interpreted" if _FINDER.lack else "compiled"


def explanation() -> str:
    """`way()`, and why it is not `compiled`."""
    return f"{way()}: {_FINDER.lack}" if _FINDER.lack else way()


def _has_vectors() -> bool:
    try:
        return find_spec("librt.vecs") is not None
    except ModuleNotFoundError:
        return False


def _usable() -> tuple[dict[str, str], str]:
    """The compiled modules, or why there are none to use."""
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return {}, f"{VARIABLE} is set"
    found = find_spec(FOLDER)
    folder = next(iter((found and found.submodule_search_locations) or ()), "")
    files = {}
    for line in _read(f"{folder}/{SOURCES}").decode().splitlines():
        digest, name = line.split()
        place = name.replace(".", "/")
        if source_hash(_read(f"{_ROOT}/{place}.py")).hex() != digest:
            return {}, f"{place}.py is not what was compiled; `pip install -e .` compiles it"
        files[name] = f"{folder}/{place}{EXTENSION_SUFFIXES[0]}"
    return files, "" if files else "nothing compiled is installed"


def _read(path: str) -> bytes:
    """What the file holds; nothing if there is none."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""
