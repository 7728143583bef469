"""What the core uses of `librt.vecs`, in Python, for where that cannot be had.

A vector that was given to a function of this module is spent: only what the function returns may be
used from then on. (In librt, too, both may share their items.)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from mypy_extensions import i16, i32, i64, u8


class vec(array):  # type: ignore[type-arg]  # noqa: N801
    """A vector of numbers; `vec[i64]` is the class of those of 64 bits."""

    __slots__ = ()

    def __class_getitem__(cls, item: type) -> type[vec]:
        if item not in _KINDS:
            raise TypeError(f"vectors of {item.__name__} take librt.vecs")
        return _KINDS[item]


def _kind(item: type, code: str) -> type[vec]:
    def make(cls: type[vec], items: Iterable[Any] = (), /, *, capacity: int = 0) -> vec:
        return array.__new__(cls, code, items)

    return type(f"vec[{item.__name__}]", (vec,), {"__slots__": (), "__new__": make})


_KINDS = {
    item: _kind(item, code)
    for item, code in {i64: "q", i32: "i", i16: "h", u8: "B", float: "d"}.items()
}


def append(v: Any, o: Any, /) -> Any:
    """`v` with `o` at its end."""
    return extend(v, (o,))


def extend(v: Any, o: Iterable[Any], /) -> Any:
    """`v` with the items of `o` at its end."""
    v = v or v[:0]  # An empty one may be a constant that many begin with.
    v.extend(array(v.typecode, o))
    return v


def remove(v: Any, o: Any, /) -> Any:
    """`v` without the first item that equals `o`. Raises `ValueError` if there is none."""
    v.remove(o)
    return v


def pop(v: Any, i: int = -1, /) -> tuple[Any, Any]:
    """`v` without its item at `i`, and that item. Raises `IndexError` if there is none."""
    return v, v.pop(i)
