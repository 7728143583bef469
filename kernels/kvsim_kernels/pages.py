"""What a kernel is given: a pool of KV blocks in one of two layouts, and the pages of a batch.

A block holds `block_size` tokens of every layer. The pool is one allocation:

    layout "layer"  [layers, 2, blocks, kv_heads, block_size, head_size]   2 x layers pieces a block
    layout "cross"  [blocks, layers, 2, kv_heads, block_size, head_size]   one piece a block

The 2 is keys and values. Both give views [blocks, kv_heads, block_size, head_size] per layer that
differ in strides only, so one kernel serves both.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

KVLayout = Literal["layer", "cross"]

PARTITION_TOKENS = 512
"""Tokens per partition of decode v2, vLLM's _PARTITION_SIZE."""

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn; the cache stores larger numbers as this, not as NaN."""


@dataclass(frozen=True)
class KVPool:
    """The KV blocks of one device.

    `data` is the whole allocation, shaped as its layout says (see the module docstring).
    """

    layout: KVLayout
    data: torch.Tensor

    @classmethod
    def allocate(
        cls,
        layout: KVLayout,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        pin_memory: bool = False,
    ) -> "KVPool":
        """A pool of zeros; `pin_memory` page-locks a host pool and needs a CUDA device."""
        if layout not in ("layer", "cross"):
            raise ValueError(f"layout must be 'layer' or 'cross', not {layout!r}")
        block = (num_kv_heads, block_size, head_size)
        shape = (
            (num_layers, 2, num_blocks, *block)
            if layout == "layer"
            else (num_blocks, num_layers, 2, *block)
        )
        data = torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin_memory)
        return cls(layout, data)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.data.shape[2 if self.layout == "layer" else 0]

    @property
    def num_layers(self) -> int:
        """Layers whose keys and values every block holds."""
        return self.data.shape[0 if self.layout == "layer" else 1]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, views [blocks, kv_heads, block_size, head_size]."""
        if self.layout == "layer":
            return self.data[index, 0], self.data[index, 1]
        return self.data[:, index, 0], self.data[:, index, 1]

    def pieces(self) -> torch.Tensor:
        """A view [pieces of a block, blocks, elements]: what one copy of a block can move at once.

        "layer" has 2 x layers pieces of one layer's keys or values, "cross" a single one.
        """
        if self.layout == "layer":
            return self.data.view(2 * self.num_layers, self.num_blocks, -1)
        return self.data.view(1, self.num_blocks, -1)

    def words(self) -> torch.Tensor:
        """`pieces` as int32 words: copies are bit-exact for every dtype, NaN payloads included."""
        return self.pieces().view(torch.int32)

    def require_same_blocks(self, other: "KVPool") -> None:
        """Raises ValueError unless blocks of both pools have the same layout, shape and dtype."""
        if (self.layout, self.pieces().shape[2], self.num_layers, self.data.dtype) != (
            other.layout,
            other.pieces().shape[2],
            other.num_layers,
            other.data.dtype,
        ):
            raise ValueError("blocks can only be moved between pools of equal layout and geometry")


@dataclass(frozen=True)
class Pages:
    """Where the keys and values of a batch lie, for one layer.

    `keys`, `values`: views [blocks, kv_heads, block_size, head_size] with equal strides, the last
    one 1. `block_table`: int32 [sequences, max_blocks]; entry j of a row holds tokens
    j x block_size onwards, entries past the length are never read. `lengths`: int32 [sequences],
    tokens stored of each sequence, the queries of this step included; 0 marks a padding row.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        if self.keys.stride() != self.values.stride() or self.keys.shape != self.values.shape:
            raise ValueError("keys and values must have the same shape and strides")
        if self.keys.stride(-1) != 1:
            raise ValueError("the head dimension of the cache must be contiguous")
        if self.block_table.stride(-1) != 1:
            raise ValueError("the rows of the block table must be contiguous")

    @property
    def num_kv_heads(self) -> int:
        """KV heads; query head h reads KV head h // (query heads / KV heads)."""
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.keys.shape[2]

    @property
    def head_size(self) -> int:
        """Elements per head."""
        return self.keys.shape[3]


@dataclass(frozen=True)
class Attention:
    """How scores are made: softmax(scale x q.k + bias) over the visible keys.

    `scale`: None means head_size ** -0.5. `window`: a query at position p sees the keys
    p - window + 1 .. p; None means all keys up to p (vLLM 0.6.3 counts the window the same way).
    `alibi_slopes`: float32 [query heads]; adds slope x (key position - query position)
    (Press et al. 2021, arXiv 2108.12409).
    """

    scale: float | None = None
    window: int | None = None
    alibi_slopes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 token, not {self.window}")

    def scale_for(self, head_size: int) -> float:
        """The factor applied to q.k."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(head_size)

    def visible(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Whether a query may see a key, both given as positions that broadcast; bool."""
        seen = key_positions <= query_positions
        if self.window is not None:
            seen = seen & (key_positions > query_positions - self.window)
        return seen


PLAIN = Attention()
"""Full causal attention with the usual scale."""
