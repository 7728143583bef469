"""How long the cache lab takes: python tests/support/cache_speed.py TRACE BLOCK_SIZE."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

from kvsim.core.collector import collect_seldom
from kvsim.explain.cache_curve import lru_tokens, optimum_tokens
from kvsim.workload import open_trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, find_reuse

REPEATS = 5


def measure(path: str, block_size: int) -> dict[str, float]:
    """Least CPU seconds of each part, and what was counted."""
    times = []
    for _ in range(REPEATS):
        instants = [time.process_time()]
        trace = open_trace(path)
        instants.append(time.process_time())
        reuse = find_reuse(trace.rows, streams(trace), Counting(block_size))
        instants.append(time.process_time())
        lru_tokens(reuse, range(0, reuse.distinct, max(1, reuse.distinct // 1000)))
        instants.append(time.process_time())
        optimum_tokens(reuse, [max(1, reuse.distinct // 50)])
        instants.append(time.process_time())
        times.append([later - one for one, later in pairwise(instants)])
    read, found, curve, optimum = map(min, zip(*times, strict=True))
    runs = sum(len(each.runs) for each in reuse.found)
    parts = {"reading": read, "runs found": found, "curve": curve, "optimum": optimum}
    return {**parts, "blocks": reuse.blocks, "runs": runs}


if __name__ == "__main__":
    collect_seldom()  # As every command does.
    for name, value in measure(sys.argv[1], int(sys.argv[2])).items():
        sys.stdout.write(f"{name:12} {value:,.3f}\n")
