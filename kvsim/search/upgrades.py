"""What an upgrade of vLLM V1 does to a load, and which of its changes do it.

The run of the later release is repeated with one change undone at a time: a rule of scheduling
(`kvsim.engines.vllm_v1.releases`), a default, or the size of the pool. What differs is the effect
of that change, all others being made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.engines.vllm_v1.releases import IDLE, RULES
from kvsim.errors import ConfigError
from kvsim.report import Row, change_words, compare_table, value_words
from kvsim.report.wording import setting_words
from kvsim.results.metrics import NAMED
from kvsim.run.assembly import assemble
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.settings.config import RunConfig, to_table
from kvsim.workload.trace import Trace

EFFECTS = ("p50_ttft_ms", "p99_ttft_ms", "num_preemptions", "prefix_cache_hit_rate")
"""Figures in which a change may have an effect."""
_BY_THE_POOL = ("gpu_memory_utilization", "vllm_version")
"""Settings that are no changes of their own: they make the pool, or are the upgrade."""


class Undone(RunConfig, frozen=True, kw_only=True):
    """The settings of the later release, with one change undone."""

    switched: tuple[str, ...] = ()
    """The rule that decides as before, if it is one."""


class Change(NamedTuple):
    """One thing that an upgrade changes."""

    words: str
    undone: Undone


def of_releases(name: str, config: RunConfig) -> list[tuple[str, RunConfig]]:
    """A configuration under each release that its `vllm_version` lists, by name."""
    versions = dict.fromkeys((config.vllm_version or "").split(","))
    if len(versions) == 1:
        return [(name, config)]
    return [(f"{name} vLLM {v}".strip(), replace(config, vllm_version=v)) for v in versions]


class Upgrade(NamedTuple):
    """A run, and the same one under another release."""

    names: tuple[str, str]
    changes: list[Change]


def upgrades(configs: Sequence[tuple[str, RunConfig]]) -> list[Upgrade]:
    """The upgrades among neighbours. Raises `ConfigError` for an engine without releases."""
    found = []
    for (name, before), (other, after) in pairwise(configs):
        if before != after and before == replace(after, vllm_version=before.vllm_version):
            found.append(Upgrade((name, other), changes(before, after)))
    return found


def changes(before: RunConfig, after: RunConfig) -> list[Change]:
    """What an upgrade changes for a run: defaults, the pool and rules that are at work. Raises
    `ConfigError` for an engine without releases."""
    one, other = assemble(before), assemble(after)
    if not (isinstance(one.blocks, KVCacheManager) and isinstance(other.blocks, KVCacheManager)):
        raise ConfigError(f"vllm_version: {after.engine} is one release; leave the others out")
    pool = {"num_gpu_blocks_override": other.memory.num_gpu_blocks}
    given = to_table(after)
    keys = [key for key in RunConfig.__struct_fields__ if key not in _BY_THE_POOL]
    settings = [key for key in keys if getattr(one.config, key) != getattr(other.config, key)]
    found = []
    for key in settings:
        was, now = getattr(one.config, key), getattr(other.config, key)
        words = f"{key} {setting_words(now)}, was {setting_words(was)}"
        found.append(Change(words, Undone(**{**given, **pool, key: was})))
    if one.memory.num_gpu_blocks != other.memory.num_gpu_blocks:
        was = one.memory.num_gpu_blocks
        words = f"{other.memory.num_gpu_blocks:,} GPU blocks, were {was:,}"
        found.append(Change(words, Undone(**{**given, "num_gpu_blocks_override": was})))
    for name, rule in RULES.items():
        differs = getattr(one.blocks.release, name) != getattr(other.blocks.release, name)
        value = getattr(other.config, rule.option) if rule.option else ""
        idle = value in (None, IDLE.get(rule.option))
        if differs and not idle and not (rule.introduces and rule.option in settings):
            words = f"{rule.about} ({rule.written()})"
            found.append(Change(words, Undone(**given, switched=(name,))))
    return found


def simulate_undone(trace: Trace, config: Undone, *, command: str = "") -> Result:
    """Replays a trace with a change undone."""
    parts_of = partial(assemble, switched=config.switched)
    return simulate(trace, config, command=command, parts_of=parts_of)


def effect_words(
    found: list[Change], without: list[dict[str, Any]], after: dict[str, Any]
) -> Iterator[str]:
    """A sentence on each change that has an effect, then one on all others.

    `without`: the summary of the run without each change; `after`: that of the upgrade.
    """
    idle = []
    for change, summary in zip(found, without, strict=True):
        rows = compare_table([("without", summary), ("after", after)])
        effects = [
            _effect(row) for row in rows if row.metric.key in EFFECTS and row.judge(0) != "same"
        ]
        if effects:
            yield f"{change.words}: {'; '.join(effects)}."
        else:
            idle.append(change.words)
    if idle:
        yield f"No effect on {', '.join(NAMED[key].label for key in EFFECTS)}: {'; '.join(idle)}."
    if not found:
        yield "Nothing that is at work in this run changed."


def _effect(row: Row) -> str:
    return (
        f"{row.metric.label} {value_words(row, 1)}, and {value_words(row, 0)} with that undone"
        f" ({change_words(row, 0)})"
    )
