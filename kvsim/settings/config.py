"""One run's settings: a flat table whose every key is also a flag; `config.toml` says what each is.

Keys carry vLLM's own argument names wherever vLLM has the argument. Three nested tables hold the
keyword arguments of the policies that they name (`[cost]`, `[block_manager_args]`,
`[scheduler_args]`); `[goodput]` holds service-level objectives.

```toml
model = "llama-3-8b"
hardware = "h100-sxm"
enable_prefix_caching = true
num_gpu_blocks_override = 4000

[cost]
model = "roofline"
```
"""

# No annotations from the future: as texts, those of a hundred settings are worked out again by
# every command, twice.
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvsim.errors import ConfigError, check_choice
from kvsim.errors import nearest as nearest
from kvsim.settings.parsing import human_readable_int, parse_toml, typed
from kvsim.settings.versions import DEFAULT_ENGINE, DEFAULT_HARDWARE, DEFAULT_MODEL

MOST = 1 << 62
"""Whole numbers go up to here, so that sums of a few of them fit into 64 bits."""
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Natural = Annotated[int, Meta(ge=0, le=MOST)]


AboveZero = Annotated[float, Meta(gt=0)]
AtLeastZero = Annotated[float, Meta(ge=0)]
Gib = Annotated[float, Meta(ge=0, le=1e6)]


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a run, except the trace."""

    # -- load: when requests are sent -----------------------------------------------------------
    workload: str | None = None
    time_scale: AboveZero = 1.0
    request_rate: float | None = None
    burstiness: AboveZero = 1.0
    max_concurrency: Positive | None = None
    sessions: Literal["auto", "recorded", "closed"] = "auto"
    think_time_scale: AtLeastZero = 1.0
    max_think_time_s: AtLeastZero | None = None
    spread_ties: bool = False
    num_prompts: Positive | None = None
    ignore_eos: bool = False
    n: Positive = 1
    seed: Natural = 0

    # -- engine: what is scheduled when ---------------------------------------------------------
    engine: str = DEFAULT_ENGINE
    vllm_version: str | None = None
    block_manager: str | None = None
    enable_prefix_caching: bool | None = None
    block_size: Positive | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    max_model_len: Positive | Literal["auto"] | None = None
    enable_chunked_prefill: bool | None = None
    preemption_mode: Literal["recompute", "swap", "auto"] | None = None
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    victim: str | None = None
    watermark: Annotated[float, Meta(ge=0, lt=1)] | None = None
    scheduler_reserve_full_isl: bool | None = None
    long_prefill_token_threshold: Natural | None = None
    long_prefill_token_threshold_adaptive: bool | None = None
    max_num_active_seqs: Positive | None = None
    max_num_scheduled_tokens: Positive | None = None
    prefill_schedule_interval: Positive | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    prefix_cache_retention_interval: Natural | Literal["none"] | None = None
    mamba_cache_mode: Literal["none", "align"] | None = None
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    enable_lora: bool = False
    max_loras: Positive | None = None
    max_lora_rank: Positive | None = None
    async_scheduling: bool | None = None
    disable_async_output_proc: bool | None = None

    on_engine_error: Literal["stop", "reject"] = "stop"

    # -- memory: how many blocks there are ------------------------------------------------------
    model: str | None = None
    hardware: str | None = None
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    data_parallel_size: Positive = 1
    enable_expert_parallel: bool = False
    quantization: str | None = None
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    kv_cache_dtype: Literal[
        "auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"
    ] = "auto"
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    kv_cache_memory_bytes: Positive | None = None
    cpu_offload_gb: Gib = 0.0
    enforce_eager: bool = False
    cuda_graph_max_bs: Positive | None = None
    kv_offloading_size: Gib = 0.0
    kv_offloading_backend: Literal["native", "lmcache"] = "native"
    swap_space: Gib = 4.0
    num_gpu_blocks_override: Positive | None = None
    num_cpu_blocks_override: Natural | None = None
    memory_formula: Literal["vllm", "nano-vllm", "sglang"] | None = None

    # -- tables of keyword arguments ------------------------------------------------------------
    cost: dict[str, Any] = {}
    scheduler_args: dict[str, Any] = {}
    block_manager_args: dict[str, Any] = {}
    kv_connector_extra_config: dict[str, Any] = {}
    speculative_config: dict[str, Any] = {}
    kv_transfer_config: dict[str, Any] = {}
    goodput: dict[str, Annotated[float, Meta(gt=0, le=1e12)]] = {}

    @property
    def model_name(self) -> str:
        """The model, or kvsim's own for a first run."""
        return DEFAULT_MODEL if self.model is None else self.model

    @property
    def hardware_name(self) -> str:
        """The GPU, or kvsim's own for a first run."""
        return DEFAULT_HARDWARE if self.hardware is None else self.hardware


class About(NamedTuple):
    """What is said of a setting."""

    panel: str
    """Where the help shows it: `Load`, `Engine`, `Memory`, `Time` or `Result`."""
    text: str


@cache
def about() -> dict[str, About]:
    """What is said of each setting."""
    file = parse_toml(Path(__file__).with_name("config.toml").read_text("utf-8"))
    shown = {"model": DEFAULT_MODEL, "hardware": DEFAULT_HARDWARE}
    return {
        key: About(panel, text.format(**shown))
        for panel, texts in file.items()
        for key, text in texts.items()
    }


GOODPUT_METRICS = ("ttft", "tpot", "e2el")

JSON_TABLES = ("kv_connector_extra_config", "kv_transfer_config", "speculative_config")
"""Keys whose values are tables, given as JSON on the command line."""

TABLES = ("cost", "scheduler_args", "block_manager_args", *JSON_TABLES, "goodput")
"""Keys whose values are tables."""

SIZES = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")
"""Keys whose numbers may have a suffix, as in vLLM (0.33.0, vllm/engine/arg_utils.py)."""


def load_config(
    path: str | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Iterable[str] = (),
    beneath: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Settings of one run: defaults, then the TOML file, then flags, then `--set a.b=c`.

    `beneath`: settings that count less than the file's. Raises `ConfigError` naming the file, the
    key and the nearest right name.
    """
    table = {} if path is None else read_toml(path)
    return layered(table, path or "configuration", flags, assignments, beneath)


def layered(
    table: Mapping[str, Any],
    where: str,
    flags: Mapping[str, Any] | None = None,
    assignments: Iterable[str] = (),
    beneath: Mapping[str, Any] | None = None,
) -> RunConfig:
    """`load_config` of a table that was read at `where`."""
    check_keys(table, where)
    settings = merged({**(beneath or {}), **table}, flags or {})
    for assignment in assignments:
        _assign(settings, assignment)
    return make_config(settings, where)


def merged(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others over them; of a key that holds a table, key by key."""
    both = {**table, **over}
    for key in table.keys() & over.keys():
        if isinstance(table[key], Mapping) and isinstance(over[key], Mapping):
            both[key] = {**table[key], **over[key]}
    return both


def make_config(
    table: Mapping[str, Any], where: str = "configuration", kind: type[RunConfig] = RunConfig
) -> RunConfig:
    """A `RunConfig` from plain values, or a `ConfigError` that names the key.

    `kind`: the class to make, which may have further keys.
    """
    check_keys(table, where, kind)
    for key in TABLES:
        if key in table and not isinstance(table[key], Mapping):
            raise ConfigError(f"{where}: {key}: expected a table of keys, got {table[key]!r}")
    table = {
        key: read_size(key, value, f"{where}: {key}") if key in SIZES else value
        for key, value in table.items()
    }
    try:
        config: RunConfig = typed(table, kind)
    except msgspec.ValidationError as error:
        text, _, at = str(error).partition(" - at `$.")
        if not at:
            raise ConfigError(f"{where}: {_lower(text)}") from None
        key = at.rstrip("`").partition("[")[0]  # of an entry of a table, which it does not name
        wanted = _lower(text).partition(", got ")[0].replace(" | null", "")
        raise ConfigError(f"{where}: {key}: {wanted}, got {table.get(key)!r}") from None
    if config.request_rate is not None and not config.request_rate > 0:
        raise ConfigError(
            f"{where}: request_rate: {config.request_rate} is not above 0; use a rate in requests"
            " per second, or inf to send all at 0"
        )
    for key in config.goodput:
        check_choice(f"{where}: goodput", key, GOODPUT_METRICS, " (milliseconds)")
    return config


def read_size(key: str, value: Any, where: str) -> Any:
    """The number that a value of one of `SIZES` means; values other than text are returned as is.

    A `max_model_len` of -1 is `auto`, as in vLLM. Raises `ConfigError` that begins with `where`.
    """
    if key == "max_model_len" and str(value).strip().lower() in ("auto", "-1"):
        return "auto"
    if not isinstance(value, str):
        return value
    try:
        return human_readable_int(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r} {error}") from None


def read_toml(path: str) -> dict[str, Any]:
    """The table of a TOML file, or a `ConfigError` with its line."""
    try:
        return parse_toml(Path(path).read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # also UnicodeDecodeError
        raise ConfigError(f"{path}: not TOML: {error}") from None


def check_keys(table: Mapping[str, Any], where: str, kind: type[RunConfig] = RunConfig) -> None:
    """Refuse keys that `kind` does not know, with the nearest right name."""
    known = kind.__struct_fields__
    for key in table:
        if key not in known:
            raise ConfigError(
                f"{where}: unknown key {key!r};{nearest(key, known)}"
                " `kvsim run --help` lists them all"
            )


def to_table(config: RunConfig) -> dict[str, Any]:
    """The plain values of a configuration, in declaration order."""
    return {key: getattr(config, key) for key in config.__struct_fields__}


def _assign(table: dict[str, Any], assignment: str) -> None:
    """Put `a.b=value` into `table`; the value is TOML, or a bare word taken as text."""
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {assignment}: expected KEY=VALUE or TABLE.KEY=VALUE")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        value = text
    *parents, key = path.strip().split(".")
    for parent in parents:
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {assignment}: {parent!r} is not a table")
        table = inner
    table[key] = value


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
