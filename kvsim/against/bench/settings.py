"""The engines that `kvsim bench` measures, and on which workloads: the default comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from kvsim.against.bench.workloads import DEFAULT, SYNC, WORKLOADS, Checks, named
from kvsim.errors import ConfigError
from kvsim.settings.config import nearest, read_toml

_LONGEST_TOKENS = {"max_num_batched_tokens": 131_072}
"""A prompt has to fit into one step where it is not cut into chunks."""
_SYNC = {"engine": "vllm-0.6.3", "disable_async_output_proc": True, "max_model_len": 8_192}

SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULT: {"engine": "vllm-v1"},
    "vllm-v1-table": {
        "engine": "vllm-v1",
        "hardware": "h200-sxm",
        "cost": {
            "model": "table",
            "profile": "h200-sxm-llama-3-8b-public",
            "link": {"block_us": 30},
        },
    },
    "vllm-0.6.3": {"engine": "vllm-0.6.3"},
    "vllm-0.6.3-cache": {
        "engine": "vllm-0.6.3",
        "enable_prefix_caching": True,
        **_LONGEST_TOKENS,
    },
    SYNC: _SYNC,
    "vllm-0.3.3": {"engine": "vllm-0.3.3"},
    "nano-vllm": {"engine": "nano-vllm"},
}
"""Names of `--settings`: an engine and what it does otherwise than by default."""

USUAL: dict[str, tuple[str, ...]] = {
    DEFAULT: (
        *("W1", "W2", "W2x", "W3", "W4", "W4-300k"),
        *("requests", "blocks", "block-size", "prompt", "decode", "fleet"),
    ),
    "vllm-v1-table": ("W1", "W2x"),
    "vllm-0.6.3": ("W1", "W2x"),
    "vllm-0.6.3-cache": ("W1", "W4"),
    SYNC: ("W1", "W1lo", "W2", "W2x", "W3", "chunked-W1", "decode"),
    "vllm-0.3.3": ("W1",),
    "nano-vllm": ("W1",),
}
"""The workloads that each is measured on where none is named."""


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
    def checks(self) -> Checks | None:
        """The known results of a run, if there are any."""
        return WORKLOADS[self.workload].checks.get(self.settings)

    def __str__(self) -> str:
        return f"{self.workload} {self.settings}"


def choose(workloads: list[str], settings: list[str], trace: str | None) -> list[Case]:
    """The cases with these names, or the usual ones where none are given.

    Workloads alone run with `DEFAULT`, settings alone on their usual workloads. Raises
    `ConfigError` for unknown names, and for a named workload that needs `trace`.
    """
    for name in settings:
        if name not in SETTINGS and not Path(name).is_file():
            raise ConfigError(
                f"--settings: unknown {name!r};{nearest(name, SETTINGS)} choose from"
                f" {', '.join(SETTINGS)}, or give a TOML file"
            )
    cases = [
        Case(workload, name)
        for name in settings or ([DEFAULT] if workloads else SETTINGS)
        for word in workloads or USUAL.get(name, USUAL[DEFAULT])
        for workload in named(word)
        if workloads or trace or WORKLOADS[workload].own
    ]
    for case in cases:
        if trace is None and not WORKLOADS[case.workload].own:
            raise ConfigError(
                f"bench: {case.workload} needs Mooncake's conversation_trace.jsonl;"
                " give --trace FILE"
            )
    return list(dict.fromkeys(cases))
