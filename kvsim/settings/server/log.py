"""What vLLM writes into its log when it starts.

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

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.settings.server.arguments import Argument
from kvsim.settings.server.files import cut_off, lines_with, whole_pairs
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
    def engine_by_pool(self) -> Fact | None:
        """The engine, by how it prints its pool: only V0 has CPU blocks, and prints no tokens."""
        if self.cpu_blocks is not None:
            return Fact("0", self.cpu_blocks.line)
        printed = [*self.cache_tokens, *self.blocks]
        return Fact("1", printed[0].line) if printed else None


def read_starts(path: str) -> list[Start]:
    """Every start of a vLLM server in a log, first to last.

    Raises `ConfigError` for a file that cannot be read, or holds no line of a start.
    """
    starts: list[Start] = []
    for number, raw in lines_with(_WORTH, path):
        text = _COLOUR.sub("", raw.decode("utf-8", errors="replace")).rstrip()
        for pattern, take in _LINES:
            match = pattern.search(text)
            if match:
                if not starts or _begins_anew(starts[-1], take, text):
                    starts.append(Start(path, number))
                take(starts[-1], match, _Line(path, number, text))
    if not starts:
        raise ConfigError(
            f"{path}: no line of a vLLM or SGLang start; give the log from the server's first line"
            " on"
        )
    return starts


class _Line(NamedTuple):
    path: str
    number: int
    text: str


_Take = Callable[[Start, re.Match[str], _Line], None]
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"\(EngineCore(\w*)")
_WORTH = (
    b"KV cache size",
    b"KV cache memory",
    b" blocks: ",
    b"num_gpu_blocks is",
    b"LLM engine",
    b"non-default args",
    b"args: Namespace",
    b"max_num_batched_tokens=",
    b"max model len",
    b"ynchronous scheduling",
    b"version",
    b"Maximum concurrency",
    b"Model loading took",
    b"before SM90",
    b"Device capability",
    b"device_name=",
    b"block size to",
    b"to load model ",
    b" in world size ",
)
"""A line with none of these fits no pattern below; a server's log has millions of such lines."""

_CONFIG_NAMES = {
    "max_seq_len": "max_model_len",
    "chunked_prefill_enabled": "enable_chunked_prefill",
}
_CONFIG_KEYS = {
    "model",
    "dtype",
    "max_model_len",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "quantization",
    "enforce_eager",
    "kv_cache_dtype",
    "speculative_config",
    "num_scheduler_steps",
    "enable_prefix_caching",
    "enable_chunked_prefill",
}


def _begins_anew(start: Start, take: Callable[..., None], text: str) -> bool:
    """Whether a line belongs to another start than the one before it."""
    if take in (_version, _arguments):
        return bool(start.arguments or start.engine or start.sized)
    return take is _engine and start.sized and _rank(text) in start.ranks


def _rank(text: str) -> str:
    match = _RANK.search(text)
    return match[1] if match else ""


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _one(key: str, read: Callable[[str], Any] = _number) -> _Take:
    """What sets a fact of a start; the first group of the pattern says it."""

    def take(start: Start, match: re.Match[str], line: _Line) -> None:
        setattr(start, key, Fact(read(match[1]), line.number))

    return take


def _each(key: str, read: Callable[[str], Any] = _number) -> _Take:
    """What adds a fact to those of each rank."""

    def take(start: Start, match: re.Match[str], line: _Line) -> None:
        getattr(start, key).append(Fact(read(match[1]), line.number))

    return take


def _version(start: Start, match: re.Match[str], line: _Line) -> None:
    start.version = Fact(match[1], line.number)


def _arguments(start: Start, match: re.Match[str], line: _Line) -> None:
    where = f"{line.path}:{line.number}"
    start.arguments += [
        Argument(name, value, where) for name, value in whole_pairs(match[1], where)
    ]
    start.lists_all = match[1].startswith("Namespace")


def _engine(start: Start, match: re.Match[str], line: _Line) -> None:
    start.ranks.add(_rank(line.text))
    start.engine = Fact(match[1] or "0", line.number)
    start.version = Fact(match[2], line.number)
    where = f"{line.path}:{line.number}"
    found = dict(whole_pairs(match[3], where))
    if "tensor_parallel_size" not in found:
        raise cut_off(where)
    start.config = list(_of_config(found.items(), start.engine.value == "1", where))


def _of_config(found: Iterable[tuple[str, Any]], is_v1: bool, where: str) -> Iterator[Argument]:
    for name, value in found:
        name = _CONFIG_NAMES.get(name, name)
        if name == "use_async_output_proc" and not is_v1:
            yield Argument("disable_async_output_proc", value is not True, where)
        elif name in _CONFIG_KEYS:
            yield Argument(name, value, where)


def _concurrency(start: Start, match: re.Match[str], line: _Line) -> None:
    start.max_model_len = Fact(_number(match[1]), line.number)
    start.max_concurrency = Fact(float(match[2]), line.number) if match[2] else None


def _ranks(start: Start, match: re.Match[str], line: _Line) -> None:
    """All GPUs share a layer where there are no pipeline stages and no replicas, as the last rank
    shows; of less than all ranks, the world says it."""
    if match[2] == match[3] == "0":
        start.tensor_parallel_size = Fact(_number(match[1]), line.number)


def _blocks(start: Start, match: re.Match[str], line: _Line) -> None:
    start.blocks.append(Fact(_number(match[1]), line.number))
    if match[2]:
        start.cpu_blocks = Fact(_number(match[2]), line.number)


_GIB = r"(\d{1,9}(?:\.\d{1,9})?) GiB"
_COUNT = r"(\d{1,3}(?:,\d{3}){1,5}|\d{1,18})"
_LINES: list[tuple[re.Pattern[str], _Take]] = [
    (re.compile(r"vLLM (?:API )?server version (\d[^\s,]*)"), _version),
    (re.compile(r"█.* version +(\d\S*)"), _version),
    (re.compile(r"non-default args: (\{.*)"), _arguments),
    (re.compile(r" args: (Namespace\(.*)"), _arguments),
    (
        re.compile(r"Initializing an? (?:V([01]) )?LLM engine \(v([^)\s]*)\) with config: (.*)"),
        _engine,
    ),
    (re.compile(rf"Using max model len {_COUNT}"), _one("max_model_len")),
    (
        re.compile(
            rf"Maximum concurrency for {_COUNT} tokens per request(?:: (\d{{1,9}}\.\d{{1,9}})x)?"
        ),
        _concurrency,
    ),
    (
        re.compile(rf"Chunked prefill is enabled with max_num_batched_tokens={_COUNT}"),
        _one("max_num_batched_tokens"),
    ),
    (
        re.compile(r"Asynchronous scheduling is (enabled|disabled)"),
        _one("async_scheduling", lambda word: word == "enabled"),
    ),
    (re.compile(rf"ing (?:attention|kv cache) block size to {_COUNT}"), _one("block_size")),
    (re.compile(rf"Model loading took {_GIB}"), _each("weights", float)),
    (re.compile(rf"Available KV cache memory: {_GIB}"), _each("available", float)),
    (re.compile(r"[Ss]tarting to load model (\S+?)\.\.\."), _one("model", str)),
    (
        re.compile(rf"rank \d+ in world size {_COUNT} is assigned as DP rank (\d+), PP rank (\d+)"),
        _ranks,
    ),
    (
        re.compile(r"(GPUs before SM90|Device capability \d{1,3}\.\d not supported)"),
        _one("not_hopper", bool),
    ),
    (
        re.compile(r"device_name=([\w-]{1,80}?)(?:,|\.json)"),
        _one("device", lambda name: name.replace("_", " ")),
    ),
    (re.compile(rf"\b(?!CPU )\w+ KV cache size: {_COUNT} tokens"), _each("cache_tokens")),
    (re.compile(rf"# (?!CPU)\w+ blocks: {_COUNT}(?:, # CPU blocks: {_COUNT})?"), _blocks),
    (re.compile(rf"after num_gpu_blocks is: {_COUNT}"), _one("blocks_of_all")),
]


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
    if not block_size and printed and printed.value and not tokens.value % printed.value:
        # Less than what kernels take comes from groups of layers, which share the blocks.
        each = tokens.value // printed.value
        block_size = None if each % DEFAULT_BLOCK_SIZE else each
    size = block_size or DEFAULT_BLOCK_SIZE
    if printed is not None and data_parallel_size == 1:
        return Pool(printed.value, size, printed.line)
    version = start.version.value if start.version else ""
    return Pool(blocks_of(tokens.value, size, max_model_len, version, sharing), size, tokens.line)


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
