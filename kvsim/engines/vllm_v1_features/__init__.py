"""vLLM V1 0.33.0 as people run it: each feature is a part beside one scheduler.

| module | part |
|---|---|
| `scheduler.py`, `pipelines.py` | the scheduler that asks the parts; how many batches are in flight |
| `connector.py` | what a KV connector is asked; `offloading.py`, `simple.py`, `nixl.py` are connectors |
| `cpu_tier.py` | chunks in CPU memory, and which of them make room: LRU, ARC |
| `speculation.py` | who proposes draft tokens, and what that costs |
| `lora.py` | how many adapters may run together |

Without any of them, `kvsim.engines.vllm_v1` makes the same decisions, faster.
"""
