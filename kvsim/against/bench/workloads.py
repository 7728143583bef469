"""Workloads for speed, made by generators.

Arrivals are Poisson. `numpy.random.default_rng(0)` draws first the gaps, then the prompts, then the
outputs. Blocks hold 16 tokens; first come first served, at most 256 running, 8,192 tokens a step.
Times, where the settings name no others: 6 ms a step + 40 us per prompt token + 20 us per decoding
sequence + 43 ns per token of its
context. The engine is chosen apart (`kvsim.against.bench.settings`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.workload import open_trace
from kvsim.workload.trace import Row, Trace

if TYPE_CHECKING:
    import numpy as np

NS_PER_S = 1e9


class Workload(NamedTuple):
    """A trace to make, and the settings that belong to it."""

    about: str
    make: Callable[[str | None], Trace]
    """Makes the trace; the argument is the path of a trace file for those that need one."""
    settings: dict[str, Any]
    """Memory, limits and step times, for any engine."""
    own: bool = True
    """False if it needs the file of a public trace."""
    whole: bool = False
    """Whether the whole process of `kvsim run --out` is measured as well."""
    router: str = ""
    """What the requests go through, if several replicas serve them."""
    replicas: int = 1


class Lengths(NamedTuple):
    """Numbers of tokens: all equal to `median`, or lognormal, cut to `1 .. cap`."""

    median: int
    sigma: float = 0.0
    cap: int = 0

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths; equal lengths draw no random numbers."""
        import numpy as np

        if not self.sigma:
            return [self.median] * count
        drawn = rng.lognormal(log(self.median), self.sigma, count)
        lengths: list[int] = np.clip(drawn, 1, self.cap).astype(np.int64).tolist()
        return lengths


def poisson(
    count: int, rate: float, prompt: Lengths, output: Lengths, path: str | None = None
) -> Trace:
    """`count` requests at `rate` per second, without shared content."""
    import numpy as np

    rng = np.random.default_rng(0)
    gaps = rng.exponential(NS_PER_S / rate, count)
    arrivals: list[int] = np.cumsum(gaps).astype(np.int64).tolist()
    return _trace(arrivals, prompt.draw(rng, count), output.draw(rng, count))


def decode(running: int, path: str | None = None) -> Trace:
    """`running` requests at once: prompts of 100 to 600 tokens, outputs of 2,000 to 6,000.

    Python's `random.Random(1)` draws for each of `DECODING` in turn, so that each has its own.
    """
    rng = random.Random(1)
    for count in DECODING:
        prompts = [rng.randint(100, 600) for _ in range(count)]
        outputs = [rng.randint(2000, 6000) for _ in range(count)]
        if count == running:
            break
    return _trace([0] * running, prompts, outputs)


DECODING = 1, 16, 256, 1024, 4096
"""Sequences in the workloads `decode-N`."""


def marked(path: str | None = None) -> Trace:
    """The first of `W1`, with priorities and adapters in turns, which only some features heed."""
    trace = poisson(1_500, 25, *_EVEN)
    rows = [
        replace(row, priority=row.index % 3, lora=f"adapter-{row.index % 4}") for row in trace.rows
    ]
    return replace(trace, rows=rows)


def conversation(path: str | None = None) -> Trace:
    """The conversation trace of Mooncake (FAST25-release/traces/conversation_trace.jsonl)."""
    if path is None:
        raise ConfigError(
            "bench: this workload needs Mooncake's conversation_trace.jsonl; give --trace FILE"
        )
    return open_trace(path, "mooncake")


def _trace(arrivals: list[int], prompts: list[int], outputs: list[int]) -> Trace:
    rows = [
        Row(index, str(index), index + 2, *facts)
        for index, facts in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]
    return Trace("generated", "native", "", rows)


def _settings(blocks: int, **more: Any) -> dict[str, Any]:
    return {
        "block_size": 16,
        "num_gpu_blocks_override": blocks,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8_192,
        "max_model_len": 8_192,
        "cost": {"model": "constant", "link": {"block_us": 30}},
        **more,
    }


_EVEN = Lengths(512), Lengths(128)
_SMALL = Lengths(256), Lengths(64)
_PRESSED = Lengths(64, 0.3, 512), Lengths(512, 0.5, 2048)
_WIDE = Lengths(256, 1.0, 4096), Lengths(128, 0.8, 2048)
_CONVERSATION = {"max_model_len": 131_072}
_DECODE = _settings(1_000_000, max_num_seqs=4096, max_num_batched_tokens=1 << 20)

WORKLOADS: dict[str, Workload] = {
    "W1": Workload(
        "10,000 requests, 25/s, 512 + 128 tokens, 12,000 blocks",
        partial(poisson, 10_000, 25, *_EVEN),
        _settings(12_000),
        whole=True,
    ),
    "W2": Workload(
        "W1 at 60/s with 4,000 blocks: memory pressure where a step takes as long as above",
        partial(poisson, 10_000, 60, *_EVEN),
        _settings(4_000),
    ),
    "W2x": Workload(
        "10,000 requests, 60/s, about 64 + 512 tokens, 3,000 blocks: memory pressure at any price",
        partial(poisson, 10_000, 60, *_PRESSED),
        _settings(3_000),
    ),
    "W3": Workload(
        "100,000 requests, 20/s, about 256 + 128 tokens, 20,000 blocks",
        partial(poisson, 100_000, 20, *_WIDE),
        _settings(20_000),
    ),
    "marked": Workload(
        "1,500 requests of W1 with priorities and adapters", marked, _settings(12_000)
    ),
    **{
        f"conversation-{blocks}": Workload(
            f"Mooncake's conversation trace, {blocks:,} blocks",
            conversation,
            _settings(blocks, **_CONVERSATION),
            own=False,
        )
        for blocks in (30_000, 300_000)
    },
    **{
        f"decode-{running}": Workload(
            f"{running:,} requests at once, outputs of thousands of tokens",
            partial(decode, running),
            _DECODE,
        )
        for running in DECODING
    },
    **{
        f"blocks-{blocks}": Workload(
            f"10,000 requests, 25/s, 256 + 64 tokens, {blocks:,} blocks",
            partial(poisson, 10_000, 25, *_SMALL),
            _settings(blocks),
        )
        for blocks in (1_000, 10_000, 100_000, 1_000_000)
    },
    **{
        f"block-size-{size}": Workload(
            f"W1 with as many tokens in blocks of {size}",
            partial(poisson, 10_000, 25, *_EVEN),
            _settings(192_000 // size) | {"block_size": size},
        )
        for size in (1, 4, 16)
    },
    **{
        f"prompt-{tokens}": Workload(
            f"one prompt of {tokens:,} tokens",
            partial(poisson, 1, 25, Lengths(tokens), Lengths(16)),
            _settings(100_000, max_model_len=tokens + 16),
        )
        for tokens in (1_000, 32_000, 1_000_000)
    },
    **{
        f"{name}-{replicas}": Workload(
            f"{replicas} replicas behind {router}, each with 1,000 requests like those of W1",
            partial(poisson, 1_000 * replicas, 25 * replicas, *_EVEN),
            _settings(12_000),
            router=router,
            replicas=replicas,
        )
        for name, router in (("fleet", "least-loaded"), ("fleet-apart", "round-robin"))
        for replicas in (1, 64)
    },
    "million": Workload(
        "1,000,000 requests like those of W3",
        partial(poisson, 1_000_000, 20, *_WIDE),
        _settings(20_000),
        whole=True,
    ),
}
"""Names of `kvsim bench --workload`."""
