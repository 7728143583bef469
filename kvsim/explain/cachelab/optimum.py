"""The most hits that any policy can have: what is used furthest in the future is dropped first.

Belady, "A study of replacement algorithms for a virtual-storage computer", 1966. A block is never
used later than what continues it. So with ties from the end of the prompt on, only ends of chains
are dropped: the rule is optimal for hits of prefixes, too. Anything may be kept after a request,
also nothing of what it used.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvsim.workload.reuse import Reuse

NextUses = list[list[tuple[int, int]]]
"""Of each request, who uses its blocks next, and how many of them."""


def next_uses(reuse: Reuse, *, every: bool = False) -> NextUses:
    """Who uses the blocks of each request next. `every`: also where the use can be no hit, as some
    programs count; then the result may be below the optimum."""
    found: NextUses = [[] for _ in reuse.found]
    for request, (blocks, most_tokens, runs) in enumerate(reuse.found):
        end = blocks if every else -(-most_tokens // reuse.counting.block_size)
        for user, first, last, _ in runs:
            if first < end:
                found[user].append((request, min(last, end) - first))
    return found


def optimum_tokens(
    reuse: Reuse, capacities: Sequence[int], since: int = 0, *, every: bool = False
) -> list[int]:
    """Prompt tokens that hit at each capacity in blocks, from request `since` on. `every`: as for
    `next_uses`."""
    uses = next_uses(reuse, every=every)
    size = reuse.counting.block_size
    return [
        sum(
            min(blocks * size, found.most_tokens)
            for found, blocks in zip(reuse.found[since:], kept[since:], strict=True)
        )
        for kept in (optimum_blocks(reuse, uses, capacity) for capacity in capacities)
    ]


def optimum_blocks(reuse: Reuse, uses: NextUses, capacity: int) -> list[int]:
    """The leading blocks that each request finds.

    Blocks that the same request uses next are dropped deepest first, so the cache is one number
    for each of the requests to come.
    """
    resident = [0] * len(reuse.found)
    kept = []
    furthest: list[int] = []
    """Heap of the requests that use something in the cache, negated."""
    size = unused = 0
    for request, (blocks, _, _) in enumerate(reuse.found):
        kept.append(resident[request])
        size += blocks - resident[request]
        resident[request] = 0
        unused += blocks
        for user, count in uses[request]:
            if not resident[user]:
                heapq.heappush(furthest, -user)
            resident[user] += count
            unused -= count
        dropped = min(unused, max(0, size - capacity))
        unused -= dropped
        size -= dropped
        while size > capacity:
            user = -furthest[0]
            dropped = min(resident[user], size - capacity)
            resident[user] -= dropped
            size -= dropped
            if not resident[user]:
                heapq.heappop(furthest)
    return kept
