"""The kinds of replicas in a TOML file, whose settings differ.

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

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from kvsim.errors import ConfigError
from kvsim.fleet.settings import load_settings
from kvsim.settings.config import Positive, merged
from kvsim.settings.library import converted
from kvsim.settings.limits import REPLICAS, check_size


class _Kind(Struct, frozen=True):
    count: Positive = 1


def each_kind(
    kinds: Iterable[Any], shared: Mapping[str, Any], where: str
) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Iterates over kinds of replicas: how many there are, their settings, and where these stand.

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
