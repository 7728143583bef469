"""Start-up logs in the formats of vLLM's versions, written for tests."""

from __future__ import annotations


def v1_log(
    version: str = "0.19.0",
    tokens: str = "41,408",
    *,
    process: str = "EngineCore pid=90",
    arguments: str = "'model': 'meta-llama/Llama-3.1-8B', 'max_model_len': 32768, 'port': 9000",
    further: str = "",
) -> str:
    """vLLM 0.14 to 0.20: size and concurrency are two lines, behind the names of processes."""
    server, engine = "(APIServer pid=1) INFO 04-15 07:22:41", f"({process}) INFO 04-15 07:23:01"
    folder = "/cache/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e"
    config = (
        f"model='{folder}', speculative_config=None, tokenizer='t', dtype=torch.bfloat16,"
        " max_seq_len=32768, tensor_parallel_size=1, pipeline_parallel_size=1,"
        " data_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto,"
        " device_config=cuda, enable_prefix_caching=True, enable_chunked_prefill=True,"
        " compilation_config={'mode': 3, 'pass_config': {}}"
    )
    return f"""\
{server} [utils.py:299]   █▄█▀ █     █     █     █  version {version}
{server} [utils.py:233] non-default args: {{'max_num_batched_tokens': 2048, {arguments}}}
{server} [model.py:1549] Using max model len 131072
{server} [scheduler.py:222] Chunked prefill is enabled with max_num_batched_tokens=2048.
{server} [vllm.py:791] Asynchronous scheduling is enabled.
{engine} [core.py:105] Initializing a V1 LLM engine (v{version}) with config: {config}
{engine} [gpu_worker.py:460] Available KV cache memory: 5.05 GiB
{engine} [kv_cache_utils.py:1319] GPU KV cache size: {tokens} tokens
{engine} [kv_cache_utils.py:1324] Maximum concurrency for 32,768 tokens per request: 1.26x
{further}"""


def v0_log(config: str = "num_scheduler_steps=1, use_async_output_proc=True") -> str:
    """vLLM 0.6.3: no brackets before messages, all arguments in a Namespace, blocks by name."""
    arguments = (
        "subparser='serve', model_tag='meta-llama/Meta-Llama-3-8B', host=None, port=8000,"
        " allowed_origins=['*'], model='meta-llama/Meta-Llama-3-8B', dtype='auto',"
        " kv_cache_dtype='auto', max_model_len=4096, block_size=16, swap_space=4,"
        " cpu_offload_gb=0, gpu_memory_utilization=0.9, max_num_batched_tokens=None,"
        " max_num_seqs=128, enable_lora=False, speculative_model=None, num_lookahead_slots=0,"
        " scheduler_delay_factor=0.0, preemption_mode=None, num_scheduler_steps=1,"
        " dispatch_function=<function serve at 0x7f2a>"
    )
    came_to = (
        "model='meta-llama/Meta-Llama-3-8B', speculative_config=None, rope_scaling=None,"
        " dtype=torch.bfloat16, max_seq_len=4096, load_format=LoadFormat.AUTO,"
        " tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None,"
        f" enforce_eager=False, kv_cache_dtype=auto, {config}, chunked_prefill_enabled=False,"
        " enable_prefix_caching=False, mm_processor_kwargs=None)"
    )
    at = "INFO 11-20 08:41:12"
    return f"""\
{at} api_server.py:528] vLLM API server version 0.6.3.post1
{at} api_server.py:529] args: Namespace({arguments})
{at} llm_engine.py:237] Initializing an LLM engine (v0.6.3.post1) with config: {came_to}
{at} gpu_executor.py:122] # GPU blocks: 27000, # CPU blocks: 2048
{at} gpu_executor.py:126] Maximum concurrency for 4096 tokens per request: 105.47x
"""
