"""Plain values: what JSON can hold without loss of meaning, flat tables, TOML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

_PLAIN = frozenset({str, int, bool, type(None)})
"""Types of most values, which are plain already."""


def plain(value: Any) -> Any:
    """The value as plain dicts, lists, texts and numbers; infinities as the text `inf` or `-inf`.

    Raises `AssertionError` for NaN: an undefined figure is None.
    """
    if type(value) in _PLAIN:
        return value
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


def numeric(value: Any) -> Any:
    """Settings that `plain` made, as settings again: the texts `inf` and `-inf` are numbers."""
    if isinstance(value, Mapping):
        return {key: numeric(inner) for key, inner in value.items()}
    return float(value) if value in ("inf", "-inf") else value


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """The text of a configuration file; keys without a value stand for defaults and are left out.

    An infinite number, which a summary keeps as the text `inf`, becomes a number again.
    """
    lines = [f"[{name}]"] if name else []
    inner = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner.append(to_toml(value, f"{name}.{key}" if name else key) if value else "")
        elif value is not None:
            lines.append(f"{key} = {_literal(value)}")
    return "\n\n".join(part for part in ("\n".join(lines), *inner) if part)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_literal(inner) for inner in value)}]"
    if value in ("inf", "-inf"):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
