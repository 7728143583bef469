"""Vectors of 64-bit integers and of floats, and sums that are the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Final, TypeVar, cast

from librt.vecs import append, extend, vec
from mypy_extensions import i64

N = TypeVar("N")

EMPTY: Final = vec[i64]()


def zeros(count: i64) -> vec[i64]:
    """Returns a vector of so many zeros."""
    return vec[i64]([0] * count)


def longer(vector: vec[i64], count: i64) -> vec[i64]:
    """Returns a vector with so many zeros behind it."""
    # Most often by one: no vector of zeros is made for that.
    return append(vector, 0) if count == 1 else extend(vector, zeros(count))


def numbers(values: list[int]) -> vec[i64]:
    """Returns a vector of these numbers."""
    return vec[i64](values)


def floats(values: Sequence[float]) -> vec[float]:
    """Returns a vector of these numbers, as floats."""
    return vec[float]([float(value) for value in values])


def added(values: Iterable[N]) -> N:
    """The sum of numbers or arrays, added one after another.

    `sum` compensates for lost digits of floats from Python 3.12 on; `math.fsum` takes no infinities
    of both signs, and nothing that overflows on the way.
    """
    return reduce(add, values, cast(N, 0))
