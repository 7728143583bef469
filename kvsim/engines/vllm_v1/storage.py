"""What keeps chunks below CPU memory (`kvsim.engines.vllm_v1.cpu_tier.CpuTier`)."""

from __future__ import annotations

from typing import NamedTuple


class Below(NamedTuple):
    """Chunks that are copied between CPU memory and a storage."""

    keys: list[int]
    upward: bool
    """Whether they come to the CPU."""
    copy_ns: int


class Storage:
    """A tier below the CPU that keeps nothing. One of your own is a subclass.

    Its constructor may name `chunk_bytes`, and further arguments of its own.
    """

    def holds(self, key: int) -> bool:
        """Whether a chunk can be read."""
        return False

    def keep(self, keys: list[int]) -> None:
        """Chunks have been written. Others may have to go."""

    def read_ns(self, chunks: int) -> int:
        """Returns how long it takes to read so many chunks together."""
        return 0

    def write_ns(self, chunks: int) -> int:
        """Returns how long it takes to write so many chunks together."""
        return 0
