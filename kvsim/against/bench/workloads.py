"""Workloads for speed, made by generators, with the results that a run of them must give.

Arrivals are Poisson. `numpy.random.default_rng(0)` draws first the gaps, then the prompts, then the
outputs. Blocks hold 16 tokens; first come first served, at most 256 running, 8,192 tokens a step.
Times: 6 ms a step + 40 us per prompt token + 20 us per decoding sequence + 43 ns per token of its
context + 30 us per swapped block. The engine is chosen apart (`kvsim.against.bench.settings`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from math import log
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.settings.config import nearest
from kvsim.workload import open_trace
from kvsim.workload.trace import Row, Trace

if TYPE_CHECKING:
    import numpy as np

NS_PER_S = 1e9


class Checks(NamedTuple):
    """The results that a run must have under some engine, with the times above."""

    steps: int
    """Steps that compute something."""
    seq_steps: int
    """Decodes, over all steps."""
    preemptions: int
    end_ns: int
    digest: str
    """`measure.digest` of the requests."""


class Workload(NamedTuple):
    """A trace to make, its settings, and the results that a run must have."""

    about: str
    make: Callable[[str | None], Trace]
    """Makes the trace; the argument is the path of a trace file for those that need one."""
    settings: dict[str, Any]
    """Memory, limits and step times, for any engine."""
    checks: Mapping[str, Checks] = MappingProxyType({})
    """A name of `SETTINGS` → what a run with it must come to, where an exact run is known."""
    own: bool = True
    """False if it needs the file of a public trace."""
    whole: bool = False
    """Whether the whole process of `kvsim run --out` is measured as well."""
    router: str = ""
    """What the requests go through, if several replicas serve them."""
    replicas: int = 1
    decoding: int = 0
    """Number of requests that decode at once, if the cost of one more of their steps is
    measured."""


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


DECODING = {
    1: Checks(4_331, 4_330, 0, 26_513_794_365, "1168f8e369d4f0da"),
    16: Checks(5_659, 66_671, 0, 42_929_055_125, "b73f9d981e1f347c"),
    256: Checks(6_000, 1_024_641, 0, 172_422_079_977, "ca5f6224c3623816"),
    1024: Checks(6_000, 4_109_017, 0, 577_823_165_506, "c1faa49c9f4347d3"),
    4096: None,
}
"""Sequences in the workloads `decode-N` → the results that these must have with `SYNC`."""


PURE_TOKENS = 1_000, 101_000
"""Output lengths of two runs of `pure_decode`; they differ by as many steps."""


def pure_decode(running: int, tokens: int) -> tuple[Trace, dict[str, Any]]:
    """`running` requests at once that produce `tokens` tokens each and end together.

    Returned with what they need beyond the settings of `decode-N`.
    """
    trace = _trace([0] * running, [100] * running, [tokens] * running)
    return trace, {"num_gpu_blocks_override": 30_000_000, "max_model_len": 1 << 17}


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


def named(word: str) -> list[str]:
    """The workloads with this name, or all of `WORD-...` for a word such as `decode`.

    Raises `ConfigError` with the nearest name.
    """
    found = [word] if word in WORKLOADS else [n for n in WORKLOADS if n.startswith(f"{word}-")]
    if not found:
        raise ConfigError(
            f"--workload: unknown {word!r};{nearest(word, WORKLOADS)}"
            f" choose from {', '.join(WORKLOADS)}"
        )
    return found


def _settings(blocks: int, **more: Any) -> dict[str, Any]:
    return {
        "block_size": 16,
        "num_gpu_blocks_override": blocks,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "cost": {"model": "constant", "link": {"block_us": 30}},
        **more,
    }


def _swap(blocks: int) -> dict[str, Any]:
    return {"preemption_mode": "swap", "num_cpu_blocks_override": blocks}


DEFAULT = "vllm-v1"
"""The name in `SETTINGS` of what a run without settings simulates."""
SYNC = "vllm-0.6.3-sync"
"""The engine that most known results were made with."""

_EVEN = Lengths(512), Lengths(128)
_SMALL = Lengths(256), Lengths(64)
_PRESSED = Lengths(64, 0.3, 512), Lengths(512, 0.5, 2048)
_WIDE = Lengths(256, 1.0, 4096), Lengths(128, 0.8, 2048)
_CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 512}
_CONVERSATION = {"max_model_len": 131_072}
_DECODE = _settings(1_000_000, max_num_seqs=4096, max_num_batched_tokens=1 << 20)

WORKLOADS: dict[str, Workload] = {
    "W1": Workload(
        "10,000 requests, 25/s, 512 + 128 tokens, 12,000 blocks",
        partial(poisson, 10_000, 25, *_EVEN),
        _settings(12_000),
        {
            SYNC: Checks(22_772, 1_270_000, 0, 398_314_557_276, "cfda454bec194361"),
            DEFAULT: Checks(22_755, 1_270_000, 0, 398_212_557_276, "11703a7f3067630a"),
        },
        whole=True,
    ),
    "W1lo": Workload(
        "W1 at 5/s: sparse",
        partial(poisson, 10_000, 5, *_EVEN),
        _settings(12_000),
        {SYNC: Checks(281_896, 1_270_000, 0, 1_986_759_612_278, "2eed59e2f672eaf0")},
    ),
    "W1s": Workload(
        "W1 at 60/s: all 256 slots taken",
        partial(poisson, 10_000, 60, *_EVEN),
        _settings(12_000),
        {SYNC: Checks(5_802, 1_270_000, 0, 296_478_692_198, "9f8e84268eccc225")},
    ),
    "W2": Workload(
        "W1s with 4,000 blocks: memory pressure, recompute",
        partial(poisson, 10_000, 60, *_EVEN),
        _settings(4_000),
        {
            SYNC: Checks(12_850, 1_268_368, 1_632, 374_928_381_422, "7192dad9f2567c1d"),
            DEFAULT: Checks(11_941, 1_268_299, 1_703, 366_062_987_236, "548791c1348f88fc"),
        },
    ),
    "W2s": Workload(
        "W2 with swapping, 4,000 CPU blocks",
        partial(poisson, 10_000, 60, *_EVEN),
        _settings(4_000, **_swap(4_000)),
        {SYNC: Checks(12_440, 1_270_000, 1_761, 339_917_912_198, "912ebb7fe0f374d9")},
    ),
    "W2x": Workload(
        "10,000 requests, 60/s, about 64 + 512 tokens, 3,000 blocks: 2.2 preemptions a request",
        partial(poisson, 10_000, 60, *_PRESSED),
        _settings(3_000),
        {SYNC: Checks(61_961, 5_761_925, 22_425, 723_200_968_960, "ac7549971330a363")},
    ),
    "W2xs": Workload(
        "W2x with swapping, 20,000 CPU blocks",
        partial(poisson, 10_000, 60, *_PRESSED),
        _settings(3_000, **_swap(20_000)),
        {SYNC: Checks(56_537, 5_784_350, 19_893, 599_156_595_406, "88463dcdb729b9a8")},
    ),
    "W3": Workload(
        "100,000 requests, 20/s, about 256 + 128 tokens, 20,000 blocks",
        partial(poisson, 100_000, 20, *_WIDE),
        _settings(20_000),
        {SYNC: Checks(421_598, 17_471_878, 0, 4_989_754_650_692, "aceced870c2c8220")},
    ),
    "W3s": Workload(
        "W3 at 40/s: saturated",
        partial(poisson, 100_000, 40, *_WIDE),
        _settings(20_000),
        {SYNC: Checks(121_643, 17_471_878, 0, 3_190_007_652_394, "9052e3997064bd37")},
    ),
    "chunked-W1": Workload(
        "W1 with chunked prefill, 512 tokens a step",
        partial(poisson, 10_000, 25, *_EVEN),
        _settings(12_000, **_CHUNKED),
        {SYNC: Checks(22_755, 1_270_000, 0, 398_212_557_276, "d912c58eee12a260")},
    ),
    "chunked-W2": Workload(
        "W2 with chunked prefill, 512 tokens a step",
        partial(poisson, 10_000, 60, *_EVEN),
        _settings(4_000, **_CHUNKED),
        {SYNC: Checks(12_603, 1_270_000, 0, 337_284_692_198, "fbda8e3fa6079cf9")},
    ),
    "chunked-W3": Workload(
        "W3 with chunked prefill, 512 tokens a step",
        partial(poisson, 100_000, 20, *_WIDE),
        _settings(20_000, **_CHUNKED),
        {SYNC: Checks(421_514, 17_471_878, 0, 4_989_250_650_692, "ca33f248244ac56b")},
    ),
    "W4": Workload(
        "Mooncake's conversation trace, prefix caching, 30,000 blocks",
        conversation,
        _settings(30_000, **_CONVERSATION),
        {},
        own=False,
    ),
    "W4-300k": Workload(
        "W4 with 300,000 blocks",
        conversation,
        _settings(300_000, **_CONVERSATION),
        {},
        own=False,
    ),
    **{
        f"decode-{running}": Workload(
            f"{running:,} requests at once, outputs of thousands of tokens",
            partial(decode, running),
            _DECODE,
            {} if checks is None else {SYNC: checks},
            decoding=running,
        )
        for running, checks in DECODING.items()
    },
    **{
        f"requests-{count}": Workload(
            f"{count:,} requests like those of W1",
            partial(poisson, count, 25, *_EVEN),
            _settings(12_000),
        )
        for count in (1_000, 10_000, 100_000)
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
            _settings(100_000, max_model_len=1_500_000),
        )
        for tokens in (1_000, 32_000, 1_000_000)
    },
    **{
        f"fleet-{way}-{replicas}": Workload(
            f"{replicas} replicas behind {router}, each with 1,000 requests like those of W1",
            partial(poisson, 1_000 * replicas, 25 * replicas, *_EVEN),
            _settings(12_000),
            router=router,
            replicas=replicas,
        )
        for way, router in (("apart", "round-robin"), ("heeded", "least-loaded"))
        for replicas in (1, 4, 16, 64)
    },
    "million": Workload(
        "1,000,000 requests like those of W3",
        partial(poisson, 1_000_000, 20, *_WIDE),
        _settings(20_000),
        whole=True,
    ),
}
"""Names of `kvsim bench --workload`."""
