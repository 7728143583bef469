"""Block managers: who holds which KV block, and what is still there to be hit.

A manager is a subclass of `kvsim.blocks.tables.Tables`. Its constructor names what it wants to
know: `block_size`, `num_gpu_blocks`, `num_cpu_blocks`, `max_model_len`, or arguments of its own.
"""

from kvsim.blocks.contiguous import Contiguous
from kvsim.blocks.naive import Naive
from kvsim.blocks.nano import NanoTables, NanoTables2025
from kvsim.blocks.prefix import PrefixCaching
from kvsim.blocks.tables import Tables
from kvsim.blocks.vllm033 import Vllm033Tables
from kvsim.blocks.vllm_v1 import VllmV1PrefixTables, VllmV1Tables
from kvsim.fast.runs import PrefixRuns

BLOCK_MANAGERS: dict[str, type[Tables]] = {
    "naive": Naive,
    "prefix-caching": PrefixCaching,
    "contiguous": Contiguous,
    "prefix-runs": PrefixRuns,
    "vllm-0.3.3": Vllm033Tables,
    "vllm-v1": VllmV1Tables,
    "vllm-v1-prefix-caching": VllmV1PrefixTables,
    "nano-vllm": NanoTables,
    "nano-vllm-2025-08": NanoTables2025,
}
"""Names of `--block-manager`."""

__all__ = ["BLOCK_MANAGERS", "Contiguous", "Naive", "PrefixCaching", "Tables"]
