"""The arguments of an engine whose run was recorded, in the record's `meta.json`.

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
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.settings.parsing import parse_json
from kvsim.settings.server.arguments import Argument

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
