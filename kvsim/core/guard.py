"""Keeps the books closed to policies: nobody but kvsim writes to them, or calls what moves them, or
reads what is private, as the length of an output.

Compiled code reads and writes the fields of compiled classes directly, and never comes here; this
module itself is not compiled. Everybody else does while the books are closed, as in every run with
a policy of an outsider (`kvsim.run.blame`). Where kvsim is not compiled, that slows it down, so
other runs leave them open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

_OURS = tuple(f"{__name__.partition('.')[0]}{each}." for each in ("", "_kernels"))
_MARK = "__of_kvsim__"
"""A name in modules that are known to be ours, because looking for it is faster."""
_caller = sys._getframe

Write = Callable[[Any, Any], Any]
"""Makes of an object and a value for its attribute what is written. Raises what speaks against."""


class ReadOnlyList(Sequence[Any]):
    """A list that the mechanism keeps."""

    __slots__ = ("_list",)

    def __init__(self, kept: Any) -> None:
        self._list = kept

    def __len__(self) -> int:
        return len(self._list)

    def __getitem__(self, place: Any) -> Any:
        return (list(self._list) if isinstance(place, slice) else self._list)[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list)

    def __contains__(self, value: object) -> bool:
        return value in self._list

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self._list))


_SHOWN: dict[type, Callable[[Any], Any]] = {
    set: frozenset,
    dict: MappingProxyType,
}
"""What a policy gets to see of what could be changed in place, if not a `ReadOnlyList`."""


class _Book(NamedTuple):
    """A class of whose objects the mechanism keeps the books."""

    kind: type
    lists: tuple[str, ...]
    closed: tuple[str, ...]
    writes: dict[str, Write]


_books: list[_Book] = []
_before: list[tuple[type, str, Any]] = []
"""(class, name, what it had under this name or None) of all that is closed; empty: open."""


def keep(kind: type, lists: str = "", closed: str = "", **writes: Write) -> None:
    """Declares that the objects of a class are books.

    `lists` names attributes that could be changed in place, which policies see as lists to read;
    `closed` what else is not for them, beside private names; `writes` has the attributes that they
    may set. A policy that is a subclass of such a class sets everything of its own objects.
    """
    _books.append(_Book(kind, tuple(lists.split()), tuple(closed.split()), writes))
    if _before:
        _close(_books[-1])


@contextmanager
def closed() -> Iterator[None]:
    """Closes the books for a while."""
    first = not _before
    if first:
        for book in _books:
            _close(book)
    try:
        yield
    finally:
        while first and _before:
            kind, name, value = _before.pop()
            if value is None:
                delattr(kind, name)
            else:
                setattr(kind, name, value)


def _close(book: _Book) -> None:
    kind, found = book.kind, dict(vars(book.kind))
    # Compiled classes list their fields there, others annotate them.
    fields = found.get("__mypyc_attrs__") or [
        name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())
    ]
    stores: dict[str, Callable[[Any, Any], None]] = {}
    hidden = [name for name in fields if name[0] == "_"] if book.lists or book.closed else []
    for name in {*hidden, *book.lists, *book.closed}:
        read, stores[name] = _access(name, found.get(name) or _inherited(kind, name))
        shown = _private if name in (*hidden, *book.closed) else _shown
        _put(book, name, property(shown(f"{kind.__name__}.{name}", read)))
    before: Any = kind.__setattr__
    _put(book, "__setattr__", _guarded(book, frozenset(fields), stores, before))


def _put(book: _Book, name: str, value: Any) -> None:
    _before.append((book.kind, name, vars(book.kind).get(name)))
    setattr(book.kind, name, value)


def _inherited(kind: type, name: str) -> Any:
    """The descriptor of a compiled class before it; None if the values lie in the objects."""
    before = {(base, known): value for base, known, value in _before}
    found = (before.get((base, name), vars(base).get(name)) for base in kind.__mro__[1:])
    return next((each for each in found if hasattr(each, "__set__")), None)


def _access(name: str, found: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """What reads and sets an attribute of which `found` is in the class."""

    def read(kept: Any) -> Any:
        return kept.__dict__[name]

    def store(kept: Any, value: Any) -> None:
        kept.__dict__[name] = value

    if found is None:
        return read, store
    return found.__get__, getattr(found, "__set__", store)


def _shown(name: str, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get(kept: Any) -> Any:
        value = read(kept)
        if _MARK in _caller(1).f_globals or not _outside(_caller(1)):
            return value
        return _SHOWN.get(type(value), ReadOnlyList)(value)

    return get


def _private(name: str, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get(kept: Any) -> Any:
        if _MARK in _caller(1).f_globals or not _outside(_caller(1)):
            return read(kept)
        raise AttributeError(f"{name} is for kvsim alone: no policy reads or calls it")

    return get


def _guarded(
    book: _Book,
    fields: frozenset[str],
    stores: dict[str, Callable[[Any, Any], None]],
    put: Callable[[Any, str, Any], None],
) -> Callable[[Any, str, Any], None]:
    writes = book.writes

    def set_kept(kept: Any, name: str, value: Any) -> None:
        caller = _caller(1)
        if _MARK not in caller.f_globals and _outside(caller):
            if name in writes:
                value = writes[name](kept, value)
            elif not _own(kept, name, fields, caller):
                raise AttributeError(
                    f"{book.kind.__name__}.{name} is kept by kvsim, and no policy sets it;"
                    " your notes on a request go to request.extra"
                )
        if name in stores:
            stores[name](kept, value)
        else:
            put(kept, name, value)

    return set_kept


def _outside(caller: FrameType) -> bool:
    scope = caller.f_globals
    if str(scope.get("__name__")).startswith(_OURS):
        scope[_MARK] = True
        return False
    return True


def _own(kept: Any, name: str, fields: frozenset[str], caller: FrameType) -> bool:
    """Whether an object of a subclass of an outsider's sets something of its own."""
    kinds = [each for each in type(kept).__mro__[:-1] if not each.__module__.startswith(_OURS)]
    if name not in fields:
        return bool(kinds)
    # A field of kvsim's: only a method of the outsider's class sets it, on its own object.
    code = caller.f_code
    methods = [vars(each).get(code.co_name) for each in kinds]
    return any(getattr(each, "__code__", None) is code for each in methods) and (
        caller.f_locals[code.co_varnames[0]] is kept
    )
