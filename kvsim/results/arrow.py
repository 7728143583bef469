"""Arrow arrays made from buffers, because `pyarrow.array` imports pandas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def texts(column: Iterable[Any]) -> pa.Array:
    """Texts, none of them null."""
    import pyarrow as pa

    written = [*map(str, column)]
    joined = "".join(written)
    parts = written if joined.isascii() else [text.encode() for text in written]
    ends = np.cumsum([0, *map(len, parts)])
    assert ends[-1] < 1 << 31, "a column of texts holds at most 2 GiB"
    buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(joined.encode())]
    return pa.Array.from_buffers(pa.string(), len(parts), buffers)


def numbers(values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """Integers or floats of 64 bits; null where `missing`."""
    import pyarrow as pa

    kind = pa.int64() if values.dtype == np.int64 else pa.float64()
    known = _bits(~missing) if missing is not None and missing.any() else None
    buffers = [known, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def optional(values: Sequence[float | None], *, whole: bool) -> pa.Array:
    """Integers, if `whole`, or floats; None is null."""
    known = [0 if value is None else value for value in values]
    missing = np.array([value is None for value in values], dtype=bool)
    return numbers(np.array(known, dtype=np.int64 if whole else np.float64), missing)


def truths(values: Sequence[bool]) -> pa.Array:
    """Booleans."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(np.array(values, bool))])


def _bits(values: NDArray[np.bool_]) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(values, bitorder="little"))
