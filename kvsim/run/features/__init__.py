"""Turns settings of vLLM V1's features into the parts of an engine that do them.

| module | settings |
|---|---|
| `offload.py`, `connectors.py` | `kv_offloading_size`, `kv_transfer_config`: tiers off the GPU |
| `disaggregation.py` | `kv_transfer_config` with a role: one side of a prefill/decode split |
| `pipeline.py` | `pipeline_parallel_size` |
| `speculation.py` | `speculative_config` |

What the parts decide is in `kvsim.engines.vllm_v1`.
"""
