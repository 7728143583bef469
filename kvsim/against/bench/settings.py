"""What `kvsim bench` measures: engines, features and policies, each on its usual workloads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.against.bench.workloads import WORKLOADS
from kvsim.errors import ConfigError
from kvsim.settings.config import nearest, read_toml

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
_OWN = "kvsim.against.bench.own"

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
        for word in workloads or _USUAL.get(name, ("W1",))
        for workload in named("--workload", word, WORKLOADS)
        if workloads or trace or WORKLOADS[workload].own
    ]
    for case in cases:
        if trace is None and not WORKLOADS[case.workload].own:
            raise ConfigError(
                f"bench: {case.workload} needs Mooncake's conversation_trace.jsonl;"
                " give --trace FILE"
            )
    bases = [case.base for case in cases if case.base is not None]
    return list(dict.fromkeys([*cases, *bases]))


def named(option: str, word: str, names: Iterable[str]) -> list[str]:
    """The name that is this word, or all of `WORD-...` for a word such as `decode`.

    Raises `ConfigError` with the nearest name.
    """
    found = [word] if word in names else [name for name in names if name.startswith(f"{word}-")]
    if not found:
        raise ConfigError(
            f"{option}: unknown {word!r};{nearest(word, names)} choose from {', '.join(names)}"
            + (", or give a TOML file" if option == "--settings" else "")
        )
    return found
