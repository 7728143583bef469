"""vLLM V1 0.33.0 as people run it: each feature is a part beside one scheduler.

| module | part |
|---|---|
| `scheduler.py` | the scheduler that asks the parts, and how many batches are in flight |
| `connector.py` | what a KV connector is asked: `offloading.py`, `simple.py`, `nixl.py` |
| `cpu_tier.py` | chunks in CPU memory, and which of them make room: LRU, ARC |
| `search.py` | how much of a sequence such a tier restores |
| `speculation.py`, `acceptance.py` | who proposes draft tokens, and how many are accepted |
| `lora.py` | how many adapters may run together |
| `timed.py`, `lanes.py` | how long copies take, and who waits for them |
| `storage.py` | a tier below CPU memory |
| `offload_remarks.py` | what may surprise a user of a tier |
| `live.py`, `plan.py`, `standing.py` | the state of a request and of a step, and notes on it |

Without any of them, `kvsim.engines.vllm_v1` makes the same decisions, faster.
"""
