"""One run's settings: a flat table whose every key is also a flag.

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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

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


def _panel(name: str) -> Callable[[str], Meta]:
    """What describes a setting in a panel of the help."""
    return lambda text: Meta(description=text, extra={"panel": name})


_load, _engine, _memory, _cost, _result = map(
    _panel, ("Load", "Engine", "Memory", "Time", "Result")
)
AboveZero = Annotated[float, Meta(gt=0)]
AtLeastZero = Annotated[float, Meta(ge=0)]
Gib = Annotated[float, Meta(ge=0, le=1e6)]


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a run, except the trace."""

    # -- load: when requests are sent -----------------------------------------------------------
    workload: Annotated[
        str | None,
        _load("Workload to generate without a trace: TOML or a name in configs/workloads."),
    ] = None
    time_scale: Annotated[
        AboveZero, _load("Multiplies recorded gaps: 0.5 sends twice as fast.")
    ] = 1.0
    request_rate: Annotated[
        float | None,
        _load(
            "Requests per second of a random process instead of the recorded arrivals;"
            " inf: all at 0."
        ),
    ] = None
    burstiness: Annotated[
        AboveZero,
        _load("Gamma shape of the gaps under --request-rate: 1 Poisson, below 1 bursty, inf even."),
    ] = 1.0
    max_concurrency: Annotated[
        Positive | None, _load("At most this many requests in flight; the rest wait outside.")
    ] = None
    sessions: Annotated[
        Literal["auto", "recorded", "closed"],
        _load(
            "closed: a turn waits for the previous one plus its think time; recorded: as recorded;"
            " auto: closed where the trace says `after`."
        ),
    ] = "auto"
    think_time_scale: Annotated[
        AtLeastZero, _load("Multiplies think times of closed sessions.")
    ] = 1.0
    max_think_time_s: Annotated[AtLeastZero | None, _load("Caps think times, after scaling.")] = (
        None
    )
    spread_ties: Annotated[
        bool, _load("Spread requests that share a recorded time over the gap that follows.")
    ] = False
    num_prompts: Annotated[
        Positive | None, _load("Replay only this many requests, from the start of the trace.")
    ] = None
    ignore_eos: Annotated[
        bool,
        _load(
            "Clients announce how long outputs become, as benchmarks with --ignore-eos do; only"
            " SGLang looks at what they announce."
        ),
    ] = False
    n: Annotated[Positive, _load("Samples per request (parallel sampling).")] = 1
    seed: Annotated[Natural, _load("Seed of every random stream.")] = 0

    # -- engine: what is scheduled when ---------------------------------------------------------
    engine: Annotated[
        str, _engine("Scheduler to imitate: a name of `kvsim policies`, or module:Class.")
    ] = DEFAULT_ENGINE
    vllm_version: Annotated[
        str | None,
        _engine(
            "Release of vLLM whose defaults, memory use and, with vllm-v1, rules of scheduling are"
            " simulated, as in 0.19.0. Default: the engine's."
        ),
    ] = None
    block_manager: Annotated[
        str | None,
        _engine(
            "One that the engine takes, or module:Class; default: as --enable-prefix-caching says."
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None, _engine("Share blocks between equal prefixes; default: as the engine does.")
    ] = None
    block_size: Annotated[
        Positive | None, _engine("Tokens per block; default: the engine's (16, nano-vllm 256).")
    ] = None
    max_num_seqs: Annotated[
        Positive | None, _engine("Most sequences running at once; default: the engine's, by GPU.")
    ] = None
    max_num_batched_tokens: Annotated[
        Positive | None,
        _engine("Most tokens computed in one step, as 8192 or 8K; default: the engine's, by GPU."),
    ] = None
    max_model_len: Annotated[
        Positive | Literal["auto"] | None,
        _engine(
            "Longest prompt plus output, as 32768, 32K or 32k; auto or -1: the most that fits;"
            " default: the model's own limit."
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool | None,
        _engine(
            "Split prompts into chunks that share steps with decodes; default: as the engine does."
        ),
    ] = None
    preemption_mode: Annotated[
        Literal["recompute", "swap", "auto"] | None,
        _engine(
            "How a preempted request gives up its blocks; auto: the cheaper way at that moment;"
            " default: the engine's own rule."
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"] | None, _engine("Order of the waiting queue; default: fcfs.")
    ] = None
    victim: Annotated[
        str | None,
        _engine(
            "Which request is preempted when blocks run out: a name of `kvsim policies`, or"
            " module:function; default: the engine's own rule."
        ),
    ] = None
    watermark: Annotated[
        Annotated[float, Meta(ge=0, lt=1)] | None,
        _engine(
            "Share of the GPU blocks kept free when a request is admitted;"
            " default: the engine's (vLLM 0.x 0.01, V1 0)."
        ),
    ] = None
    scheduler_reserve_full_isl: Annotated[
        bool | None,
        _engine("V1: admit a request only if its whole known sequence fits; default: yes."),
    ] = None
    long_prefill_token_threshold: Annotated[
        Natural | None, _engine("V1: longest chunk of one request; default: 0, no limit.")
    ] = None
    long_prefill_token_threshold_adaptive: Annotated[
        bool | None,
        _engine(
            "V1 from 0.31: a chunk may also be max_num_batched_tokens / number of requests, running"
            " or waiting; default: no."
        ),
    ] = None
    max_num_active_seqs: Annotated[
        Positive | None,
        _engine("V1 from 0.31: requests that may run at once; default: max_num_seqs."),
    ] = None
    max_num_scheduled_tokens: Annotated[
        Positive | None,
        _engine("V1: tokens that a step computes; default: max_num_batched_tokens."),
    ] = None
    prefill_schedule_interval: Annotated[
        Positive | None,
        _engine(
            "V1 from 0.33: steps from one with prompts to the next, while requests decode; default:"
            " 1."
        ),
    ] = None
    disable_hybrid_kv_cache_manager: Annotated[
        bool | None,
        _engine("V1: layers with windows keep all tokens, as full attention does; default: no."),
    ] = None
    prefix_cache_retention_interval: Annotated[
        Natural | Literal["none"] | None,
        _engine(
            "V1: what windows and states leave in the prefix cache: 0 only the ends of prompts, a"
            " number also what lies before its multiples, none everything; default: 0."
        ),
    ] = None
    mamba_cache_mode: Annotated[
        Literal["none", "align"] | None,
        _engine("V1: align keeps states at block ends; default: with a prefix cache."),
    ] = None
    enable_lora: Annotated[
        bool, _engine("V1: serve requests that name an adapter (`lora` in the trace) by it.")
    ] = False
    max_loras: Annotated[Positive | None, _engine("V1: most adapters in one step; default: 1.")] = (
        None
    )
    max_lora_rank: Annotated[
        Positive | None,
        _memory("V1: highest rank of an adapter, for which memory is kept; default: 16."),
    ] = None
    async_scheduling: Annotated[
        bool | None, _engine("V1: compose a step while the one before computes; default: yes.")
    ] = None
    disable_async_output_proc: Annotated[
        bool | None,
        _engine(
            "vLLM 0.6.3: test for the end of a request at once, not one step later; default: no."
        ),
    ] = None

    on_engine_error: Annotated[
        Literal["stop", "reject"],
        _engine(
            "Where the real engine would die or get stuck: stop the run there, or run it again with"
            " the request refused at arrival."
        ),
    ] = "stop"

    # -- memory: how many blocks there are ------------------------------------------------------
    model: Annotated[
        str | None,
        _memory(
            "A name as on Hugging Face or in configs/models, or a config.json;"
            f" default: {DEFAULT_MODEL}."
        ),
    ] = None
    hardware: Annotated[
        str | None,
        _memory(
            "A GPU as people write it (h100, rtx 4090), or the path of a TOML;"
            f" default: {DEFAULT_HARDWARE}."
        ),
    ] = None
    tensor_parallel_size: Annotated[Positive, _memory("GPUs that share each layer.")] = 1
    pipeline_parallel_size: Annotated[
        Positive, _memory("Groups of GPUs, each of which holds a part of the layers.")
    ] = 1
    data_parallel_size: Annotated[
        Positive, _memory("Replicas of the whole, behind vLLM's balancer in `run`, `check`.")
    ] = 1
    enable_expert_parallel: Annotated[
        bool, _memory("Place whole experts on GPUs; changes nothing without experts.")
    ] = False
    quantization: Annotated[
        str | None, _memory("Format of the weights; default: as in the checkpoint.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float16", "bfloat16", "float32"],
        _memory("Type of weights and activations; auto: the model's own."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"],
        _memory(
            "Type of the KV cache; auto: as --dtype, or FP8 if the checkpoint has scales for it"
            " (vllm-v1, as vLLM from 0.15 on)."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        _memory(
            "Share of GPU memory the engine may use; default: the version's (0.9, from vLLM 0.20 on"
            " 0.92)."
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        _memory("Bytes for KV blocks on each GPU, as 10G; overrides the memory budget."),
    ] = None
    cpu_offload_gb: Annotated[
        Gib, _memory("GiB of each GPU's weights that are kept in CPU memory.")
    ] = 0.0
    enforce_eager: Annotated[
        bool, _memory("Capture no CUDA graphs, so that they take no memory.")
    ] = False
    cuda_graph_max_bs: Annotated[
        Positive | None,
        _memory(
            "Sequences of the largest decode step that SGLang captures as a CUDA graph; by default"
            " by GPU memory."
        ),
    ] = None
    kv_offloading_size: Annotated[
        Gib,
        _memory(
            "GiB of CPU memory that keep KV blocks, all GPUs together (vLLM V1's native backend); 0"
            " switches it off."
        ),
    ] = 0.0
    kv_offloading_backend: Annotated[
        Literal["native", "lmcache"],
        _memory("What keeps the blocks of --kv-offloading-size; only native is simulated."),
    ] = "native"
    swap_space: Annotated[Gib, _memory("GiB of CPU memory per GPU for swapped blocks.")] = 4.0
    num_gpu_blocks_override: Annotated[
        Positive | None, _memory("GPU blocks; overrides the memory budget.")
    ] = None
    num_cpu_blocks_override: Annotated[
        Natural | None, _memory("CPU blocks; overrides --swap-space.")
    ] = None
    memory_formula: Annotated[
        Literal["vllm", "nano-vllm", "sglang"] | None,
        _memory("Engine whose formula counts the blocks; default: the engine's own."),
    ] = None

    # -- tables of keyword arguments ------------------------------------------------------------
    cost: Annotated[
        dict[str, Any], _cost("`model`: constant, roofline or table; the rest: its arguments.")
    ] = {}
    scheduler_args: Annotated[dict[str, Any], _engine("Further arguments of the engine.")] = {}
    block_manager_args: Annotated[
        dict[str, Any], _engine("Further arguments of the block manager.")
    ] = {}
    kv_connector_extra_config: Annotated[
        dict[str, Any],
        _memory(
            "Arguments of the KV offload, as in vLLM's `--kv-transfer-config`: blocks_per_chunk,"
            " eviction_policy, store_threshold..."
        ),
    ] = {}
    speculative_config: Annotated[
        dict[str, Any],
        _engine(
            "V1: speculative decoding, vLLM's own table: method, num_speculative_tokens, model...;"
            " and how many drafts are accepted: acceptance_rate, synthetic_acceptance_rates..."
        ),
    ] = {}
    kv_transfer_config: Annotated[
        dict[str, Any],
        _memory(
            "vLLM's own table, on the command line as JSON: kv_connector (OffloadingConnector,"
            " SimpleCPUOffloadConnector, NixlConnector or module:Class), kv_role,"
            " kv_connector_extra_config."
        ),
    ] = {}
    goodput: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1e12)]],
        _result("Objectives in milliseconds for ttft, tpot, e2el; all must hold."),
    ] = {}

    @property
    def model_name(self) -> str:
        """The model, or kvsim's own for a first run."""
        return DEFAULT_MODEL if self.model is None else self.model

    @property
    def hardware_name(self) -> str:
        """The GPU, or kvsim's own for a first run."""
        return DEFAULT_HARDWARE if self.hardware is None else self.hardware


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
