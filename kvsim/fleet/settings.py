"""Settings of a fleet: those that all replicas share, their number, and their router."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from msgspec import Struct, field

from kvsim.errors import ConfigError
from kvsim.settings.config import Positive, RunConfig, about, make_config, merged
from kvsim.settings.library import converted
from kvsim.settings.limits import REPLICAS, check_size


class FleetConfig(RunConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of equal replicas behind a router."""

    replicas: Positive
    router: str = "round-robin"
    """A name of `kvsim.fleet.routers.ROUTERS` or `package.module:Class`."""
    router_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor."""


RANKS_ROUTER = "vllm-dp"
"""Who sends the data-parallel ranks of one engine their requests, unless a user names another."""

KEYS = tuple(key for key in FleetConfig.__struct_fields__ if key not in RunConfig.__struct_fields__)
"""What a fleet has beyond the settings of a run."""


def parted(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a table says of a fleet, and the settings of runs in it."""
    said = {key: table[key] for key in KEYS if key in table}
    return said, {key: value for key, value in table.items() if key not in KEYS}


def make_settings(table: Mapping[str, Any], where: str = "configuration") -> RunConfig:
    """The settings of a run, or of a fleet if the table says anything about one.

    Raises `ConfigError` that names the key.
    """
    if table.keys().isdisjoint(KEYS):
        return make_config(table, where)
    return make_config({"replicas": 1, **table}, where, FleetConfig)


@cache
def load_settings() -> frozenset[str]:
    """Returns the names of the settings that say how requests are sent."""
    return frozenset(key for key, said in about().items() if said.panel == "Load")


class _Kind(Struct, frozen=True):
    count: Positive = 1


def each_kind(
    kinds: Iterable[Any], shared: Mapping[str, Any], where: str
) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Iterates over kinds of replicas: how many there are, their settings, and where these stand.

    In a TOML file, each is a table `[[replicas]]` below the settings of all, with its own settings
    and, if there are several, their `count`.

    Raises `ConfigError` if a kind says how requests are sent, since they are sent to all.
    """
    load, replicas = load_settings(), 0
    for number, kind in enumerate(kinds):
        place = f"{where}: replicas[{number}]"
        if not isinstance(kind, dict):
            raise ConfigError(f"{place}: expected a table of settings, got {kind!r}")
        count = converted(kind, _Kind, place).count
        replicas += count
        check_size(f"{place}: replicas", replicas, REPLICAS)
        own = {key: value for key, value in kind.items() if key != "count"}
        for key in own:
            if key in load:
                raise ConfigError(
                    f"{place}: {key} is for all replicas; write it above [[replicas]]"
                )
        yield count, merged(shared, own), place
