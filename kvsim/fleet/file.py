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
from typing import Any

from msgspec import Struct

from kvsim.config import Positive, merged
from kvsim.errors import ConfigError
from kvsim.fleet.settings import load_settings
from kvsim.library import converted
from kvsim.limits import REPLICAS, check_size


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
    load, replicas = load_settings(), 0
    for number, kind in enumerate(kinds):
        place = f"{where}: replicas[{number}]"
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
