"""How a session is served: what is said beside the settings of its engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from kvsim.against.serve.kv_events import KVEventsConfig
from kvsim.errors import ConfigError
from kvsim.settings.server.arguments import Argument


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a server."""

    speed: float = 1.0
    """Simulated seconds in a second of the wall clock; infinite: as fast as possible."""
    hold: int = 0
    """The time stands still until so many requests have come."""
    mean_output_tokens: float = 256.0
    """Of answers that no client made as long as `max_tokens`."""
    stream_interval: int = 1
    """Tokens from one event of a stream to the next, after the first."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The path of each, by the name with which clients ask for it."""
    kv_events: KVEventsConfig | None = None

    @property
    def virtual(self) -> bool:
        """Whether nobody waits for the wall clock."""
        return self.speed == inf


class Said(msgspec.Struct):
    """What the command line of a real server says of its front."""

    model: str | None = None
    served_model_name: list[str] | str | None = None
    host: str | None = None
    port: int | None = None
    stream_interval: int | None = None
    lora_modules: list[str] = []
    kv_events_config: dict[str, Any] | str | None = None

    @property
    def name(self) -> str | None:
        """The name by which clients ask for the model."""
        names = self.served_model_name
        return (names if isinstance(names, str) else names and names[0]) or self.model


def said_in(arguments: Iterable[Argument]) -> Said:
    """Raises `ConfigError`."""
    given = {each.name: each.value for each in arguments}
    try:
        return msgspec.convert(given, Said, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"vllm serve: {error}; give it as the real server takes it") from None


def adapters_of(modules: Sequence[str]) -> dict[str, str]:
    """The path of each adapter by its name, of `name=path` or JSON. Raises `ConfigError`."""
    found: dict[str, str] = {}
    for each in modules:
        try:
            given = json.loads(each) if each[:1] == "{" else {}
            name, path = (given["name"], given["path"]) if given else each.split("=", 1)
        except (ValueError, KeyError):
            raise ConfigError(
                f"--lora-modules: {each!r} is not name=path, or JSON of both"
            ) from None
        found[str(name)] = str(path)
    return found
