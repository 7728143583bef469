"""A KV connector of one's own: an unlimited store of prompts, from which only long hits are loaded.

    PYTHONPATH=docs/examples kvsim run --trace traces/agents.jsonl --num-prompts 40 \
        --request-rate 4 --model llama-3.1-8b --hardware h100 --num-gpu-blocks-override 2500 \
        --max-model-len 30000 --kv-transfer-config \
        '{"kv_connector": "prompt_store:PromptStore", "kv_role": "kv_both"}'

2,624 prompt tokens are loaded.
"""

from itertools import takewhile

from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.engines.vllm_v1.connector import (
    Connector,
    Done,
    Job,
    Match,
    Reported,
    Transfers,
)
from kvsim.engines.vllm_v1.manager import KVCacheManager


class PromptStore(Connector):
    """Keeps every block of every prompt. For models with one group of layers."""

    loads = True

    def __init__(self, *, blocks: KVCacheManager, min_tokens: int = 256) -> None:
        self._blocks, self._size, self._least = blocks, blocks.layout.key_tokens, min_tokens
        self._kept: set[int] = set()
        self._loads: list[Job] = []
        self._jobs: dict[int, list[int]] = {}
        """Number of each copy under way → blocks that are held for it."""
        self._number = 0

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> Match:
        keys = self._blocks.keys(request)[computed // self._size :]
        tokens = self._size * len([*takewhile(self._kept.__contains__, keys)])
        return Match(tokens, asynchronous=True) if tokens >= self._least else Match()

    def update_state_after_alloc(self, request: Request, local: int, match: Match) -> None:
        if match.tokens:
            first, last = local // self._size, (local + match.tokens) // self._size
            table = self._blocks.tables(request)[0]
            self._loads.append(self._job(request, table[first:last], []))

    def build_connector_meta(self, plan: Plan) -> Transfers:
        loads, self._loads = self._loads, []
        stores = []
        for move in plan.moves:
            request = move.request
            tokens = min(request.computed + move.tokens, request.input_length)
            whole = range(request.computed // self._size, tokens // self._size)
            keys, table = self._blocks.keys(request), self._blocks.tables(request)[0]
            new = [place for place in whole if keys[place] not in self._kept]
            if new:
                self._kept.update(keys[place] for place in new)
                source = [table[place] for place in new]
                self._blocks.pin(source)  # until they are copied
                stores.append(self._job(request, source, source))
        return Transfers(loads, stores, [], [])

    def update_connector_output(self, done: Done) -> Reported:
        for job in (*done.loads, *done.stores):
            self._blocks.unpin(self._jobs.pop(job.number))
        return Reported([job.request for job in done.loads], [])

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def _job(self, request: Request, blocks: list[int], pinned: list[int]) -> Job:
        self._number += 1
        self._jobs[self._number] = pinned
        return Job(self._number, request, [blocks], None)
