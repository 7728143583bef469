"""Turns settings of vLLM V1's features into the parts of an engine that do them.

| module | settings |
|---|---|
| `offload.py` | `kv_offloading_size`, `kv_transfer_config`: what they ask for |
| `connectors.py` | the connectors of tiers off the GPU, and of one side of a prefill/decode split |
| `speculation.py` | `speculative_config` |

What the parts decide is in `kvsim.engines.vllm_v1`.
"""
