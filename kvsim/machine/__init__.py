"""What serves: models, GPUs, the link to the CPU, and how many KV blocks fit into memory.

In go names and files of models and GPUs. Out come a geometry (`models`), data-sheet figures and
times of copies (`hardware`), and a budget of bytes and blocks (`memory`).
"""

from kvsim.machine.hardware import (
    GIB,
    AllReduce,
    CopiedBlock,
    Hardware,
    LinkTimes,
    TransferTimes,
    load_hardware,
    make_link,
)
from kvsim.machine.memory import Budget, block_bytes, kv_dtype
from kvsim.machine.models import DTYPE_BYTES, Model, Shard, load_model, model_of

__all__ = [
    "DTYPE_BYTES",
    "GIB",
    "AllReduce",
    "Budget",
    "CopiedBlock",
    "Hardware",
    "LinkTimes",
    "Model",
    "Shard",
    "TransferTimes",
    "block_bytes",
    "kv_dtype",
    "load_hardware",
    "load_model",
    "make_link",
    "model_of",
]
