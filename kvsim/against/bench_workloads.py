"""What `kvsim bench` measures: workloads for speed, made by generators, and the settings for each.

Arrivals are Poisson. `numpy.random.default_rng(0)` draws first the gaps, then the prompts, then the
outputs. Blocks hold 16 tokens; first come first served, at most 256 running, 8,192 tokens a step.
Times, where the settings name no others: 6 ms a step + 40 us per prompt token + 20 us per decoding
sequence + 43 ns per token of its context. Engines, features and policies are chosen apart
(`SETTINGS`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.errors import ConfigError, check_choice
from kvsim.settings.config import read_toml
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


DEFAULT = "vllm-v1"
"""The name of what a run with nothing but a GPU simulates."""
CONSTANT = "constant"

_H100 = {"hardware": "h100-sxm", "cost": {"model": "table"}}
_V1 = {"engine": "vllm-v1", **_H100}
_DRAFTS = {
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "synthetic_acceptance_length": 2.4,
}
_OWN = "kvsim.against.bench_own"

SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULT: _V1,
    "sglang": {"engine": "sglang", **_H100},
    "vllm-0.6.3": {"engine": "vllm-0.6.3", **_H100},
    "vllm-0.3.3": {"engine": "vllm-0.3.3", **_H100},
    "nano-vllm": {"engine": "nano-vllm", **_H100},
    "feature-window": {"engine": "vllm-v1", "model": "gpt-oss-20b"},
    "feature-windows": {"engine": "vllm-v1", "model": "gemma-3-27b-it"},
    "feature-states": {"engine": "vllm-v1", "model": "qwen3-next-80b-a3b-instruct"},
    "feature-drafts": {**_V1, "speculative_config": _DRAFTS},
    "feature-lora": {**_V1, "enable_lora": True, "max_loras": 4},
    "feature-priority": {**_V1, "scheduling_policy": "priority"},
    "feature-watermark": {**_V1, "watermark": 0.05},
    "feature-stages": {**_V1, "pipeline_parallel_size": 4},
    "feature-offload": {**_V1, "kv_offloading_size": 16},
    "own-scheduler": {**_V1, "engine": f"{_OWN}:Scheduler"},
    "own-victim": {**_V1, "victim": f"{_OWN}:victim"},
    CONSTANT: {"engine": "vllm-v1"},
    "own-price": {"engine": "vllm-v1", "cost": {"model": f"{_OWN}:Price"}},
}
"""Names of `--settings`: an engine, and what it does otherwise than by default."""

_LOADS = ("W1", "W2", "conversation")
_USUAL: dict[str, tuple[str, ...]] = {
    DEFAULT: (*_LOADS, "W2x", "W3", "marked", "blocks", "block-size", "prompt", "decode", "fleet"),
    "sglang": _LOADS,
    **{name: ("marked",) for name in SETTINGS if name.startswith("feature-")},
    **{name: ("marked", "W2x") for name in SETTINGS if name.startswith("own-")},
    CONSTANT: ("marked", "W2x"),
}
"""The workloads that settings are measured on where none is named, if not only on W1."""


class Case(NamedTuple):
    """A workload under some settings."""

    workload: str
    settings: str
    """A name of `SETTINGS`, or the path of a TOML file."""

    @property
    def table(self) -> dict[str, Any]:
        """The settings of a run. Raises `ConfigError`."""
        own = SETTINGS.get(self.settings)
        chosen = read_toml(self.settings) if own is None else own
        return WORKLOADS[self.workload].settings | chosen

    @property
    def base(self) -> Case | None:
        """What it is compared with: the default at the same prices for a feature or a policy, one
        replica for a fleet."""
        if WORKLOADS[self.workload].replicas > 1:
            return Case(self.workload.rpartition("-")[0] + "-1", self.settings)
        if not self.settings.startswith(("feature-", "own-")):
            return None
        return Case(self.workload, DEFAULT if "hardware" in SETTINGS[self.settings] else CONSTANT)

    def __str__(self) -> str:
        return f"{self.workload} {self.settings}"


def choose(workloads: list[str], settings: list[str], trace: str | None) -> list[Case]:
    """The cases with these names and what they are compared with, or the usual ones.

    Workloads alone run with `DEFAULT`, settings alone on their usual workloads. Raises
    `ConfigError` for unknown names, and for a named workload that needs `trace`.
    """
    cases = [
        Case(workload, name)
        for given in settings or ([DEFAULT] if workloads else SETTINGS)
        for name in ([given] if Path(given).is_file() else named("--settings", given, SETTINGS))
        for workload in _measured_on(name, workloads, trace)
    ]
    bases = [case.base for case in cases if case.base is not None]
    return list(dict.fromkeys([*cases, *bases]))


def _measured_on(settings: str, words: list[str], trace: str | None) -> list[str]:
    """The workloads with these names; without names, the usual ones of the settings, but for those
    whose trace is not there. Raises `ConfigError` as `choose` does."""
    wanted = words or _USUAL.get(settings, ("W1",))
    found = [name for word in wanted for name in named("--workload", word, WORKLOADS)]
    lacking = [] if trace else [name for name in found if not WORKLOADS[name].own]
    if words and lacking:
        raise ConfigError(
            f"bench: {lacking[0]} needs Mooncake's conversation_trace.jsonl; give --trace FILE"
        )
    return [name for name in found if name not in lacking]


def named(option: str, word: str, names: Iterable[str]) -> list[str]:
    """The name that is this word, or all of `WORD-...` for a word such as `decode`.

    Raises `ConfigError` with the nearest name.
    """
    found = [word] if word in names else [name for name in names if name.startswith(f"{word}-")]
    if not found:
        also = ", or give a TOML file" if option == "--settings" else ""
        check_choice(option, word, names, also)
    return found
