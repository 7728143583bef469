"""A tier below CPU memory: what is written there, and what comes back before it is loaded.

```
 GPU ──store──► CPU ──write──► storage        as soon as the CPU has it
 GPU ◄──load─── CPU ◄──read─── storage        when a request looks for it; it waits meanwhile
```

Only the CPU tier copies to and from the GPU. vLLM 0.33.0 `v1/kv_offload/tiering/manager.py`
(`TieringOffloadingSpec`). The decisions follow its rules, but no log of a real engine was compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvsim.engines.vllm_v1.cpu_tier import Access, CpuTier, Key


class Below(NamedTuple):
    """Chunks that are copied between CPU memory and storage."""

    keys: list[Key]
    upward: bool
    """Whether they come to the CPU."""
    copy_ns: int


class Storage:
    """A tier below the CPU that keeps nothing. One of your own is a subclass.

    Its constructor may name `chunk_bytes`, and further arguments of its own.
    """

    def holds(self, key: Key) -> bool:
        """Whether a chunk can be read."""
        return False

    def keep(self, keys: list[Key]) -> None:
        """Chunks have been written. Others may have to go."""

    def read_ns(self, chunks: int) -> int:
        """Returns how long it takes to read so many chunks together."""
        return 0

    def write_ns(self, chunks: int) -> int:
        """Returns how long it takes to write so many chunks together."""
        return 0


class TieredCpu(CpuTier):
    """The chunks in CPU memory, above a storage."""

    def __init__(self, capacity: int, storage: Storage, **rules: Any) -> None:
        """`rules`: those of `CpuTier`."""
        super().__init__(capacity, **rules)
        self.storage = storage
        self._wanted: dict[Key, None] = {}
        """Chunks that a request looks for, to be read with this step."""
        self._written: list[Key] = []
        """Chunks to be written with this step."""
        self._writing = 0
        """Number of chunks that are being written."""
        self._reading: dict[Key, Access] = {}
        self._risen: set[Key] = set()
        """Chunks that were read from storage and not loaded since."""
        self.read_chunks = self.written_chunks = 0
        """Number of chunks read and written so far."""

    def look_up(self, key: Key) -> int | None:
        state = super().look_up(key)
        if state is not None or not self.storage.holds(key):
            return state
        access = Access()
        access.position[key], access.seen[key] = 0, None
        # It takes no room from chunks that come or came the same way and were not loaded yet.
        if self._inserted([key], access, self._risen) is None:
            return None
        self._wanted[key] = None
        self._reading[key] = access
        return super().look_up(key)

    def stored(self, keys: list[Key]) -> None:
        super().stored(keys)
        self._risen.difference_update(keys)
        new = [key for key in keys if not self.storage.holds(key)]
        # They stay until they are written.
        self._pin(new)
        self._written += new

    def load(self, keys: list[Key], access: Access) -> list[int]:
        self._risen.difference_update(keys)
        return super().load(keys, access)

    def risen(self, keys: list[Key]) -> int:
        return len(self._risen.intersection(keys)) if self._risen else 0

    def copies(self) -> list[Below]:
        found = []
        if self._wanted:
            keys, self._wanted = [*self._wanted], {}
            self.read_chunks += len(keys)
            found.append(Below(keys, True, self.storage.read_ns(len(keys))))
        if self._written:
            keys, self._written = self._written, []
            self.written_chunks += len(keys)
            self._writing += len(keys)
            found.append(Below(keys, False, self.storage.write_ns(len(keys))))
        return found

    def copied(self, copy: Below) -> None:
        if not copy.upward:
            self._writing -= len(copy.keys)
            self.storage.keep(copy.keys)
            self.loaded(copy.keys)
            return
        super().stored(copy.keys)
        self._risen.update(copy.keys)
        for key in copy.keys:
            self.ended(self._reading.pop(key))

    @property
    def cascades(self) -> bool:
        return True

    @property
    def copying(self) -> bool:
        return bool(self._reading or self._writing)

    def describe(self) -> dict[str, Any]:
        moved = {"written_chunks": self.written_chunks, "read_chunks": self.read_chunks}
        return {**super().describe(), "storage": type(self.storage).__name__, **moved}
