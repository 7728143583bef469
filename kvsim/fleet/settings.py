"""Settings of a fleet: those that all replicas share, their number, and their router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from msgspec import field

from kvsim.config import Positive, RunConfig, make_config


class FleetConfig(RunConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of equal replicas behind a router."""

    replicas: Positive
    router: str = "round-robin"
    """A name of `kvsim.routers.ROUTERS` or `package.module:Class`."""
    router_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor."""


KEYS = ("replicas", "router", "router_args")
"""What a fleet has beyond the settings of a run."""


def make_settings(table: Mapping[str, Any], where: str = "configuration") -> RunConfig:
    """The settings of a run, or of a fleet if the table says anything about one.

    Raises `ConfigError` that names the key.
    """
    if table.keys().isdisjoint(KEYS):
        return make_config(table, where)
    return make_config({"replicas": 1, **table}, where, FleetConfig)


def load_settings() -> set[str]:
    """Returns the names of the settings that say how requests are sent."""
    hints = get_type_hints(RunConfig, include_extras=True)
    return {
        key
        for key in RunConfig.__struct_fields__
        for meta in hints[key].__metadata__
        if meta.extra is not None and meta.extra["panel"] == "Load"
    }
