"""Oracles as an outsider writes them."""

from typing import Any

from kvsim.engines.vllm_063.scheduler import Vllm063
from kvsim.policies.future import Future
from kvsim.policies.order import Order

seen: list[Any] = []
"""What they were told of the future."""


class LongestLeft:
    """The victim that will go on for longest."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def __call__(self, candidates: Any, blocks: Any) -> Any:
        seen.extend(self._future.output_length(request.index) for request in candidates)
        return max(candidates, key=lambda request: self._future.output_length(request.index))


class NeverAgain(Order):
    """Evicts what no prompt has, if there is such content."""

    def __init__(self, future: Future, block_size: int) -> None:
        self._future, self._block_size = future, block_size
        self._keys: dict[int, int | None] = {}

    def hit(self, block: int) -> None:
        self._keys.pop(block, None)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        seen.append(self._future.prompt_keys(0, self._block_size))
        self._keys[block] = key

    def pop(self) -> int:
        coming = {key for index in range(3) for key in self._future.prompt_keys(index, 4)}
        block = min(self._keys, key=lambda each: self._keys[each] in coming)
        del self._keys[block]
        return block


class Prophet(Vllm063):
    """Reads the first request's future, and does nothing with it."""

    def __init__(self, future: Future, **settings: Any) -> None:
        super().__init__(**settings)
        self._future = future

    def compose(self, batch: Any, now_ns: int) -> Any:
        seen.append(self._future.output_length(0))
        return super().compose(batch, now_ns)
