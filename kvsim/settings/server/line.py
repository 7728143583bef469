"""Writes a server's command line: one that was given, or one made from settings, with changes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from kvsim.settings.config import RunConfig, to_table
from kvsim.settings.server.arguments import Argument, Used, spelled
from kvsim.settings.server.values import switch
from kvsim.settings.server.vllm_arguments import VLLM


def serve_line(arguments: Iterable[Argument], changes: Mapping[str, Any]) -> str:
    """`vllm serve MODEL --flag value ...`, quoted for a shell.

    The arguments keep their order and their values, except those that say what `changes` says
    otherwise. `changes`: keys and values of `RunConfig` for which the server has an argument.
    """
    kept = {each.name: each.value for each in arguments if _key(each.name) not in changes}
    kept |= {_NAMES[key]: value for key, value in changes.items()}
    model = kept.pop("model", None) or kept.pop("model_tag", None)
    return shlex.join([*VLLM.program.split(), *([str(model)] if model else []), *flags(kept)])


def flags(values: Mapping[str, Any]) -> list[str]:
    """Names and values as words of a command line."""
    return [word for name, value in values.items() for word in _words(name, value)]


def given_settings(config: RunConfig, source: str) -> dict[str, Any]:
    """The settings that differ from kvsim's defaults and for which the server has an argument.

    A model that is shipped under a short name gets the name under which it is published, which
    `source` says: where its geometry comes from, as in `Model.source`.
    """
    usual = to_table(RunConfig())
    given = {
        key: value
        for key, value in to_table(config).items()
        if key in _NAMES and value is not None and value != usual[key]
    }
    published = re.search(r"config\.json of (\S+/\S+)", source)
    short = "/" not in config.model_name
    given["model"] = published[1] if published and short else config.model_name
    return given


def _key(name: str) -> str | None:
    """The setting that an argument is."""
    effect = VLLM.flags[name].effect if name in VLLM.flags else None
    return effect.key if isinstance(effect, Used) else None


def _words(name: str, value: Any) -> list[str]:
    flag = VLLM.flags.get(name)
    if flag is not None and flag.takes == "nothing":
        value = switch(value)
    if isinstance(value, bool):
        return [spelled(name if value else f"no_{name}")]
    if isinstance(value, Mapping):
        return [spelled(name), json.dumps(value)]
    if isinstance(value, list):
        return [spelled(name), *map(str, value)]
    return [spelled(name), str(value)]


_NAMES = {key: name for name in reversed(list(VLLM.flags)) if (key := _key(name)) is not None}
"""Setting → argument; the first where several have the same meaning."""
