"""2Q as the eviction order of vLLM V1's prefix cache.

Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement algorithm",
VLDB 1994, simplified: sizes are a quarter and a half of the pool.

    PYTHONPATH=docs/examples kvsim run --trace traces/agents.jsonl --engine vllm-v1 \
        --model llama-3-8b --num-gpu-blocks-override 4000 \
        --set block_manager_args.eviction=two_queues:TwoQueues

66.7 % of the prompt tokens hit; with vLLM's own order, least recently used, 68.0 %.
"""

from collections import OrderedDict

from kvsim.policies.order import Order


class TwoQueues(Order):
    """What is new leaves first in, first out; what comes back after it was lost, by last use."""

    def __init__(self, *, size: int) -> None:
        self._size = size
        self._new: OrderedDict[int, int] = OrderedDict()
        self._old: OrderedDict[int, int] = OrderedDict()
        self._lost: OrderedDict[int, None] = OrderedDict()
        self._back: set[int] = set()

    def store(self, block: int, key: int) -> None:
        if key in self._lost:
            del self._lost[key]
            self._back.add(block)

    def hit(self, block: int) -> None:
        self._new.pop(block, None)
        self._old.pop(block, None)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        assert key is not None, "blank blocks are not evicted"
        (self._old if block in self._back else self._new)[block] = key

    def pop(self) -> int:
        from_new = len(self._new) > self._size // 4 or not self._old
        block, key = (self._new if from_new else self._old).popitem(last=False)
        self._back.discard(block)
        if from_new:
            self._lost[key] = None
            if len(self._lost) > self._size // 2:
                self._lost.popitem(last=False)
        return block
