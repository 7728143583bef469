"""What the arguments of `sglang.launch_server` come to, and what its log says.

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
from collections.abc import Iterable, Iterator, Mapping

from kvsim.errors import ConfigError
from kvsim.settings.server import values
from kvsim.settings.server.arguments import (
    IGNORED,
    SGLANG,
    Argument,
    Meaning,
    interpret,
    notes,
    spelled,
)
from kvsim.settings.server.log import Fact, Start, lines_with
from kvsim.settings.server.values import pairs, whole_pairs

BACKENDS = ("attention_backend", "decode_attention_backend")
"""Arguments that are no settings, but may decide the page size."""

_MEASURED = "ENABLE_POST_CAPTURE_KV_SIZING"
"""The variable with which the pool is sized after CUDA graphs are captured."""


def complete(meaning: Meaning, variables: Mapping[str, str], where: str) -> None:
    """Gives the arguments the form of kvsim's settings, and adds what the environment says.

    An attention backend may have page sizes of its own. A pool is counted in pages; without chunks
    (-1), a step has no limit. Raises `ConfigError`.
    """
    said = meaning.settings
    for name in BACKENDS:
        if name in said:
            sizes, at = SGLANG["pages"].get(said.pop(name), ()), meaning.sources.pop(name)
            if sizes and said.get("block_size", 1) not in sizes:
                meaning.set("block_size", sizes[-1], at)
            elif not sizes:
                meaning.ignored.setdefault(IGNORED["slight"], []).append(spelled(name))
    if "num_gpu_blocks_override" in said:
        said["num_gpu_blocks_override"] //= max(said.get("block_size", 1), 1)
    if said.get("max_num_batched_tokens", 1) <= 0:
        at = meaning.sources.pop("max_num_batched_tokens")
        del said["max_num_batched_tokens"]
        meaning.set("enable_chunked_prefill", False, at)
    measured = variables.get(f"SGLANG_{_MEASURED}", "false").lower() in ("true", "1", "yes", "y")
    if measured and "num_gpu_blocks_override" not in said:
        raise ConfigError(
            f"{where}: SGLANG_{_MEASURED}: only the server can measure the memory that its graphs"
            " leave; add --max-total-tokens N as its log has it, or give the log (--startup-log)"
        )
    if environment := _environment(variables, where):
        meaning.set("scheduler_args.environment", environment, where)


def _environment(variables: Mapping[str, str], where: str) -> dict[str, float]:
    """What variables say to the scheduler."""
    found = {}
    for name, key in SGLANG["environment"].items():
        text = variables.get(f"SGLANG_{name}")
        if text is not None:
            try:
                found[key] = values.number(text)
            except ValueError as error:
                raise ConfigError(f"{where}: SGLANG_{name}: takes {error}, got {text!r}") from None
    return found


_CHANGES = {
    (0, 5, 10): "the pages that an admission sets aside",
    (0, 5, 15): "what max_prefill_tokens counts",
}
"""Release → what it decided otherwise before, and is not simulated so."""


def sglang_differs(version: str | None, where: str) -> list[str]:
    """A line on what a release decides otherwise than the one that is simulated, if it does."""
    number = tuple(map(int, version.split("."))) if version else ()
    other = [words for since, words in _CHANGES.items() if version and number < since]
    if not other:
        return []
    return [
        f"from {where}: SGLang {version} decides otherwise in {' and '.join(other)}; simulated is"
        " 0.5.23"
    ]


_ARGUMENTS = re.compile(r"server_args=(ServerArgs\(.*)")
_CAME_TO = re.compile(r"(max_total_num_tokens=\d.*)")
_ALLOCATED = re.compile(r"KV Cache is allocated\..*#tokens: (\d{1,18})")
_FREE = re.compile(
    r"^(?:\[[^\]]* TP(\d{1,4})\])?.*?Load weight begin\..*avail mem=(\d{1,6}\.\d{1,6}) GB"
)
_OF_SGLANG = (b"server_args=ServerArgs(", b"max_total_num_tokens=", b"KV Cache is allocated.")
_MODEL = re.compile(r"HF snapshot for (\S+/\S+) at|models--([^/\s]+--[^/\s]+)/")
_WORTH = (*_OF_SGLANG, b"Load weight begin.", b"HF snapshot for", b"models--")

_NAMES = {"max_total_num_tokens": "max_total_tokens", "context_len": "context_length"}
"""Name in the last line → name of the argument."""
_LIMITS = ("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", *_NAMES)


def is_sglang(path: str) -> bool:
    """Whether a log is that of an SGLang server. Raises `ConfigError` if it cannot be read."""
    return next(lines_with(_OF_SGLANG, path), None) is not None


def settings_of_sglang(path: str) -> tuple[Meaning, list[str], Start]:
    """What the last start that came as far as its pool says, notes for people, and that start.

    Raises `ConfigError` for a log without such a start, and for a server that cannot be simulated.
    """
    sized, start = _last_sized(path)
    if not sized:
        raise ConfigError(
            f"{path}: SGLang starts, but no line says how large its pool is; give the log up to the"
            " line `max_total_num_tokens=`"
        )
    meaning = _meaning(sized)
    line = meaning.sources["num_gpu_blocks_override"]
    complete(meaning, {}, line)
    meaning.set("engine", "sglang", line)
    start.tell_loaded(meaning)
    blocks, size = meaning.settings["num_gpu_blocks_override"], meaning.settings.get("block_size")
    if blocks < 1:
        raise ConfigError(f"{line}: the server has no KV pages; nothing can be simulated")
    if size is None:
        meaning.set("block_size", 1, "SGLang's default")
    return meaning, notes(meaning, path, f"{blocks:,} pages of {size or 1}"), start


def _last_sized(path: str) -> tuple[list[Argument], Start]:
    """The arguments of the last start that came as far as its pool, and what else lines say."""
    arguments: list[Argument] = []
    """Those of the start that is being read."""
    sized: list[Argument] = []
    start, ranks = Start(path, 1), 1
    for number, raw in lines_with(_WORTH, path):
        text, where = raw.decode("utf-8", errors="replace").rstrip(), f"{path}:{number}"
        if match := _ARGUMENTS.search(text):
            arguments = [Argument(*pair, where) for pair in whole_pairs(match[1], where)]
        elif match := _CAME_TO.search(text):
            sized = arguments = [*arguments, *_limits(match[1], where)]
        elif (match := _ALLOCATED.search(text)) and sized is not arguments:
            # The first pool of a start: that of a draft model comes after it.
            sized = arguments = [*arguments, Argument("max_total_tokens", int(match[1]), where)]
        elif match := _FREE.search(text):
            start.free = Fact(float(match[2]), number)
            ranks = max(ranks, int(match[1] or 0) + 1)
            start.tensor_parallel_size = Fact(ranks, number) if ranks > 1 else None
        elif match := _MODEL.search(text):
            start.model = Fact(match[1] or match[2].replace("--", "/"), number)
    return sized, start


def _limits(text: str, where: str) -> Iterator[Argument]:
    """What a line says that pool and limits came to, under the names of arguments."""
    for name, value in pairs(text):
        if name in _LIMITS:
            yield Argument(_NAMES.get(name, name), value, where)


def _meaning(arguments: Iterable[Argument]) -> Meaning:
    """What arguments mean, without those that nobody wants to read because nobody gave them."""
    given = {argument.name for argument in arguments if argument.value}
    unused = tuple(
        beginning for beginning, uses in SGLANG["uses"].items() if not given.intersection(uses)
    )
    meaning = interpret((each for each in arguments if not each.name.startswith(unused)), SGLANG)
    meaning.ignored.clear()
    meaning.unknown.clear()
    for table in ("scheduler_args", "block_manager_args"):
        said = meaning.settings.pop(table, {})
        kept = {
            name: value
            for name, value in said.items()
            if value not in (SGLANG["defaults"].get(name), False, 0)
        }
        if kept:
            meaning.settings[table] = kept
    return meaning
