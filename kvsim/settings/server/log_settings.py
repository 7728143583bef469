"""The settings that a start-up log says."""

from __future__ import annotations

import re

from kvsim.errors import ConfigError
from kvsim.settings.defaults import DEFAULT_BLOCK_SIZE
from kvsim.settings.server import values
from kvsim.settings.server.arguments import Meaning, interpret
from kvsim.settings.server.generations import ENGINES, leave_unused
from kvsim.settings.server.log import Start, read_starts
from kvsim.settings.server.notes import notes
from kvsim.settings.server.pool import pool_of
from kvsim.settings.server.sglang_log import is_sglang, settings_of_sglang
from kvsim.settings.server.vllm_arguments import VLLM


def settings_of_log(path: str) -> tuple[Meaning, list[str], Start]:
    """What the last start that came as far as its blocks says, notes for people, and that start.

    Raises `ConfigError` for a log without such a start, and for a server that cannot be simulated.
    """
    if is_sglang(path):
        return settings_of_sglang(path)
    starts = read_starts(path)
    sized = [start for start in starts if start.sized]
    if not sized:
        raise ConfigError(
            f"{path}: vLLM starts (line {starts[-1].line}), but no line says how many KV blocks it"
            " has; give the log up to the line `GPU KV cache size`"
        )
    start = sized[-1]
    meaning = _without_blocks(start, path)
    pool = _count_blocks(meaning, start, path)
    leave_unused(meaning)
    said = notes(meaning, path, pool)
    if len(starts) > 1:
        said.append(
            f"{path}: {len(starts)} starts of an engine; the last with its blocks counts, from line"
            f" {start.line}"
        )
    return meaning, said, start


def _without_blocks(start: Start, path: str) -> Meaning:
    """Arguments, in their place what the engine made of them, in their place what it says later."""
    meaning = interpret(start.arguments, VLLM)
    if start.lists_all:
        # Nobody wants to read what nobody gave.
        meaning.ignored.clear()
        meaning.unknown.clear()
    made = interpret(start.config, VLLM)
    for key, value in made.settings.items():
        # A replica's engine may count itself alone, and name the folder of the model's download.
        kept = key in ("data_parallel_size", "model") and key in meaning.settings
        # The format of a quantised checkpoint belongs to the model.
        if not kept and not (key == "quantization" and start.arguments):
            meaning.set(key, value, made.sources[key])
    for key, fact, read in (
        ("model", start.model, values.model),
        ("tensor_parallel_size", start.tensor_parallel_size, values.whole),
    ):
        if fact is not None and not start.config and key not in meaning.settings:
            meaning.set(key, read(fact.value), f"{path}:{fact.line}")
    for key, fact in (
        ("max_model_len", start.max_model_len),
        ("max_num_batched_tokens", start.max_num_batched_tokens),
        ("async_scheduling", start.async_scheduling),
        ("hardware", start.device),
        ("num_cpu_blocks_override", start.cpu_blocks),
    ):
        if fact is not None:
            meaning.set(key, fact.value, f"{path}:{fact.line}")
    engine = start.engine or start.engine_by_pool
    if engine is not None:
        meaning.set("engine", ENGINES[engine.value], f"{path}:{engine.line}")
    if start.version is not None:
        release = re.match(r"\d{1,4}\.\d{1,4}\.\d{1,4}", start.version.value)
        if release:
            meaning.set("vllm_version", release[0], f"{path}:{start.version.line}")
    return meaning


def _count_blocks(meaning: Meaning, start: Start, path: str) -> str:
    """Set the blocks and their size, as if one table served all layers; returns both in words."""
    said = meaning.settings
    if start.block_size is not None:
        meaning.set("block_size", start.block_size.value, f"{path}:{start.block_size.line}")
    replicas, size = said.get("data_parallel_size", 1), said.get("block_size")
    if replicas < 1 or (size is not None and size < 1):
        raise ConfigError(f"{path}: data_parallel_size {replicas}, block_size {size}: below 1")
    longest = said.get("max_model_len")
    length = longest if isinstance(longest, int) and longest > 0 else None
    pool = pool_of(start, size, length, replicas)
    where = f"{path}:{pool.line}"
    if pool.blocks < 1 or pool.block_size < 1:
        raise ConfigError(f"{where}: the server has no KV blocks; nothing can be simulated")
    meaning.set("num_gpu_blocks_override", pool.blocks, where)
    if size is None:
        usual = pool.block_size == DEFAULT_BLOCK_SIZE
        meaning.set("block_size", pool.block_size, "vLLM's default" if usual else where)
    words = f"{pool.blocks:,} blocks of {pool.block_size} (line {pool.line})"
    if start.available:
        least = min(start.available, key=lambda fact: fact.value)
        words += f" in {least.value:g} GiB of each GPU (line {least.line})"
    return words
