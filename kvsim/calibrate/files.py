"""Writes a profile: one JSON document, keys in a fixed order, all of it or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from kvsim.cost.profile import Profile


def save_profile(profile: Profile, path: Path) -> None:
    """Write `profile`; one line per key of `fit`, so that two files can be compared by eye.

    Raises `OSError`; a file that was there stays as it was until the new one is complete.
    """
    table: dict[str, Any] = msgspec.to_builtins(profile)
    fit = table.pop("fit")
    parts = [f"{json.dumps(key)}: {_line(value)}" for key, value in table.items()]
    inner = ",\n  ".join(f"{json.dumps(key)}: {_line(value)}" for key, value in fit.items())
    parts.append(f'"fit": {{\n  {inner}\n }}')
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text("{\n " + ",\n ".join(parts) + "\n}\n", encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _line(value: Any) -> str:
    return json.dumps(_shortened(value), ensure_ascii=False)


def _shortened(value: Any) -> Any:
    """Whole numbers without a fraction."""
    if isinstance(value, list | tuple):
        return [_shortened(each) for each in value]
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
