"""Block managers: who holds which KV block, and what is still there to be hit.

A manager is a subclass of `kvsim.blocks.tables.Tables`. Its constructor names what it wants to
know: `block_size`, `num_gpu_blocks`, `num_cpu_blocks`, `max_model_len`, or arguments of its own.
"""

from kvsim.blocks.contiguous import Contiguous
from kvsim.blocks.naive import Naive
from kvsim.blocks.prefix import PrefixCaching
from kvsim.blocks.tables import Tables

BLOCK_MANAGERS: dict[str, type[Tables]] = {
    "naive": Naive,
    "prefix-caching": PrefixCaching,
    "contiguous": Contiguous,
}
"""Names of `--block-manager`."""

__all__ = ["BLOCK_MANAGERS", "Contiguous", "Naive", "PrefixCaching", "Tables"]
