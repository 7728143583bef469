"""Adds floats so that every version of Python comes to the same."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import TypeVar, cast

N = TypeVar("N")


def added(values: Iterable[N]) -> N:
    """The sum of numbers or arrays, added one after another.

    `sum` compensates for lost digits of floats from Python 3.12 on; `math.fsum` takes no infinities
    of both signs, and nothing that overflows on the way.
    """
    return reduce(add, values, cast(N, 0))
