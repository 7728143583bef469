"""A small file of each foreign format, as its tool would write it."""

from __future__ import annotations

import json
from typing import Any


def _lines(*rows: Any) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _bench(**changes: Any) -> dict[str, Any]:
    """Three requests of vLLM's client: the second failed, the third was sent before the first."""
    return {
        "date": "20260101-000000",
        "tokenizer_id": "m",
        "request_rate": 2.0,
        "max_concurrency": 8,
        "request_throughput": 1.5,
        "total_input_tokens": 300,
        "input_lens": [100, 200, 300],
        "output_lens": [3, 0, 2],
        "start_times": [1000.5, 1000.6, 1000.25],
        "ttfts": [0.1, 0.0, 0.2],
        "itls": [[0.01, 0.02], [], [0.03]],
        "latencies": [0.13, 0.0, 0.23],
        "queue_times": [0.0, 0.0, 0.5],
        "errors": ["", "timed out", ""],
    } | changes


def _sglang() -> dict[str, Any]:
    bench = _bench(dataset_name="random", backend="sglang", request_rate="inf")
    for key in ("tokenizer_id", "start_times", "latencies", "queue_times"):
        del bench[key]
    return bench


def _qwen(chat: int, parent: int, time: float, length: int, ids: list[int]) -> dict[str, Any]:
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": time,
        "input_length": length,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": ids,
    }


def weka(name: str = "trace_1", think_s: float = 2.0) -> dict[str, Any]:
    """A session of two requests with a sub-agent between them; the second extends the first."""
    first = {"t": 0.0, "in": 130, "out": 70, "hash_ids": [1, 2], "api_time": 1.5}
    agent = {"t": 3.5, "requests": [{"t": 0.0, "in": 64, "out": 0, "hash_ids": [9]}]}
    second = {"t": 9.0, "in": 260, "out": 4, "hash_ids": [1, 2, 3, 4], "think_time": think_s}
    return {
        "id": name,
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [first, agent, second],
    }


def _aiperf(number: int, start_ns: int, **changes: Any) -> dict[str, Any]:
    metadata = {
        "x_request_id": f"r{number}",
        "request_start_ns": start_ns,
        "request_end_ns": start_ns + 10**9,
        "benchmark_phase": "profiling",
        "x_correlation_id": "c",
        "turn_index": number,
    }
    metrics = {
        "input_sequence_length": {"value": 50 + number, "unit": "tokens"},
        "output_sequence_length": {"value": 7, "unit": "tokens"},
        "time_to_first_token": {"value": 80.0, "unit": "ms"},
        "request_latency": {"value": 1000.0, "unit": "ms"},
    }
    return {"metadata": metadata | changes, "metrics": metrics, "error": None}


def _guidellm() -> dict[str, Any]:
    done = {
        "request_id": "a",
        "prompt_tokens": 512,
        "output_tokens": 128,
        "request_start_time": 1_700_000_000.5,
        "time_to_first_token_ms": 90.0,
        "request_latency": 2.0,
    }
    earlier = done | {"request_id": "b", "request_start_time": 1_700_000_000.25}
    requests = {"successful": [done, earlier], "errored": [{}], "incomplete": [{}, {}]}
    return {"metadata": {"version": 1}, "benchmarks": [{"requests": requests}]}


def _talk(*said: str) -> dict[str, Any]:
    names = ("human", "gpt")
    messages = [{"from": names[i % 2], "value": text} for i, text in enumerate(said)]
    return {"id": "same", "conversations": messages}


def _lmcache(time: float, length: int, hashes: list[str]) -> dict[str, Any]:
    return {
        "timestamp": time,
        "request_id": f"r{time}",
        "model_name": "m",
        "chunk_size": 256,
        "seq_len": length,
        "chunk_hashes": hashes,
    }


def _batch(number: int, text: str) -> dict[str, Any]:
    parts = [{"role": "system", "content": "x" * 640}, {"role": "user", "content": text}]
    body = {"model": "m", "messages": parts, "max_tokens": 100}
    url = "/v1/chat/completions"
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


_VLLM_LOG = """\
INFO 11-22 06:00:00 [kv_cache_utils.py:864] GPU KV cache size: 447,008 tokens
DEBUG 11-22 06:00:01 [request_logger.py:50] Request a details: prompt: 'hi', \
prompt_token_ids: [1, 2, 3], prompt_embeds shape: None.
INFO 11-22 06:00:01 [request_logger.py:60] Received request a: params: SamplingParams(n=1, \
max_tokens=16, min_tokens=0), lora_request: None.
INFO 11-22 06:00:03 [logger.py:39] Received request b: prompt: 'x', params: SamplingParams(n=1, \
max_tokens=8), prompt_token_ids: [1, 2], lora_request: None.
INFO 11-22 06:00:04 [request_logger.py:60] Received request c: params: SamplingParams(n=1, \
max_tokens=16), lora_request: None.
"""


def _claude(
    type: str,
    second: int,
    id: str = "",
    input: int = 0,
    created: int = 0,
    read: int = 0,
    output: int = 0,
    model: str = "claude-opus-4-6",
    side: bool = False,
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": type, "content": "text"}
    if id:
        usage = {"input_tokens": input, "cache_creation_input_tokens": created}
        usage |= {"cache_read_input_tokens": read, "output_tokens": output}
        message |= {"id": id, "model": model, "usage": usage}
    return {
        "parentUuid": None,
        "isSidechain": side,
        "sessionId": "f3e6c061",
        "type": type,
        "timestamp": f"2026-04-28T06:30:0{second}.000Z",
        "message": message,
    }


def _span(id: str, start_ns: int, facts: dict[str, Any], output: Any) -> dict[str, Any]:
    facts = {**facts, "gen_ai.usage.output_tokens": output}
    return {
        "traceId": "5b8e",
        "spanId": id,
        "name": "chat",
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + 10**9),
        "attributes": [
            {"key": key, "value": {"stringValue" if key.endswith("name") else "intValue": value}}
            for key, value in facts.items()
        ],
    }


def _spans(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": list(spans)}]}]}


def _perf(start: float, input: int, output: int, error: str | None) -> dict[str, Any]:
    info = {"input_tokens": input, "output_tokens": output, "output_token_times": [start + 0.125]}
    times = {"start_time": start, "end_time": start + 2}
    return {**times, "request": "{}", "response": "", "info": info, "error": error}


def _generation(id: str, second: int, **usage: Any) -> dict[str, Any]:
    return {
        "id": id,
        "traceId": "trace",
        "type": "GENERATION",
        "startTime": f"2025-06-26T06:16:{second}.504Z",
        "completionStartTime": f"2025-06-26T06:16:{second + 1}.504Z",
        "endTime": f"2025-06-26T06:16:{second + 3}.504Z",
        "model": "qwen3",
        **usage,
    }


def _spend(id: str, start: str, prompt: int, output: int, **more: Any) -> dict[str, Any]:
    times = {"startTime": start, "endTime": start, "completionStartTime": None}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "call_type": "acompletion"}
    return {"request_id": id, "model": "gpt-oss-120b", **times, **counts, **more}


SAMPLES: dict[str, str] = {
    "vllm-bench": _lines(_bench()),
    "sglang-bench": _lines(_sglang()),
    "qwen": _lines(
        _qwen(10, -1, 0.5, 40, [1, 2, 3]),
        _qwen(11, 10, 9.5, 64, [1, 2, 4, 5]),
        _qwen(12, 99, 10.0, 16, [7]),
    ),
    "weka": json.dumps(weka(), indent=1),
    "burstgpt": "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,"
    "Total tokens,Log Type\n5.5,0,3.4,ChatGPT,610,289,899,Chat\n7,0,3.4,GPT-4,20,0,20,Chat\n"
    "6.25,1,3.4,GPT-4,30,5,35,Chat\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,500,100\n0.75,501,101\n",
    "sharegpt": json.dumps(
        [_talk("q" * 130, "a" * 70, "more", "sure" * 40), _talk("q" * 130), _talk("q" * 130, "b")]
    ),
    "custom": _lines(
        {"prompt": "p" * 128, "output_tokens": 10},
        {"prompt": "", "output_tokens": 10},
        {"prompt": "p" * 64 + "q" * 64, "output_tokens": 20},
    ),
    "openai-batch": _lines(_batch(0, "hello"), _batch(1, "bye")),
    "aiperf": _lines(
        _aiperf(9, 5, benchmark_phase="warmup"),
        _aiperf(0, 10**18),
        _aiperf(1, 10**18 + 3 * 10**9),
        _aiperf(2, 10**18 + 5 * 10**9, was_cancelled=True),
    ),
    "guidellm": json.dumps(_guidellm(), indent=2),
    "claude-code": _lines(
        {"type": "summary", "summary": "a session", "leafUuid": "u9"},
        _claude("user", 0),
        _claude("assistant", 2, "m1", 10, 1000, 0, 1),
        _claude("assistant", 3, "m1", 10, 1000, 0, 40),
        _claude("user", 8),
        _claude("assistant", 9, "m2", 5, 30, 1008, 20),
        _claude("assistant", 9, "m3", 3, 0, 0, 0, "<synthetic>"),
        _claude("assistant", 5, "s1", 4, 496, 0, 8, side=True),
    ),
    "otel": _lines(
        _spans(
            _span("01", 1000, {"gen_ai.operation.name": "invoke_agent"}, 0),
            _span("02", 2000, {"gen_ai.usage.input_tokens": "1200"}, "300"),
        ),
        _spans(_span("03", 1500, {"gen_ai.usage.input_tokens": 7}, 9)),
    ),
    "inference-perf": json.dumps(
        [
            _perf(1393.5, 591, 140, None),
            _perf(1393.25, 20, 3, "timeout"),
            _perf(1393.25, 30, 5, None),
        ]
    ),
    "langfuse": json.dumps(
        {
            "id": "trace",
            "observations": [
                {"id": "a", "type": "SPAN", "startTime": "2025-06-26T06:16:19.504Z"},
                _generation(
                    "b", 20, usageDetails={"input": 40, "cache_read_input_tokens": 60, "output": 9}
                ),
                _generation("c", 19, usage={"promptTokens": 50, "completionTokens": 5}),
            ],
        },
        indent=1,
    ),
    "litellm": json.dumps(
        [
            _spend("r1", "2026-02-26T03:47:25.5+00:00", 10, 8),
            _spend("r2", "2026-02-26T03:47:24.5+00:00", 11, 9),
            _spend("r3", "2026-02-26T03:47:24.6+00:00", 12, 3, status="failure"),
            _spend("r4", "2026-02-26T03:47:24.7+00:00", 13, 4, cache_hit="True"),
        ]
    ),
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2024-05-10 00:00:01.009930+00:00,2163,6\r\n2024-05-10 00:00:00.009930+00:00,2162,5\r\n",
    "lmcache": _lines(
        _lmcache(1711929600.5, 600, ["0xab", "0xcd"]),
        _lmcache(1711929600.25, 512, ["0xab", "0xef"]),
    ),
    "llmservingsim": _lines(
        {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 7, "input_tok_ids": [1, 2, 3]},
        {"input_toks": 2, "output_toks": 2, "arrival_time_ns": 9, "input_tok_ids": [1, 2]},
    ),
    "vllm-log": _VLLM_LOG,
    "table": "id,arrival_ms,input_tokens,output_tokens\na,1500,10,2\nb,1000,12,3\n",
    "mooncake": _lines(
        {"timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]},
        {"timestamp": 2, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]},
    ),
}
"""Format → the text of a small file."""
