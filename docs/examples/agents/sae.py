"""Session-aware eviction of the CPU tier: vLLM PR #50422 (SAE).

    PYTHONPATH=docs/examples/agents kvsim run --workload agentx --model qwen3-30b-a3b-2507 \
        --hardware h200 --block-size 64 --kv-offloading-size 64 \
        --set kv_connector_extra_config.eviction_policy=sae:Sae

Chunks stored by one request form a chain, which the PR calls a session. The worst chain loses
chunks first, its tail before its head, so that shared prefixes outlive suffixes. "Worst" is our
reading: the chain of which nothing was used for the longest time. A chunk stays in the chain that
stored it, whoever hits it.
"""

from collections.abc import Callable

from kvsim.engines.vllm_v1.cpu_tier import Access, Key


class Sae:
    """Chains by last use of any of their chunks."""

    def __init__(self, capacity: int) -> None:
        self._chains: dict[int, dict[Key, int]] = {}
        """Chain, least recently used first → its chunks and the tokens up to their end."""
        self._home: dict[Key, int] = {}
        self._of: dict[int, int] = {}
        self._number = 0

    def missed(self, keys: list[Key]) -> None:
        """A request offers chunks that are absent."""

    def accessed(self, keys: list[Key], access: Access) -> None:
        """A request uses chunks: their chains are the last to go."""
        for chain in dict.fromkeys(self._home[key] for key in keys if key in self._home):
            self._chains[chain] = self._chains.pop(chain)

    def inserted(self, keys: list[Key], access: Access) -> None:
        """Chunks of a request join its chain."""
        chain = self._of.get(id(access))
        if chain is None:
            self._number += 1
            chain = self._of[id(access)] = self._number
        chunks = self._chains.pop(chain, {})
        chunks.update((key, access.position[key]) for key in keys)
        if chunks:
            self._chains[chain] = chunks
        self._home.update(dict.fromkeys(keys, chain))

    def ended(self, access: Access) -> None:
        """A request is over."""
        self._of.pop(id(access), None)

    def evict(self, number: int, evictable: Callable[[Key], bool]) -> list[Key] | None:
        """Removes and returns `number` chunks; None, and nothing changes, if there are too few."""
        chosen: list[Key] = []
        for chunks in self._chains.values():
            tail_first = sorted(chunks, key=lambda key: (-chunks[key], key))
            chosen += [key for key in tail_first if evictable(key)][: number - len(chosen)]
            if len(chosen) == number:
                break
        else:
            return None
        for key in chosen:
            chain = self._home.pop(key)
            del self._chains[chain][key]
            if not self._chains[chain]:
                del self._chains[chain]
        return chosen
