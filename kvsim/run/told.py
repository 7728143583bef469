"""Holds what a server says about itself against the model and the GPU of a run.

A log counts its pool for a model on a GPU. Which layers share the pool is the model's to say; which
GPU it was, few logs say. What does not agree is refused.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvsim.engines import ENGINES
from kvsim.engines.vllm_v1.groups import Group, Layout
from kvsim.engines.vllm_v1.planning import groups_of_model, peak_blocks, reserved_steps
from kvsim.errors import ConfigError
from kvsim.machine.hardware import GIB
from kvsim.machine.memory import drafted_tokens, expert_parallel_size, tables_of
from kvsim.machine.packed import packed_request
from kvsim.run.assumed import Settings, complete
from kvsim.settings.config import RunConfig, make_config
from kvsim.settings.server import ServerWord
from kvsim.settings.server.log import Sharing, Start, pool_of
from kvsim.settings.versions import DEFAULT_BLOCK_SIZE, release, server_defaults

_LEAST_FILLED = 0.7
"""Least share of a GPU that weights and KV cache take of what `gpu_memory_utilization` allows."""
_WEIGHTS_ALIKE = 0.25
"""Share by which the printed weights may differ: which parts are quantised, no name says."""
_ALIKE = 0.05
"""Share by which the printed concurrency may differ from that of the pool. Releases differ in what
they reserve for a step in windows and for states."""


def settled(config: RunConfig, word: ServerWord) -> tuple[RunConfig, list[str]]:
    """The settings of a run with all blocks of the server's pool, and notes for people.

    Raises `ConfigError` where neither the server nor anybody else names the model, where the log
    contradicts a GPU that nobody named, and where it contradicts the model.
    """
    if not word.origin:
        return config, []
    if config.model is None:
        raise ConfigError(f"{word.origin}: names no model; give --model")
    if word.start is None or config.engine not in ENGINES:
        return config, []
    whole = complete(_counted(config, word), ENGINES[config.engine])
    if config.hardware is None:
        _check_hardware(whole, word.start)
    doubts = _doubtful_weights(whole, word.start)
    each = word.counted_with["num_gpu_blocks_override"]
    # A pool that somebody set otherwise stays.
    if config.num_gpu_blocks_override != each or not word.start.sized:
        return config, doubts
    blocks = _blocks(whole, word.start)
    if blocks == each:
        return config, doubts
    note = f"{word.start.path}: groups of layers share the pool: {blocks:,} blocks, not {each:,}"
    return replace(config, num_gpu_blocks_override=blocks), [*doubts, note]


def _counted(config: RunConfig, word: ServerWord) -> RunConfig:
    """The settings with which the server counted its pool, whatever a run changes about them."""
    keys = ("model", "hardware", "disable_hybrid_kv_cache_manager")
    given = {key: getattr(config, key) for key in keys}
    return make_config({**word.settings, **word.counted_with, **given})


def _check_hardware(whole: Settings, start: Start) -> None:
    """Refuse an assumed GPU that is not that of the log."""
    hardware, config = whole.hardware, whole.config
    assumed = f"{hardware.name}, which is assumed,"
    if start.not_hopper is not None:
        raise ConfigError(
            f"{start.path}:{start.not_hopper.line}: hardware: the GPU is not {assumed} nor of its"
            " generation; give --hardware"
        )
    filled = start.free
    if start.weights and start.available and config.kv_cache_memory_bytes is None:
        cache = min(start.available, key=lambda fact: fact.value)
        weights = min(fact.value for fact in start.weights)
        assert config.gpu_memory_utilization is not None
        # As if nothing else took memory, so only far smaller or larger GPUs are told apart.
        filled = cache._replace(value=(weights + cache.value) / config.gpu_memory_utilization)
    total = hardware.memory_bytes / GIB
    if filled is not None and not _LEAST_FILLED * total <= filled.value <= total:
        raise ConfigError(
            f"{start.path}:{filled.line}: hardware: the GPU has about {filled.value:.0f} GiB,"
            f" {assumed} {total:.0f} GiB; give --hardware"
        )
    _check_limits(whole, start, assumed)


def _check_limits(whole: Settings, start: Start, assumed: str) -> None:
    """Refuse an assumed GPU on which vLLM would have chosen other limits of a step."""
    hardware, config = whole.hardware, whole.config
    tokens = start.max_num_batched_tokens
    given = {argument.name for argument in start.arguments}
    version = config.vllm_version
    if tokens is not None and given and version and "max_num_batched_tokens" not in given:
        memory, longest = hardware.memory_bytes, config.max_model_len
        assert isinstance(longest, int)
        chosen = server_defaults(version, hardware.device_name, memory, longest, True)
        default = chosen["max_num_batched_tokens"]
        if tokens.value < default.value:
            raise ConfigError(
                f"{start.path}:{tokens.line}: hardware: vLLM {version} chose {tokens.value:,}"
                f" tokens a step, on {assumed} it chooses {default.value:,}; give --hardware"
            )


def _doubtful_weights(whole: Settings, start: Start) -> list[str]:
    """A note if the weights of the log are not those of the model."""
    if not start.weights:
        return []
    config, printed = whole.config, max(start.weights, key=lambda fact: fact.value)
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    counted = whole.model.weight_bytes(config.dtype, tp, pp, expert_parallel_size(config))
    if abs(printed.value * GIB - counted) <= _WEIGHTS_ALIKE * counted:
        return []
    return [
        f"{start.path}:{printed.line}: weights of {printed.value:g} GiB on each GPU, but"
        f" {counted / GIB:.4g} of {whole.model.name} on {tp}: --model, --quantization and"
        " --tensor-parallel-size say what the server had"
    ]


def _blocks(whole: Settings, start: Start) -> int:
    """The blocks of a replica's pool, which all groups of layers share."""
    config = whole.config
    size, longest = config.block_size or DEFAULT_BLOCK_SIZE, config.max_model_len
    assert isinstance(longest, int)
    groups = groups_of_model(whole.model, config, whole.hardware)
    cached = tuple(group.with_prefix_cache() for group in groups)
    flying = config.pipeline_parallel_size + bool(config.async_scheduling)
    steps = reserved_steps(config.vllm_version, flying)
    request = _taken(whole, cached if config.enable_prefix_caching else groups, steps)
    sharing = Sharing(len(groups), request) if groups else None
    pool = pool_of(start, size, longest, config.data_parallel_size, sharing)
    printed = start.max_concurrency
    # What releases reserve for steps in flight, at least and at most.
    most = pool.blocks / _taken(whole, groups, 1)
    least = pool.blocks / _taken(whole, cached, max(flying, 2))
    alike = (1 - _ALIKE) * least - 0.01, (1 + _ALIKE) * most + 0.01
    if printed is not None and not alike[0] <= printed.value <= alike[1]:
        shared = ", --disable-hybrid-kv-cache-manager if one table served all layers"
        raise ConfigError(
            f"{start.path}:{printed.line}: the pool holds {printed.value:g} requests of"
            f" {longest:,} tokens, but {most:.2f} of {whole.model.name}; give the --model of"
            f" this log{shared * bool(groups)}, or --num-gpu-blocks-override"
        )
    return pool.blocks


def _taken(whole: Settings, groups: tuple[Group, ...], steps: int) -> int:
    """Blocks of a request of the longest length, by the rules of these groups, as a log counts
    them."""
    config = whole.config
    size, longest = config.block_size or DEFAULT_BLOCK_SIZE, config.max_model_len
    assert isinstance(longest, int)
    if not groups:
        return -(-longest // size)
    tokens = (config.max_num_batched_tokens or 0) * steps
    layout = Layout(size, size, longest, tokens, num_spec_tokens=drafted_tokens(config))
    packed = [each.packed for each in tables_of(whole.model, config) if each.packed]
    if not packed:
        return peak_blocks(groups, layout)
    held = [group.peak_blocks(layout) for group in groups]
    return packed_request(packed, held, release(config.vllm_version))
