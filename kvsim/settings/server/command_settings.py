"""The settings that a server's command line says, or the record of its run, a `meta.json`:

```
{"model": "Qwen/Qwen3-32B", "vllm_version": "0.19.0",
 "engine_kwargs": {"tensor_parallel_size": 2, "data_parallel_size": 1, ...},
 "kv_cache": {"num_gpu_blocks": 2588, "block_size": 16, ...},      where the engine was asked
 "hardware": {"device_name": "NVIDIA GeForce RTX 4090", ...}}
```
Source: `bench/core/recorder.py` and `runner.py` of github.com/casys-kaist/LLMServingSim. The blocks
are those of all data-parallel ranks together (vLLM 0.33.0 `v1/engine/core_client.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.settings.parsing import parse_json
from kvsim.settings.server.arguments import (
    ENGINES,
    Argument,
    Meaning,
    generation,
    interpret,
    leave_unused,
    notes,
)
from kvsim.settings.server.command import parse
from kvsim.settings.server.files import read_text
from kvsim.settings.server.script import ServerCommand, commands, server_command
from kvsim.settings.server.sglang_arguments import SGLANG, complete, sglang_differs
from kvsim.settings.server.vllm_arguments import VLLM

_NAMED = (
    r"(?:^|[\s/])vllm\s|vllm\.entrypoints|vllm-openai|api_server\.py"
    r"|sglang\.launch_server|(?:^|[\s/])sglang\s+serve"
)
"""What a text has that names its server."""


def settings_of_text(text: str) -> tuple[Meaning, list[str]]:
    """What a command line says, and notes for people; `vllm serve` may be left out.

    One of `sglang.launch_server` is SGLang's.

    Raises `ConfigError` for an unknown flag, and for one that cannot be simulated.
    """
    return _settings(_command(text), "--vllm", None)


def settings_of_file(path: str) -> tuple[Meaning, list[str]]:
    """What the command line in a script says, or what a record says of its engine; and notes."""
    text = read_text(path)
    record = read_record(text, path)
    if record is None:
        return _settings(server_command(text, path), path, Path(path).parent)
    meaning = _vllm(record.arguments, record.version, None, f"{path}: vllm_version", path)
    if record.hardware is not None:
        meaning.set("hardware", record.hardware, f"{path}: hardware.device_name")
    return meaning, notes(meaning, path)


def arguments(vllm: str | None, vllm_file: str | None) -> list[Argument]:
    """The arguments of a command line, or of the one in a file; empty without either.

    Raises `ConfigError` as the settings do.
    """
    if vllm is not None:
        return _parsed(_command(vllm), "--vllm", None)
    if vllm_file is None:
        return []
    text = read_text(vllm_file)
    record = read_record(text, vllm_file)
    if record is not None:
        return record.arguments
    return _parsed(server_command(text, vllm_file), vllm_file, Path(vllm_file).parent)


def _parsed(command: ServerCommand, where: str, folder: Path | None) -> list[Argument]:
    table = SGLANG if command.server == "sglang" else VLLM
    return parse(command.arguments, table, where, folder)


def _command(text: str) -> ServerCommand:
    where = "--vllm"
    if re.search(_NAMED, text):
        return server_command(text, where)
    found = list(commands(text, where))
    if len(found) != 1:
        raise ConfigError(f"{where}: not one command; give one, as in {where} 'vllm serve MODEL'")
    words = found[0].words
    words = words[1:] if words[0] == "serve" else words
    return ServerCommand(words, None, found[0].variables)


def _settings(command: ServerCommand, where: str, folder: Path | None) -> tuple[Meaning, list[str]]:
    given = _parsed(command, where, folder)
    if command.server == "sglang":
        meaning = interpret(given, SGLANG)
        complete(meaning, command.variables, where)
        meaning.set("engine", "sglang", where)
        return meaning, [*notes(meaning, where), *sglang_differs(command.version, where)]
    wish = command.variables.get("VLLM_USE_V1")
    meaning = _vllm(given, command.version, wish, f"{where}: the image", where)
    return meaning, notes(meaning, where)


def _vllm(
    given: list[Argument], version: str | None, use_v1: str | None, said: str, where: str
) -> Meaning:
    """What arguments of vLLM mean. `use_v1`: the variable `VLLM_USE_V1`; `said`: what names the
    version."""
    meaning = interpret(given, VLLM)
    meaning.set("engine", ENGINES[generation(version, use_v1)], where)
    if version:
        meaning.set("vllm_version", version, said)
    leave_unused(meaning)
    return meaning


_CACHE = {
    "num_gpu_blocks": "num_gpu_blocks_override",
    "block_size": "block_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "enable_prefix_caching": "enable_prefix_caching",
}
"""Key of `kv_cache` → argument."""


class Record(NamedTuple):
    """What a record says of its engine."""

    arguments: list[Argument]
    version: str | None
    """Of vLLM, as `0.19.0`."""
    hardware: str | None
    """The name of the GPU."""


def read_record(text: str, where: str) -> Record | None:
    """The record in a text; None if the text is something else.

    Raises `ConfigError` for blocks that are no number of blocks of each rank.
    """
    try:
        table = parse_json(text)
    except ValueError:
        return None
    if not isinstance(table, dict) or not isinstance(table.get("engine_kwargs"), dict):
        return None
    given: dict[str, Any] = {"model": table.get("model"), **table["engine_kwargs"]}
    for key, name in _CACHE.items():
        if (value := _inner(table, "kv_cache", key)) is not None:
            given[name] = value
    if "num_gpu_blocks_override" in given:
        blocks, ranks = given["num_gpu_blocks_override"], given.get("data_parallel_size") or 1
        if type(blocks) is not int or type(ranks) is not int or blocks < ranks or ranks < 1:
            raise ConfigError(
                f"{where}: kv_cache.num_gpu_blocks {blocks!r} for data_parallel_size {ranks!r}:"
                " expected at least a block for each rank; correct it, or remove kv_cache"
            )
        given["num_gpu_blocks_override"] = blocks // ranks
    release = re.match(r"\d{1,4}\.\d{1,4}\.\d{1,4}", str(table.get("vllm_version")))
    device = _inner(table, "hardware", "device_name")
    return Record(
        [Argument(name, value, f"{where}: {name}") for name, value in given.items()],
        release and release[0],
        device if isinstance(device, str) else None,
    )


def _inner(table: dict[str, Any], *keys: str) -> Any:
    """A value of nested tables; None if there is none."""
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
