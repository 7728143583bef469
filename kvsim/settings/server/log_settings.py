"""The settings that a start-up log of vLLM says (`log`), or one of SGLang:

| line | says |
|---|---|
| `server_args=ServerArgs(model_path='...', ...)` | every argument, given or not |
| `Load weight begin. avail mem=22.93 GB` | GiB of a GPU before anything is loaded |
| `Found local HF snapshot for Qwen/Qwen3-8B at ...` | the model |
| `[2026-04-14 16:08:44 TP1] ...` | the GPUs of a replica |
| `KV Cache is allocated. dtype: ..., #tokens: 38141, K size: 2.33 GB, ...` | the pool, in tokens |
| `max_total_num_tokens=38141, ..., context_len=131072, ...` | what pool and limits came to |

Sources: `srt/managers/scheduler.py`, `srt/mem_cache/memory_pool.py` and
`srt/entrypoints/engine.py`; logs from January 2025 (0.4) to June 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvsim.errors import ConfigError
from kvsim.settings.server import values
from kvsim.settings.server.arguments import (
    ENGINES,
    Argument,
    Meaning,
    interpret,
    leave_unused,
    notes,
)
from kvsim.settings.server.files import lines_with, pairs, whole_pairs
from kvsim.settings.server.log import Fact, Start, pool_of, read_starts
from kvsim.settings.server.sglang_arguments import SGLANG, complete
from kvsim.settings.server.vllm_arguments import VLLM
from kvsim.settings.versions import DEFAULT_BLOCK_SIZE

_ARGUMENTS = re.compile(r"server_args=(ServerArgs\(.*)")
_CAME_TO = re.compile(r"(max_total_num_tokens=\d.*)")
_ALLOCATED = re.compile(r"KV Cache is allocated\..*#tokens: (\d{1,18})")
_FREE = re.compile(r"Load weight begin\..*avail mem=(\d{1,6}\.\d{1,6}) GB")
_OF_SGLANG = (b"server_args=ServerArgs(", b"max_total_num_tokens=", b"KV Cache is allocated.")
_MODEL = re.compile(r"HF snapshot for (\S+/\S+) at|models--([^/\s]+--[^/\s]+)/")
_RANK = re.compile(r"^\[[^\]]* TP(\d{1,4})\]")
_WORTH = (*_OF_SGLANG, b"Load weight begin.", b"HF snapshot for", b"models--")

_NAMES = {"max_total_num_tokens": "max_total_tokens", "context_len": "context_length"}
"""Name in the last line → name of the argument."""
_LIMITS = ("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", *_NAMES)

_FEATURES = {
    "speculative_": ("speculative_algorithm",),
    "hicache_": ("enable_hierarchical_cache",),
    "max_lora": ("enable_lora", "lora_paths"),
}
"""Beginning of arguments that have a value by default, too → those that use the feature."""

DEFAULTS = {
    "max_prefill_tokens": 16384,
    "priority_scheduling_preemption_threshold": 10,
    "radix_eviction_policy": "lru",
    "retraction_policy": "length",
    "schedule_conservativeness": 1.0,
    "schedule_policy": "fcfs",
}
"""Arguments of the scheduler and of the radix cache whose default is not off."""


def is_sglang(path: str) -> bool:
    """Whether a log is that of an SGLang server. Raises `ConfigError` if it cannot be read."""
    return next(lines_with(_OF_SGLANG, path), None) is not None


def settings_of_sglang(path: str) -> tuple[Meaning, list[str], Start]:
    """What the last start that came as far as its pool says, notes for people, and that start.

    Raises `ConfigError` for a log without such a start, and for a server that cannot be simulated.
    """
    arguments: list[Argument] = []
    """Those of the start that is being read."""
    sized: list[Argument] = []
    start, ranks = Start(path, 1), 1
    for number, raw in lines_with(_WORTH, path):
        text, where = raw.decode("utf-8", errors="replace").rstrip(), f"{path}:{number}"
        if match := _ARGUMENTS.search(text):
            arguments = [Argument(*pair, where) for pair in whole_pairs(match[1], where)]
        elif match := _CAME_TO.search(text):
            found = [pair for pair in pairs(match[1]) if pair[0] in _LIMITS]
            arguments += [Argument(_NAMES.get(name, name), it, where) for name, it in found]
            sized = arguments
        elif (match := _ALLOCATED.search(text)) and sized is not arguments:
            # A draft model's pool comes after that of the model.
            sized = arguments = [*arguments, Argument("max_total_tokens", int(match[1]), where)]
        elif match := _FREE.search(text):
            start.free = Fact(float(match[1]), number)
            rank = _RANK.search(text)
            ranks = max(ranks, int(rank[1]) + 1 if rank else 1)
        elif match := _MODEL.search(text):
            start.model = Fact(match[1] or match[2].replace("--", "/"), number)
    if not sized:
        raise ConfigError(
            f"{path}: SGLang starts, but no line says how large its pool is; give the log up to the"
            " line `max_total_num_tokens=`"
        )
    meaning = _meaning(sized)
    line = meaning.sources["num_gpu_blocks_override"]
    complete(meaning, {}, line)
    meaning.set("engine", "sglang", line)
    if start.model is not None and "model" not in meaning.settings:
        meaning.set("model", start.model.value, f"{path}:{start.model.line}")
    if ranks > 1 and "tensor_parallel_size" not in meaning.settings:
        assert start.free is not None
        meaning.set("tensor_parallel_size", ranks, f"{path}:{start.free.line}")
    blocks, size = meaning.settings["num_gpu_blocks_override"], meaning.settings.get("block_size")
    if blocks < 1:
        raise ConfigError(f"{line}: the server has no KV pages; nothing can be simulated")
    if size is None:
        meaning.set("block_size", 1, "SGLang's default")
    return meaning, notes(meaning, path, f"{blocks:,} pages of {size or 1}"), start


def _meaning(arguments: Iterable[Argument]) -> Meaning:
    """What arguments mean, without those that nobody wants to read because nobody gave them."""
    given = {argument.name for argument in arguments if argument.value}
    unused = tuple(
        beginning for beginning, uses in _FEATURES.items() if not given.intersection(uses)
    )
    meaning = interpret((each for each in arguments if not each.name.startswith(unused)), SGLANG)
    meaning.ignored.clear()
    meaning.unknown.clear()
    for table in ("scheduler_args", "block_manager_args"):
        said = meaning.settings.pop(table, {})
        kept = {
            name: value
            for name, value in said.items()
            if value not in (DEFAULTS.get(name), False, 0)
        }
        if kept:
            meaning.settings[table] = kept
    return meaning


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
