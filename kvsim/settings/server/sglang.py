"""The arguments of `sglang.launch_server`, what they mean for a simulation, and what its log says.

Source: SGLang 0.5.23 `srt/server_args.py`, `srt/arg_groups/fields/`. The table has the arguments
that decide what is simulated, those of what is not, and most of those without effect, also under
earlier names; any other has to be left out.

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
from collections.abc import Iterable, Mapping
from typing import Any

from kvsim.errors import ConfigError
from kvsim.settings.parsing import parse_json
from kvsim.settings.server import values
from kvsim.settings.server.arguments import (
    NO_EFFECT,
    SLIGHT,
    Argument,
    Flag,
    Meaning,
    Table,
    Used,
    flags,
    interpret,
    notes,
    only_rope,
    or_else,
    spelled,
    unsimulated,
    used,
)
from kvsim.settings.server.log import Fact, Start, lines_with
from kvsim.settings.server.values import pairs, whole_pairs

BACKENDS = ("attention_backend", "decode_attention_backend")
"""Arguments that are no settings, but may decide the page size."""

_PAGES = {
    "cutedsl_mla": (32, 64),
    "cutlass_mla": (128,),
    "flashmla": (64,),
    "tokenspeed_mla": (32, 64),
    "trtllm_mha": (16, 32, 64),
    "trtllm_mla": (32, 64),
}
"""Attention backend → the page sizes that it can have; in place of another it takes the last one
(`srt/arg_groups/overrides.py`, `_mla_backend_page_constraints`)."""


def _off(value: Any) -> bool:
    return not values.switch(value)


def _table(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value
    try:
        found = parse_json(str(value))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("a JSON object")
    return found


_USED = [
    *used(values.model, "model model_path=model"),
    *used(values.dtype, "dtype"),
    *used(values.cache_dtype, "kv_cache_dtype"),
    *used(values.quantization, "quantization"),
    *used(values.length, "context_length=max_model_len"),
    *used(values.number, "mem_fraction_static=gpu_memory_utilization"),
    *used(values.switch, "disable_cuda_graph=enforce_eager", takes="nothing"),
    *used(
        values.whole,
        """
            chunked_prefill_size=max_num_batched_tokens cuda_graph_max_bs
            cuda_graph_max_bs_decode=cuda_graph_max_bs max_running_requests=max_num_seqs
            max_total_tokens=num_gpu_blocks_override page_size=block_size
            tensor_parallel_size tp_size=tensor_parallel_size
        """,
    ),
    Flag("disable_radix_cache", "nothing", Used("enable_prefix_caching", _off)),
    Flag("disable_overlap_schedule", "nothing", Used("async_scheduling", _off)),
    *used(values.text, "radix_eviction_policy", "block_manager_args"),
    *used(_table, "radix_eviction_policy_config", "block_manager_args"),
    # Those of `kvsim.engines.sglang.scheduler.Sglang` have their own names.
    *used(values.text, "retraction_policy schedule_policy", "scheduler_args"),
    *used(values.number, "schedule_conservativeness", "scheduler_args"),
    *used(
        values.switch,
        """
            disable_priority_preemption enable_mixed_chunk enable_priority_scheduling
            schedule_low_priority_values_first
        """,
        "scheduler_args",
        takes="nothing",
    ),
    *used(
        values.whole,
        """
            max_prefill_tokens max_queued_requests min_free_slots_delay prefill_decode_interval
            prefill_decode_interval_min_bs prefill_max_requests
            priority_scheduling_preemption_threshold
        """,
        "scheduler_args",
    ),
    *used(values.text, " ".join(BACKENDS)),
]

_IGNORED = [
    *flags(
        NO_EFFECT,
        switches="""
            allow-auto-truncate delete-ckpt-after-loading disable-fast-image-processor
            disable-tokenizer-batch-decode enable-cache-report enable-forward-pass-metrics
            enable-http2 enable-memory-saver enable-metrics enable-metrics-for-all-schedulers
            enable-mfu-metrics enable-request-time-stats-logging enable-response-store
            enable-ssl-refresh enable-strict-thinking enable-trace enable-weights-cpu-backup
            export-metrics-to-file grpc-mode incremental-streaming-output log-requests
            show-time-cost skip-server-warmup skip-tokenizer-init sleep-on-idle
            stream-response-default-include-usage strip-thinking-cache trust-remote-code use-ray
            weight-loader-disable-mmap weight-loader-prefetch-checkpoints
        """,
        values="""
            admin-api-key api-key base-gpu-id chat-template completion-template
            decode-log-interval default-chat-template-kwargs detokenizer-worker-num device
            dist-init-addr dist-timeout download-dir fastapi-root-path file-storage-path
            gc-warning-threshold-secs gpu-id-step grammar-backend hf-chat-template-name host
            kv-events-config load-format log-level log-level-http log-requests-format
            log-requests-level model-checksum model-config-parser model-loader-extra-config
            nccl-init-addr nccl-port nnodes node-rank otlp-traces-endpoint port
            preferred-sampling-params random-seed reasoning-parser revision sampling-defaults
            served-model-name soft-watchdog-timeout ssl-ca-certs ssl-certfile ssl-keyfile
            ssl-keyfile-password stream-interval tokenizer-backend tokenizer-mode tokenizer-path
            tokenizer-worker-num tool-call-parser tool-server warmups watchdog-timeout
            weight-loader-prefetch-num-threads weight-version
        """,
        lists="""
            bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token
            crash-dump-folder gc-threshold generation-tokens-buckets log-requests-target numa-node
            prompt-tokens-buckets
        """,
    ),
    *flags(
        SLIGHT,
        switches="""
            disable-chunked-prefix-cache disable-cuda-graph-padding disable-custom-all-reduce
            disable-flashinfer-autotune disable-flashinfer-cutlass-moe-fp4-allgather
            disable-outlines-disk-cache disable-piecewise-cuda-graph disable-prefill-cuda-graph
            disable-shared-experts-fusion enable-aiter-allreduce-fusion
            enable-broadcast-mm-inputs-process enable-cudagraph-gc enable-custom-logit-processor
            enable-deterministic-inference enable-dp-lm-head enable-dsa-fused-indexer
            enable-dynamic-batch-tokenizer enable-eplb enable-ep-moe
            enable-flashinfer-allreduce-fusion enable-flashinfer-trtllm-moe enable-fp32-lm-head
            enable-fused-qk-norm-rope enable-mscclpp enable-multimodal enable-nccl-nvls
            enable-p2p-check enable-piecewise-cuda-graph enable-prefix-mm-cache
            enable-profile-cuda-graph enable-quant-communications enable-return-hidden-states
            enable-return-routed-experts enable-symm-mem enable-tf32-matmul
            enable-tokenizer-batch-encode enable-torch-compile enable-torch-symm-mem
            flashinfer-mla-disable-ragged language-model-only mm-enable-dp-encoder pre-warm-nccl
            triton-attention-reduce-in-fp32
        """,
        values="""
            bf16-gemm-backend boundary-reduction cuda-graph-config cuda-graph-backend-decode
            cuda-graph-backend-prefill cuda-graph-max-bs-prefill deepep-config deepep-mode
            dsa-decode-backend dsa-prefill-backend dsa-topk-backend dsv4-attn-backend
            dsv4-prefill-backend ep-dispatch-algorithm ep-num-redundant-experts eplb-algorithm
            eplb-rebalance-num-iterations flashinfer-allreduce-fusion-backend
            flashinfer-mxfp4-moe-precision fp4-gemm-backend fp4-gemm-runner-backend
            fp8-gemm-backend fp8-gemm-runner-backend init-expert-location keep-mm-feature-on-device
            limit-mm-data-per-request linear-attn-backend linear-attn-decode-backend
            linear-attn-prefill-backend load-balance-method mamba-backend max-micro-batch-size
            mm-attention-backend mm-feature-transport mm-process-config mm-processor-worker-num
            model-impl moe-a2a-backend moe-dense-tp-size moe-runner-backend nsa-decode-backend
            nsa-prefill-backend piecewise-cuda-graph-max-tokens pp-max-micro-batch-size
            prefill-attention-backend sampling-backend scheduler-recv-interval torch-compile-max-bs
            triton-attention-num-kv-splits
        """,
        lists="cuda-graph-bs cuda-graph-bs-decode cuda-graph-bs-prefill",
    ),
]

_UNSIMULATED = [
    *unsimulated(
        "speculative decoding makes several tokens in a step",
        values="""
            speculative-algorithm speculative-draft-model-path speculative-eagle-topk
            speculative-num-draft-tokens speculative-num-steps speculative-dflash-block-size
            speculative-attention-mode speculative-draft-attention-backend
            speculative-draft-load-format speculative-draft-model-quantization
            speculative-draft-model-revision speculative-moe-a2a-backend
            speculative-moe-runner-backend speculative-token-map
        """,
        switches="enable-multi-layer-eagle speculative-adaptive",
    ),
    *unsimulated(
        "KV is kept in CPU memory or storage, too",
        switches="enable-flexkv enable-hicache enable-hierarchical-cache enable-lmcache",
        values="""
            hicache-io-backend hicache-mem-layout hicache-ratio hicache-size hicache-storage-backend
            hicache-storage-backend-extra-config hicache-storage-prefetch-policy
            hicache-write-policy
        """,
    ),
    *unsimulated(
        "KV moves between servers", values="disaggregation-mode", off=or_else("null", "none")
    ),
    *unsimulated(
        "KV moves between servers",
        values="""
            disaggregation-bootstrap-port disaggregation-ib-device disaggregation-transfer-backend
            num-reserved-decode-tokens
        """,
    ),
    *unsimulated("encodings move between servers", switches="encoder-only language-only"),
    *unsimulated("text is made by diffusion", values="dllm-algorithm dllm-algorithm-config"),
    *unsimulated(
        "images or video are made",
        values="num-gpus ring-degree ulysses-degree sp-degree adjust-frames",
        switches="enable-cfg-parallel dit-cpu-offload text-encoder-cpu-offload vae-cpu-offload",
    ),
    *unsimulated(
        "it makes the model another one than its name says",
        values="json-model-override-args",
        off=only_rope,
    ),
    *unsimulated(
        "several steps run without the scheduler",
        values="num-continuous-decode-steps",
        off=or_else(1),
    ),
    *unsimulated(
        "the tokens of a request are spread over GPUs (context parallelism)",
        values="attn-cp-size dcp-size decode-context-parallel-size",
        off=or_else(1),
    ),
    *unsimulated("prompts wait for other replicas", switches="enable-prefill-delayer"),
    *unsimulated(
        "it changes what layers with windows or states keep",
        switches="disable-hybrid-swa-memory",
        values="""
            mamba-full-memory-ratio mamba-radix-cache-strategy mamba-ssm-dtype mamba-track-interval
            max-mamba-cache-size swa-full-tokens-ratio
        """,
    ),
    *unsimulated(
        "adapters take memory and time",
        switches="enable-lora",
        values="max-loras-per-batch max-lora-rank",
        lists="lora-paths",
    ),
    *unsimulated(
        "several replicas run",
        switches="enable-dp-attention",
        values="attn-dp-size dp dp-size data-parallel-size",
        off=or_else(1),
    ),
    *unsimulated(
        "layers or experts are spread over GPUs",
        values="pp pp-size pipeline-parallel-size ep ep-size expert-parallel-size",
        off=or_else(1),
    ),
    *unsimulated(
        "weights are fetched from CPU memory as they are needed",
        values="cpu-offload-gb kt-weight-path kt-num-gpu-experts",
        off=or_else(0),
    ),
    *unsimulated(
        "two half batches overlap",
        switches="enable-two-batch-overlap enable-single-batch-overlap enable-pdmux",
    ),
    *unsimulated("chunks change with the load", switches="enable-dynamic-chunking"),
    *unsimulated("the model generates nothing", switches="is-embedding"),
]

SGLANG: Table = Table(
    program="python -m sglang.launch_server",
    positional="model_path",
    flags={flag.name: flag for flag in [*_USED, *_IGNORED, *_UNSIMULATED]},
    short={},
)
"""`sglang.launch_server` of SGLang 0.5.23."""

_SPELLED = {
    "CLIP_MAX_NEW_TOKENS_ESTIMATION": "clip_max_new_tokens",
    "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD": "in_batch_check_threshold",
    "IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD": "in_batch_deprioritize_threshold",
    "INIT_NEW_TOKEN_RATIO": "init_new_token_ratio",
    "MIN_NEW_TOKEN_RATIO_FACTOR": "min_new_token_ratio_factor",
    "NEW_TOKEN_RATIO_DECAY_STEPS": "new_token_ratio_decay_steps",
    "RETRACT_DECODE_STEPS": "retract_decode_steps",
}
"""Environment variable without `SGLANG_` → field of `kvsim.engines.sglang.server.Environment`."""

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
            sizes, at = _PAGES.get(said.pop(name), ()), meaning.sources.pop(name)
            if sizes and said.get("block_size", 1) not in sizes:
                meaning.set("block_size", sizes[-1], at)
            elif not sizes:
                meaning.ignored.setdefault(SLIGHT.why, []).append(spelled(name))
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
    found = {}
    for name, key in _SPELLED.items():
        text = variables.get(f"SGLANG_{name}")
        if text is not None:
            try:
                found[key] = values.number(text)
            except ValueError as error:
                raise ConfigError(f"{where}: SGLANG_{name}: takes {error}, got {text!r}") from None
    if found:
        meaning.set("scheduler_args.environment", found, where)


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
