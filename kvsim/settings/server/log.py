"""What vLLM writes into its log when it starts, and the settings that this says.

| line | version | says |
|---|---|---|
| `vLLM API server version 0.9.2`, `█▄█▀ ... version 0.19.0` | all | the release |
| `args: Namespace(...)` | to 0.8 | every argument |
| `non-default args: {...}` | from 0.9 | arguments that were given |
| `Initializing a V1 LLM engine (v0.19.0) with config: ...` | all | what they came to |
| `Chunked prefill is enabled with max_num_batched_tokens=2048.` | all | the token budget |
| `Asynchronous scheduling is enabled.` | from 0.14 | |
| `# GPU blocks: 2588, # CPU blocks: 2048` | 0.x | the pools |
| `GPU KV cache size: 41,408 tokens` | V1 | the pool, in tokens |
| `Maximum concurrency for 32,768 tokens per request: 1.26x` | all | `max_model_len`, a check |
| `Model loading took 14.2488 GiB` | from 0.7 | the weights |
| `Config file not found at ...,device_name=NVIDIA_H200.json` | all | the GPU |
| `... num_gpu_blocks is: 2588` | V1 | the pools of all replicas |

Sources: vLLM 0.6.3 `engine/llm_engine.py`, `executor/gpu_executor.py`; 0.7.3
`executor/executor_base.py`; 0.8.5 to 0.20.0 and 0.33.0 `v1/core/kv_cache_utils.py`; 0.33.0
`config/vllm.py`, `v1/engine/core.py`, `v1/metrics/loggers.py`, `entrypoints/common/startup.py`.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kvsim.errors import ConfigError
from kvsim.settings.server import values
from kvsim.settings.server.arguments import (
    ENGINES,
    VLLM,
    Argument,
    Meaning,
    interpret,
    leave_unused,
    notes,
)
from kvsim.settings.server.script import unreadable
from kvsim.settings.server.values import cut_off, whole_pairs
from kvsim.settings.versions import DEFAULT_BLOCK_SIZE


class Fact(NamedTuple):
    """A value, and the line that says it."""

    value: Any
    line: int


@dataclass
class Start:
    """One start of a server, as its log tells it."""

    path: str
    line: int
    version: Fact | None = None
    engine: Fact | None = None
    """`0` or `1`, as in `V1`."""
    arguments: list[Argument] = field(default_factory=list)
    lists_all: bool = False
    """Whether `arguments` are complete, including those that were not given."""
    config: list[Argument] = field(default_factory=list)
    """The values that the engine came to, under the names of arguments."""
    max_model_len: Fact | None = None
    max_concurrency: Fact | None = None
    """Requests of `max_model_len` tokens that the pool holds."""
    max_num_batched_tokens: Fact | None = None
    async_scheduling: Fact | None = None
    block_size: Fact | None = None
    weights: list[Fact] = field(default_factory=list)
    """GiB of the weights, on each rank."""
    available: list[Fact] = field(default_factory=list)
    """GiB for the KV cache, on each rank."""
    cache_tokens: list[Fact] = field(default_factory=list)
    """Size of the KV cache, on each rank."""
    blocks: list[Fact] = field(default_factory=list)
    """Blocks on each rank; in V1 with the one that is never used."""
    blocks_of_all: Fact | None = None
    """Blocks of all data-parallel replicas together (0.33.0 `v1/engine/core_client.py`)."""
    cpu_blocks: Fact | None = None
    free: Fact | None = None
    """GiB of a GPU before anything was loaded; only SGLang says it."""
    model: Fact | None = None
    """The name of the model that is being loaded."""
    tensor_parallel_size: Fact | None = None
    """Ranks of the last GPU that joins, where there are no others."""
    not_hopper: Fact | None = None
    """Whether a kernel says that the GPUs are of another generation."""
    device: Fact | None = None
    """The name of the GPU in the CUDA runtime."""
    ranks: set[str] = field(default_factory=set)
    """Data-parallel ranks whose engines have begun."""

    @property
    def sized(self) -> bool:
        """Whether it came as far as its pool."""
        return bool(self.cache_tokens or self.blocks or self.blocks_of_all)

    @property
    def generation(self) -> Fact | None:
        """The engine, which a pool tells, too: only V0 has CPU blocks, and prints no tokens."""
        if self.engine is not None:
            return self.engine
        if self.cpu_blocks is not None:
            return self.cpu_blocks._replace(value="0")
        pools = [*self.cache_tokens, *self.blocks]
        return pools[0]._replace(value="1") if pools else None

    def tell(self, meaning: Meaning, key: str, fact: Fact | None) -> None:
        """Set what a line says of a setting, if one says it."""
        if fact is not None:
            meaning.set(key, fact.value, f"{self.path}:{fact.line}")

    def tell_loaded(self, meaning: Meaning) -> None:
        """Set the model that is loaded, and the GPUs that share it, where no argument says them."""
        for key in ("model", "tensor_parallel_size"):
            if key not in meaning.settings:
                self.tell(meaning, key, getattr(self, key))


CHUNK_BYTES = 1 << 20
"""If a line of a log is longer than two chunks of this size, only its beginning is read."""

_GZIP = b"\x1f\x8b"


def lines_with(words: Iterable[bytes], path: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a log, gzipped or not, that hold one of `words`; with their numbers from 1.

    What a terminal has wrapped is joined: a long line, and those after it that begin no record.

    Raises `ConfigError` for a file that cannot be read, holds nothing, or is not text.
    """
    try:
        with Path(path).open("rb") as stored:
            packed = stored.peek(2).startswith(_GZIP)
            file: BinaryIO = gzip.GzipFile(fileobj=stored) if packed else stored  # type: ignore[assignment]
            yield from _lines(file, path, tuple(words))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except EOFError:
        raise ConfigError(f"{path}: the gzip file ends too early; fetch it again") from None
    except (gzip.BadGzipFile, zlib.error):
        raise ConfigError(f"{path}: not a whole gzip file; fetch it again") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def _lines(file: BinaryIO, path: str, words: tuple[bytes, ...]) -> Iterator[tuple[int, bytes]]:
    number, begins = 1, True
    while chunk := file.read(CHUNK_BYTES):
        # To the end of a line, so that no record is divided; of a longer one, only this is read.
        chunk += file.readline(CHUNK_BYTES)
        if b"\0" in chunk:
            raise ConfigError(f"{path}: not a text in UTF-8; give the text that the server printed")
        # Most of a long log holds none of the words: such chunks need not be split.
        if any(word in chunk for word in words):
            lines = chunk.split(b"\n")
            place = 0
            while place < len(lines):
                end = _end_of_record(lines, place)
                record = b"".join(lines[place:end])
                # Else it is the rest of a line whose beginning was in the chunk before.
                if (begins or place) and any(word in record for word in words):
                    yield number + place, record
                place = end
        number += chunk.count(b"\n")
        begins = chunk.endswith(b"\n")
    if number == 1 and begins:
        raise ConfigError(f"{path}: the file is empty; give the text that the server printed")


_WRAPPED_AT = 80
"""Columns of the narrowest terminal; shorter lines were not wrapped."""
_RECORD = re.compile(
    rb"(?:\S+ +\| )?(?:\x1b\[[0-9;]*m)*"
    rb"(?:[(\[]|INFO|WARNING|ERROR|DEBUG|CRITICAL|\d{4}-\d\d|[A-Z]\w* \w+ \w+|\s*$)"
)
"""The beginning of a line that a logger or a launcher wrote, or of a sentence; an empty line."""


def _end_of_record(lines: list[bytes], first: int) -> int:
    """The place after a line and those in which it goes on."""
    place = first + 1
    while place < len(lines) and len(lines[place - 1]) >= _WRAPPED_AT:
        if _RECORD.match(lines[place]):
            break
        place += 1
    return place


def read_starts(path: str) -> list[Start]:
    """Every start of a vLLM server in a log, first to last.

    Raises `ConfigError` for a file that cannot be read, or holds no line of a start.
    """
    starts: list[Start] = []
    for number, raw in lines_with(_WORTH, path):
        text = _COLOUR.sub("", raw.decode("utf-8", errors="replace")).rstrip()
        for pattern in _LINES.values():
            if match := re.search(pattern, text):
                if not starts or _begins_anew(starts[-1], match):
                    starts.append(Start(path, number))
                _take(starts[-1], match, number)
    if not starts:
        raise ConfigError(
            f"{path}: no line of a vLLM or SGLang start; give the log from the server's first line"
            " on"
        )
    return starts


_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"\(EngineCore(\w*)")
_GIB = r"\d{1,9}(?:\.\d{1,9})?"
_COUNT = r"\d{1,3}(?:,\d{3}){1,5}|\d{1,18}"
_LINES = {
    "server version": r"vLLM (?:API )?server version (?P<version>\d[^\s,]*)",
    "version": r"█.* version +(?P<version>\d\S*)",
    "non-default args": r"non-default args: (?P<arguments>\{.*)",
    "args: Namespace": r" args: (?P<arguments>Namespace\(.*)",
    "LLM engine": r"Initializing an? (?:V(?P<engine>[01]) )?LLM engine \(v(?P<version>[^)\s]*)\)"
    r" with config: (?P<config>.*)",
    "max model len": rf"Using max model len (?P<max_model_len>{_COUNT})",
    "Maximum concurrency": rf"Maximum concurrency for (?P<max_model_len>{_COUNT}) tokens per"
    r" request(?:: (?P<max_concurrency>\d{1,9}\.\d{1,9})x)?",
    "max_num_batched_tokens=": r"Chunked prefill is enabled with max_num_batched_tokens="
    rf"(?P<max_num_batched_tokens>{_COUNT})",
    "ynchronous scheduling": r"Asynchronous scheduling is (?P<async_scheduling>enabled|disabled)",
    "block size to": rf"ing (?:attention|kv cache) block size to (?P<block_size>{_COUNT})",
    "Model loading took": rf"Model loading took (?P<weights>{_GIB}) GiB",
    "KV cache memory": rf"Available KV cache memory: (?P<available>{_GIB}) GiB",
    "to load model ": r"[Ss]tarting to load model (?P<model>\S+?)\.\.\.",
    # All GPUs share a layer where there are no pipeline stages and no replicas, as the last
    # rank shows; of less than all ranks, the world says it.
    " in world size ": rf"rank \d+ in world size (?P<tensor_parallel_size>{_COUNT}) is assigned as"
    r" DP rank 0, PP rank 0(?!\d)",
    "before SM90": r"(?P<not_hopper>GPUs before SM90)",
    "Device capability": r"(?P<not_hopper>Device capability \d{1,3}\.\d not supported)",
    "device_name=": r"device_name=(?P<device>[\w-]{1,80}?)(?:,|\.json)",
    "KV cache size": rf"\b(?!CPU )\w+ KV cache size: (?P<cache_tokens>{_COUNT}) tokens",
    " blocks: ": rf"# (?!CPU)\w+ blocks: (?P<blocks>{_COUNT})"
    rf"(?:, # CPU blocks: (?P<cpu_blocks>{_COUNT}))?",
    "num_gpu_blocks is": rf"after num_gpu_blocks is: (?P<blocks_of_all>{_COUNT})",
}
"""What a line holds that a pattern fits → the pattern: a server's log has millions of lines that
hold none of them. A group is an attribute of `Start`; it sets the fact, or adds to those of each
rank."""
_WORTH = [word.encode() for word in _LINES]
_READ: dict[str, Callable[[str], Any]] = {
    "version": str,
    "model": values.model,
    "engine": str,
    "max_concurrency": float,
    "weights": float,
    "available": float,
    "async_scheduling": lambda word: word == "enabled",
    "not_hopper": bool,
    "device": lambda name: name.replace("_", " "),
}
"""Group → how it is read; others are whole numbers."""

_CONFIG_NAMES = {
    "max_seq_len": "max_model_len",
    "chunked_prefill_enabled": "enable_chunked_prefill",
}
_CONFIG_KEYS = (
    {"model", "dtype", "max_model_len", "quantization", "enforce_eager", "kv_cache_dtype"}
    | {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
    | {"decode_context_parallel_size", "speculative_config", "num_scheduler_steps"}
    | {"enable_prefix_caching", "enable_chunked_prefill"}
)


def _begins_anew(start: Start, match: re.Match[str]) -> bool:
    """Whether a line belongs to another start than the one before it."""
    groups = match.re.groupindex
    if "config" in groups:
        # Each replica's engine prints its own; the same rank twice is a restart.
        return start.sized and _rank(match.string) in start.ranks
    return bool(
        ("version" in groups or "arguments" in groups)
        and (start.arguments or start.engine or start.sized)
    )


def _rank(text: str) -> str:
    match = _RANK.search(text)
    return match[1] if match else ""


def _take(start: Start, match: re.Match[str], number: int) -> None:
    """Take in what a line says."""
    where, said = f"{start.path}:{number}", match.groupdict()
    if text := said.pop("arguments", None):
        start.arguments += [Argument(*pair, where) for pair in whole_pairs(text, where)]
        start.lists_all = text.startswith("Namespace")
    if "config" in said:
        start.ranks.add(_rank(match.string))
        found = dict(whole_pairs(said.pop("config"), where))
        # Only lines of releases with a V1 name the generation.
        said["engine"] = said["engine"] or "0"
        # Every release prints it: without it, the line is not whole.
        if "tensor_parallel_size" not in found:
            raise cut_off(where)
        start.config = list(_of_config(found.items(), said["engine"] == "1", where))
    for key, text in said.items():
        if text is None:
            continue
        fact = Fact(_READ.get(key, _number)(text), number)
        if isinstance(facts := getattr(start, key), list):
            facts.append(fact)
        else:
            setattr(start, key, fact)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _of_config(found: Iterable[tuple[str, Any]], is_v1: bool, where: str) -> Iterator[Argument]:
    for name, value in found:
        name = _CONFIG_NAMES.get(name, name)
        if name == "use_async_output_proc" and not is_v1:
            yield Argument("disable_async_output_proc", value is not True, where)
        elif name in _CONFIG_KEYS:
            yield Argument(name, value, where)


_WHOLE_REQUESTS_SINCE = (0, 21)
"""Since this version the printed tokens are those of whole requests of the longest length; before
they were the blocks' (vLLM 0.20.0 and 0.21.0 `v1/core/kv_cache_utils.py`)."""


class Pool(NamedTuple):
    """The blocks of one replica."""

    blocks: int
    """Number of blocks, counted as `num_gpu_blocks_override` does: in V1 it includes the block that
    is never used."""
    block_size: int
    """Tokens."""
    line: int
    """The line of the log that says it."""


class Sharing(NamedTuple):
    """How the layers of a model share a pool."""

    groups: int
    """Groups of layers with block tables of their own."""
    request_blocks: int
    """Blocks that a request of `max_model_len` tokens takes in all of them."""


def pool_of(
    start: Start,
    block_size: int | None,
    max_model_len: int | None,
    data_parallel_size: int,
    sharing: Sharing | None = None,
) -> Pool:
    """The blocks of a start that printed them; `block_size`: None if nothing says it; `sharing`:
    None if one table serves all layers.

    Ranks may print different numbers: the engine takes the smallest for all.
    """
    printed, tokens, total = _least(start.blocks), _least(start.cache_tokens), start.blocks_of_all
    if printed is None and total is not None:
        printed = Fact(total.value // data_parallel_size, total.line)
    if tokens is None:
        assert printed is not None, "a start with its blocks"
        return Pool(printed.value, block_size or DEFAULT_BLOCK_SIZE, printed.line)
    size = block_size or _size_printed(tokens, printed) or DEFAULT_BLOCK_SIZE
    if printed is not None and data_parallel_size == 1:
        return Pool(printed.value, size, printed.line)
    version = start.version.value if start.version else ""
    blocks = blocks_of(tokens.value, size, max_model_len, version, sharing)
    return Pool(_unseen(blocks, sharing, start.max_concurrency), size, tokens.line)


def _unseen(blocks: int, sharing: Sharing | None, max_concurrency: Fact | None) -> int:
    """With the blocks that `blocks_of` does not see: the fewest that hold as many requests as are
    printed."""
    if sharing is None or max_concurrency is None:
        return blocks
    candidates, printed = range(blocks, blocks + sharing.groups), f"{max_concurrency.value:.2f}"
    alike = (each for each in candidates if f"{each / sharing.request_blocks:.2f}" == printed)
    return next(alike, blocks)


def _size_printed(tokens: Fact, blocks: Fact | None) -> int | None:
    """Tokens of a block of a pool that is printed in both."""
    if blocks is None or not blocks.value:
        return None
    size, rest = divmod(tokens.value, blocks.value)
    # Less than what kernels take comes from groups of layers, which share the blocks.
    return None if rest or size % DEFAULT_BLOCK_SIZE else size


def blocks_of(
    tokens: int,
    block_size: int,
    max_model_len: int | None,
    version: str,
    sharing: Sharing | None = None,
) -> int:
    """Blocks of a cache whose size is printed in tokens.

    Up to vLLM 0.20 that is blocks // groups × block size, so that up to groups - 1 blocks more are
    not seen. Since 0.21 it is the floor of blocks / R × L for the longest length L and the R blocks
    that a request of it takes: the same where one table serves all layers and L is a whole number
    of blocks, but for a floating-point error of one token.
    """
    match = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    if match is None:
        in_blocks = not tokens % block_size
    else:
        in_blocks = (int(match[1]), int(match[2])) < _WHOLE_REQUESTS_SINCE
    if in_blocks or not max_model_len:
        return tokens // block_size * (sharing.groups if sharing else 1)
    blocks = sharing.request_blocks if sharing else -(-max_model_len // block_size)
    return -(-tokens * blocks // max_model_len)


def _least(facts: list[Fact]) -> Fact | None:
    return min(facts, key=lambda fact: fact.value, default=None)


def settings_of_log(path: str) -> tuple[Meaning, list[str], Start]:
    """What the last start that came as far as its blocks says, notes for people, and that start.

    Raises `ConfigError` for a log without such a start, and for a server that cannot be simulated.
    """
    starts = read_starts(path)
    sized = [start for start in starts if start.sized]
    if not sized:
        raise ConfigError(
            f"{path}: vLLM starts (line {starts[-1].line}), but no line says how many KV blocks it"
            " has; give the log up to the line `GPU KV cache size`"
        )
    start = sized[-1]
    meaning = _without_blocks(start)
    pool = _count_blocks(meaning, start)
    leave_unused(meaning)
    said = notes(meaning, path, pool)
    if len(starts) > 1:
        said.append(
            f"{path}: {len(starts)} starts of an engine; the last with its blocks counts, from line"
            f" {start.line}"
        )
    return meaning, said, start


def _made_of_arguments(start: Start) -> Meaning:
    """Arguments, and in their place what the engine made of them."""
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
    return meaning


def _without_blocks(start: Start) -> Meaning:
    """What a start says of all but its pool; what it says later counts."""
    meaning = _made_of_arguments(start)
    if not start.config:
        start.tell_loaded(meaning)
    start.tell(meaning, "max_model_len", start.max_model_len)
    start.tell(meaning, "max_num_batched_tokens", start.max_num_batched_tokens)
    start.tell(meaning, "async_scheduling", start.async_scheduling)
    start.tell(meaning, "hardware", start.device)
    start.tell(meaning, "num_cpu_blocks_override", start.cpu_blocks)
    if engine := start.generation:
        start.tell(meaning, "engine", engine._replace(value=ENGINES[engine.value]))
    if start.version is not None:
        release = re.match(r"\d{1,4}\.\d{1,4}\.\d{1,4}", start.version.value)
        if release:
            start.tell(meaning, "vllm_version", start.version._replace(value=release[0]))
    start.tell(meaning, "block_size", start.block_size)
    return meaning


def _count_blocks(meaning: Meaning, start: Start) -> str:
    """Set the blocks and their size, as if one table served all layers; returns both in words."""
    said, path = meaning.settings, start.path
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
    if least := _least(start.available):
        words += f" in {least.value:g} GiB of each GPU (line {least.line})"
    return words
