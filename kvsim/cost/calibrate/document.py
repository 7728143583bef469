"""A profile as a JSON document, keys in a fixed order."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvsim.cost.profile import Profile


def to_json(profile: Profile) -> str:
    """The document; one line per key of `fit`, so that two files can be compared by eye."""
    table: dict[str, Any] = msgspec.to_builtins(profile)
    fit, others = table.pop("fit"), table.pop("others")
    parts = [f"{json.dumps(key)}: {_line(value)}" for key, value in table.items()]
    parts.append(_fit("fit", fit))
    if others:
        inner = ",\n ".join(_fit(size, fit) for size, fit in others.items())
        parts.append(f'"others": {{\n {inner}\n }}')
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _fit(name: str, fit: dict[str, Any]) -> str:
    inner = ",\n  ".join(f"{json.dumps(key)}: {_line(value)}" for key, value in fit.items())
    return f"{json.dumps(name)}: {{\n  {inner}\n }}"


def _line(value: Any) -> str:
    return json.dumps(_shortened(value), ensure_ascii=False)


def _shortened(value: Any) -> Any:
    """The value with whole numbers as integers."""
    if isinstance(value, list | tuple):
        return [_shortened(each) for each in value]
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
