"""The face of a room whose modules are imported only when something of theirs is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def face_of(room: str, **modules: str) -> Callable[[str], Any]:
    """The `__getattr__` of a room: its modules, each with the names that other rooms use."""
    places = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{places[name]}"), name)

    return find
