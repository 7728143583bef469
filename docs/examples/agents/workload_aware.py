"""Workload-aware eviction: vLLM PR #22236, after "KVCache cache in the wild", arXiv 2506.02634.

    PYTHONPATH=docs/examples/agents kvsim run --workload agentx --model qwen3-30b-a3b-2507 \
        --hardware h200 --block-size 64 \
        --set block_manager_args.eviction=workload_aware:WorkloadAware

Evict what is least likely to be used again soon, by the category of the request and the time since
its last use. Here the category is the tool that its answer calls (`x_tool`); chance and time of
reuse are learned from the turns so far, times as exponential.
"""

from collections import defaultdict
from math import exp
from typing import Any

from kvsim.policies.sessions import SessionOrder, Use

SOON_S = 60.0
"""A life of a block in the cache (chosen)."""


class WorkloadAware(SessionOrder):
    """Least probable first."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: dict[Any, int] = defaultdict(lambda: 1)
        self._returned: dict[Any, int] = defaultdict(lambda: 1)
        self._gap_s: dict[Any, float] = defaultdict(lambda: 10.0)
        self._left: dict[str, Use] = {}

    def leaves(self, use: Use) -> None:
        request = use.request
        before = self._left.get(request.session)
        if before is not None and before.request is not request:
            kind = self._kind(before)
            self._returned[kind] += 1
            gap_s = max(0.0, (request.arrival_ns - before.request.finish_ns) / 1e9)
            self._gap_s[kind] += (gap_s - self._gap_s[kind]) / self._returned[kind]
        self._ended[self._kind(use)] += 1
        self._left[request.session] = use

    def worth(self, use: Use) -> Any:
        kind, gap_s = self._kind(use), max(0.01, self._gap_s[self._kind(use)])
        chance = min(1.0, self._returned[kind] / self._ended[kind])
        idle_s = (self.now_ns - use.ended_ns) / 1e9
        return chance * exp(-idle_s / gap_s) * (1 - exp(-SOON_S / gap_s))

    def _kind(self, use: Use) -> Any:
        return None if use.request is None else use.request.extra.get("tool", "end")
