"""Turns values into plain values that JSON can hold without loss of meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """The value as plain dicts, lists, texts and numbers; infinities as the text `inf` or `-inf`.

    Raises `AssertionError` for NaN: an undefined figure is None.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        assert not math.isnan(value), "an undefined figure must be None"
        return str(value)
    return str(value) if isinstance(value, PurePath) else value
