"""The TOML file of several replicas, whose settings may differ.

```toml
model = "llama-3-8b"         # settings of all replicas
router = "dynamo-kv"

[router_args]
kv_event_delay_ms = 2

[[replicas]]                 # three of one kind
count = 3
hardware = "h100-sxm"

[[replicas]]                 # and one of another
hardware = "a100-sxm-80gb"
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from msgspec import Struct

from kvsim.config import Positive, RunConfig, merged
from kvsim.errors import ConfigError
from kvsim.library import converted


class FleetTable(Struct, frozen=True):
    """What a file says of a fleet, beside settings of runs."""

    replicas: Positive | list[dict[str, Any]] | None = None
    """How many equal ones, or the settings of each kind."""
    router: str | None = None
    router_args: dict[str, Any] = {}


class _Kind(Struct, frozen=True):
    count: Positive = 1


def read_fleet(table: Mapping[str, Any], where: str) -> tuple[FleetTable, dict[str, Any]]:
    """Returns what a file's table says of a fleet, and the settings that all replicas share. Raises
    `ConfigError`."""
    shared = {key: table[key] for key in table if key not in FleetTable.__struct_fields__}
    return converted(table, FleetTable, where), shared


def each_kind(
    kinds: list[dict[str, Any]], shared: Mapping[str, Any], where: str
) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Iterates over kinds of replicas: how many there are, their settings, and where these stand.

    Raises `ConfigError` if a kind says how requests are sent, since they are sent to all.
    """
    load = _load_settings()
    for number, kind in enumerate(kinds):
        place = f"{where}: replicas[{number}]"
        count = converted(kind, _Kind, place).count
        own = {key: value for key, value in kind.items() if key != "count"}
        for key in own:
            if key in load:
                raise ConfigError(
                    f"{place}: {key} is for all replicas; write it above [[replicas]]"
                )
        yield count, merged(shared, own), place


def _load_settings() -> set[str]:
    """The settings that say how requests are sent."""
    hints = get_type_hints(RunConfig, include_extras=True)
    return {
        key
        for key in RunConfig.__struct_fields__
        for meta in hints[key].__metadata__
        if meta.extra is not None and meta.extra["panel"] == "Load"
    }
