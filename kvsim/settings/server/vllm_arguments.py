"""Every argument of `vllm serve`, and what it means for a simulation.

Source: vLLM 0.33.0 `engine/arg_utils.py`, `entrypoints/common/cli_args.py`,
`entrypoints/cli/serve.py`. Arguments that only earlier versions have are at the end; they come
from the `engine/arg_utils.py` of 0.6.3, 0.7.3, 0.8.5, 0.9.2, 0.10.2, 0.12.0, 0.16.0 and 0.26.0.
"""

from __future__ import annotations

from kvsim.settings.server import values
from kvsim.settings.server.arguments import (
    NO_EFFECT,
    SLIGHT,
    Flag,
    Table,
    Unsimulated,
    empty,
    flags,
    only_rope,
    or_else,
    unsimulated,
    used,
)

_USED = [
    *used(values.model, "model model_tag=model"),
    *used(values.text, "scheduling_policy"),
    *used(values.dtype, "dtype"),
    *used(values.cache_dtype, "kv_cache_dtype"),
    *used(values.quantization, "quantization"),
    *used(values.length, "max_model_len"),
    *used(values.interval, "prefix_cache_retention_interval"),
    *used(values.table, "kv_transfer_config"),
    *used(values.speculation, "speculative_config"),
    *used(
        values.switch,
        """
            async_scheduling disable_hybrid_kv_cache_manager enable_chunked_prefill
            enable_expert_parallel enable_lora enable_prefix_caching enforce_eager
            long_prefill_token_threshold_adaptive scheduler_reserve_full_isl
        """,
        takes="nothing",
    ),
    *used(
        values.whole,
        """
            block_size data_parallel_size kv_cache_memory_bytes long_prefill_token_threshold
            max_lora_rank max_loras max_num_active_seqs max_num_batched_tokens
            max_num_scheduled_tokens max_num_seqs num_gpu_blocks_override pipeline_parallel_size
            prefill_schedule_interval tensor_parallel_size
        """,
    ),
    *used(
        values.number,
        """
            cpu_offload_gb gpu_memory_utilization device_memory_utilization=gpu_memory_utilization
            kv_offloading_size watermark
        """,
    ),
]

_NO_EFFECT = [
    # The server's front: addresses, names, logs, parsers of text.
    *flags(
        NO_EFFECT,
        switches="""
            aggregate-engine-logging allow-credentials cohere-is-reasoning-model
            cudagraph-metrics disable-fastapi-docs disable-log-stats disable-uvicorn-access-log
            enable-auto-tool-choice enable-flash-late-interaction enable-force-include-usage
            enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests
            enable-logging-iteration-details enable-mfu-metrics enable-offline-docs
            enable-per-request-metrics enable-prompt-tokens-details enable-request-id-headers
            enable-scale-out enable-server-load-tracking enable-ssl-refresh
            enable-tokenizer-info-endpoint exclude-tools-when-tool-choice-none
            fail-on-environ-validation grpc headless jit-monitor-verbose kv-cache-metrics
            log-error-stack return-tokens-as-token-ids tokens-only trust-request-chat-template
            trust-request-mm-kwargs
        """,
        values="""
            allowed-headers allowed-methods allowed-origins anthropic-disabled-thinking-effort
            api-server-count chat-template chat-template-content-format cohere-format config
            custom-histogram-buckets data-parallel-supervisor-port default-chat-template-kwargs
            disable-access-log-for-endpoints dp-supervisor-probe-failure-threshold
            dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s fingerprint-mode
            fingerprint-value grpc-port h11-max-header-count h11-max-incomplete-event-size host
            jit-monitor-mode kv-cache-metrics-sample kv-events-config log-config-file log-level
            logging-config max-log-len middleware otlp-traces-endpoint
            per-request-spec-decode-metrics port profiler-config reasoning-effort-map response-role
            root-path show-hidden-metrics-for-version shutdown-timeout sse-keep-alive-interval
            ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile tool-call-parser
            tool-parser-plugin tool-server tool-strict-level uds uvicorn-log-level watchdog-config
        """,
        lists="api-key collect-detailed-traces",
    ),
    # Where the model and its tokenizer come from, and how they are loaded.
    *flags(
        NO_EFFECT,
        switches="""
            allow-deprecated-quantization enable-cumem-allocator enable-ep-weight-filter
            enable-nccl-comm-suspend enable-sleep-mode skip-tokenizer-init
            sleep-mode-offload-cudagraph trust-remote-code use-tqdm-on-load
        """,
        values="""
            allowed-local-media-path code-revision config-format download-dir generation-config
            io-processor-plugin load-format max-parallel-loading-workers model-loader-extra-config
            override-generation-config pt-load-map-location renderer-num-workers revision
            safetensors-load-strategy safetensors-prefetch-block-size
            safetensors-prefetch-num-threads seed sleep-mode-backend tokenizer tokenizer-mode
            tokenizer-revision weight-transfer-config
        """,
        lists="""
            allowed-media-domains ignore-patterns served-model-name sleep-preserve-parameter-names
        """,
        maybe="hf-token",
    ),
    # Where processes run, and how they find each other.
    *flags(
        NO_EFFECT,
        switches="""
            data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb
            enable-fault-tolerance enable-shm-tensor-arena numa-bind ray-workers-use-nsight
        """,
        values="""
            cpu-distributed-timeout-seconds data-parallel-address data-parallel-backend
            data-parallel-rank data-parallel-rpc-port data-parallel-size-local
            data-parallel-start-rank device-ids distributed-executor-backend
            distributed-timeout-seconds fault-tolerance-config master-addr master-port nnodes
            node-rank worker-extension-cls
        """,
        lists="numa-bind-cpus numa-bind-nodes",
    ),
    # Of features that are refused where they are switched on.
    *flags(NO_EFFECT, values="offload-num-in-group offload-prefetch-step"),
    # What is sampled: a trace says how long outputs are.
    *flags(
        NO_EFFECT,
        values="""
            logprobs-mode prefix-caching-hash-algo reasoning-config reasoning-parser
            reasoning-parser-plugin structured-outputs-config watermark-config
        """,
    ),
    # What adapters are: a trace names them.
    *flags(
        NO_EFFECT,
        switches="""
            enable-mixed-moe-lora-format enable-moe-shared-loras enable-tower-connector-lora
            fully-sharded-loras specialize-active-lora
        """,
        values="default-mm-loras lora-dtype max-cpu-loras max-lora-cls-labels",
        lists="lora-modules lora-target-modules",
    ),
]

_SLIGHT = [
    # Which kernels run, and which graphs are captured.
    *flags(
        SLIGHT,
        switches="""
            dcp-q-replicate disable-cascade-attn disable-custom-all-reduce
            disable-nccl-for-dp-synchronization enable-batch-sharded-sampling enable-eplb
            enable-flashinfer-autotune enable-hc-sp monokernel swa-bounded-replay use-fp64-gumbel
        """,
        values="""
            additional-config all2all-backend attention-backend attention-config
            compilation-config cp-kv-cache-interleave-size dbo-decode-token-threshold
            dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size
            dp-sync-interval eplb-config expert-placement-strategy gdn-prefill-backend
            ir-op-priority
            kda-decode-backend kda-prefill-backend kernel-config linear-backend mamba-backend
            mamba-ssu-algorithm max-cudagraph-capture-size model-impl moe-backend
            optimization-level quantization-config sparse-indexer-topk-backend worker-cls
        """,
        lists="cudagraph-capture-sizes",
    ),
    # What is done beside the steps: logits, images.
    *flags(
        SLIGHT,
        switches="""
            disable-chunked-mm-input enable-mm-embeds enable-prompt-embeds
            enable-return-routed-experts enable-trace-replay interleave-mm-strings
            language-model-only mm-device-do-normalize mm-encoder-only return-sampling-mask
            skip-mm-profiling
        """,
        values="""
            aux-output-config ec-manager-config limit-mm-per-prompt max-logprobs media-io-kwargs
            mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
            mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-tp-mode
            mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type
            mm-processor-device mm-processor-kwargs mm-shm-cache-max-object-size-mb mm-tensor-ipc
            stream-interval video-pruning-method video-pruning-rate
        """,
        lists="logits-processors",
    ),
]

_UNSIMULATED = [
    Flag("omni", "nothing", Unsimulated("speech, images or video are made", empty, first=True)),
    *unsimulated(
        "speculative decoding is set up outside --speculative-config",
        values="spec-method spec-model spec-tokens",
    ),
    *unsimulated("text is made by diffusion, not token by token", values="diffusion-config"),
    *unsimulated("encodings move between servers", values="ec-transfer-config"),
    *unsimulated(
        "another program keeps the offloaded KV blocks",
        values="kv-offloading-backend",
        off=or_else("native"),
    ),
    *unsimulated(
        "the tokens of a request are spread over GPUs (context parallelism)",
        values="decode-context-parallel-size prefill-context-parallel-size",
        off=or_else(1),
    ),
    *unsimulated(
        "two half batches overlap", switches="enable-dbo", values="ubatch-size", off=or_else(0)
    ),
    *unsimulated(
        "the number of replicas changes as it runs",
        switches="enable-elastic-ep",
        values="elastic-ep-max-dp-size",
        off=or_else(-1),
    ),
    *unsimulated(
        "requests are turned away when the queue is long",
        values="max-num-queued-reqs max-num-queued-tokens",
    ),
    *unsimulated(
        "another scheduler decides",
        values="scheduler-cls",
        off=or_else(
            "vllm.v1.core.sched.scheduler.Scheduler",
            "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
            "vllm.core.scheduler.Scheduler",
        ),
    ),
    *unsimulated(
        "it changes how layers of several kinds share the pool",
        switches="disable-sliding-window kv-sharing-fast-prefill",
    ),
    *unsimulated("hits end between blocks", values="prefix-match-unit"),
    *unsimulated("layers keep KV of different types", lists="kv-cache-dtype-skip-layers"),
    *unsimulated(
        "weights are fetched from CPU memory as they are needed",
        values="offload-backend offload-group-size",
        lists="cpu-offload-params offload-params",
        off=or_else("auto", "uva", 0),
    ),
    *unsimulated(
        "it changes what Mamba layers keep",
        switches="""
            enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint
            use-replayssm
        """,
        values="""
            mamba-block-size mamba-cache-dtype mamba-cache-philox-rounds mamba-ssm-cache-dtype
            replayssm-buffer-len
        """,
        off=or_else("auto", "none", 0),
    ),
    # In 0.33.0, the mode follows from prefix caching; earlier versions also have `all`.
    *unsimulated(
        "it changes what Mamba layers keep",
        values="mamba-cache-mode",
        off=or_else("auto", "none", "align"),
    ),
    *unsimulated("the model has a memory of its own", values="engram-config"),
    *unsimulated("the model generates nothing", values="runner", off=or_else("auto", "generate")),
    *unsimulated("the model generates nothing", values="convert", off=or_else("auto")),
    *unsimulated("the model generates nothing", values="pooler-config"),
    *unsimulated(
        "it doubles the default max_num_seqs and max_num_batched_tokens",
        values="performance-mode",
        off=or_else("balanced", "interactivity"),
    ),
    *unsimulated(
        "it makes the model another one than its name says",
        values="hf-config-path model-class-overrides",
    ),
    *unsimulated(
        "it makes the model another one than its name says",
        values="hf-overrides",
        off=only_rope,
    ),
]

_EARLIER = [
    *used(values.number, "swap_space"),
    *used(values.text, "preemption_mode"),
    *used(values.switch, "disable_async_output_proc", takes="nothing"),
    *flags(
        NO_EFFECT,
        switches="""
            disable-frontend-multiprocessing disable-log-requests disable-mm-preprocessor-cache
            enable-lora-bias enable-reasoning guided-decoding-disable-additional-properties
            guided-decoding-disable-any-whitespace guided-decoding-disable-fallback
            use-v2-block-manager worker-use-ray
        """,
        values="""
            device guided-decoding-backend logits-processor-pattern long-lora-scaling-factors
            lora-extra-vocab-size max-prompt-adapter-token max-prompt-adapters
            override-neuron-config tokenizer-pool-extra-config tokenizer-pool-size
            tokenizer-pool-type
        """,
    ),
    *flags(
        SLIGHT,
        switches="""
            calculate-kv-scales enable-bf16x3-router-gemm enable-multimodal-encoder-data-parallel
            eplb-log-balancedness multi-step-stream-outputs
        """,
        values="""
            eplb-step-interval eplb-window-size max-context-len-to-capture max-seq-len-to-capture
            num-redundant-experts override-attention-dtype quantization-param-path rope-scaling
            rope-theta
        """,
        lists="cuda-graph-sizes",
    ),
    *unsimulated(
        "speculative decoding is set up outside --speculative-config",
        values="num-lookahead-slots num-speculative-tokens speculative-model",
        off=or_else(0),
    ),
    *flags(
        NO_EFFECT,
        switches="disable-logprobs-during-spec-decoding speculative-disable-mqa-scorer",
        values="""
            ngram-prompt-lookup-max ngram-prompt-lookup-min spec-decoding-acceptance-method
            speculative-disable-by-batch-size speculative-draft-tensor-parallel-size
            speculative-max-model-len speculative-model-quantization
            typical-acceptance-sampler-posterior-alpha
            typical-acceptance-sampler-posterior-threshold
        """,
    ),
    *unsimulated(
        "several steps run without the scheduler", values="num-scheduler-steps", off=or_else(1)
    ),
    *unsimulated("admission waits on purpose", values="scheduler-delay-factor", off=or_else(0)),
    *unsimulated(
        "several prompts share a step by a rule of its own",
        values="max-num-partial-prefills max-long-partial-prefills",
        off=or_else(1),
    ),
    *unsimulated(
        "adapters take memory and time",
        switches="enable-prompt-adapter",
        values="qlora-adapter-name-or-path",
    ),
    *unsimulated("the model generates nothing", values="task", off=or_else("auto", "generate")),
    *unsimulated("the model generates nothing", values="override-pooler-config"),
    *unsimulated(
        "it changes what Mamba layers keep", switches="enable-mamba-fine-grained-prefix-cache"
    ),
]

VLLM: Table = Table(
    program="vllm serve",
    positional="model",
    flags={flag.name: flag for flag in [*_USED, *_NO_EFFECT, *_SLIGHT, *_UNSIMULATED, *_EARLIER]},
    short={
        "-ac": "attention_config",
        "-asc": "api_server_count",
        "-cc": "compilation_config",
        "-dc": "diffusion_config",
        "-dcp": "decode_context_parallel_size",
        "-dp": "data_parallel_size",
        "-dpa": "data_parallel_address",
        "-dpb": "data_parallel_backend",
        "-dpe": "data_parallel_external_lb",
        "-dph": "data_parallel_hybrid_lb",
        "-dpl": "data_parallel_size_local",
        "-dpm": "data_parallel_multi_port_external_lb",
        "-dpn": "data_parallel_rank",
        "-dpp": "data_parallel_rpc_port",
        "-dpr": "data_parallel_start_rank",
        "-ep": "enable_expert_parallel",
        "-n": "nnodes",
        "-O": "optimization_level",
        "-pcp": "prefill_context_parallel_size",
        "-pp": "pipeline_parallel_size",
        "-q": "quantization",
        "-r": "node_rank",
        "-sc": "speculative_config",
        "-tp": "tensor_parallel_size",
    },
)
"""`vllm serve` of vLLM 0.33.0, with the arguments of earlier versions."""
