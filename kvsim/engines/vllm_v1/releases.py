"""What each release of vLLM V1 decides differently, as `releases.toml` declares it. Everything else
is one scheduler (`kvsim.engines.vllm_v1.scheduler`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvsim.engines import vllm_v1
from kvsim.errors import ConfigError

Version = tuple[int, ...]


class Rule(NamedTuple):
    """A behaviour, and the releases that have it."""

    about: str
    since: Version = (0,)
    until: Version = (1 << 30,)
    source: str = "core/sched/scheduler.py, schedule"
    option: str = ""
    """The setting without which it decides nothing, as `IDLE` says."""
    introduces: bool = False
    """Whether the setting came with it."""

    def written(self) -> str:
        """The releases that have it: `from 0.9.2 before 0.12`."""
        since = f"from {_written(self.since)}" if any(self.since) else ""
        until = f"before {_written(self.until)}" if self.until < (NEWEST[0] + 1,) else ""
        return " ".join(filter(None, (since, until)))

    def holds(self, version: Version) -> bool:
        """Whether a release has it."""
        return self.since <= version < self.until

    def is_missed(self, version: Version, given: Mapping[str, object]) -> bool:
        """Whether the setting that came with it is given to a release that does not have it."""
        if not self.introduces or self.holds(version):
            return False
        return given.get(self.option) not in (None, IDLE.get(self.option))


def _read_rules() -> dict[str, Rule]:
    # A compiled module does not lie beside its source.
    path = Path(vllm_v1.__file__).with_name("releases.toml")
    table: dict[str, dict[str, Any]] = tomllib.loads(path.read_text("utf-8"))
    for said in table.values():
        for key in {"since", "until"} & said.keys():
            said[key] = tuple(map(int, said[key].split(".")))
    return {name: Rule(**said) for name, said in table.items()}


RULES: Final[dict[str, Rule]] = _read_rules()
"""The behaviours in which releases differ, by what changed."""

IDLE: Final[dict[str, object]] = {
    "scheduling_policy": "fcfs",
    "enable_chunked_prefill": True,
    "async_scheduling": False,
    "enable_prefix_caching": True,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.0,
    "long_prefill_token_threshold": 0,
}
"""Setting → value with which the rules that name it decide nothing."""

NEWEST: Final = (0, 33)
OLDEST: Final = (0, 8, 5)


class Release:
    """What one release decides."""

    version: Version
    knows_priorities: bool
    cuts_on_request: bool
    schedules_ahead: bool
    frees_last_block_first: bool
    reserves_whole_prompts: bool
    keeps_a_watermark: bool
    evicts_blank_blocks_first: bool
    queues_blank_blocks_uncached: bool
    spares_the_only_request: bool
    knows_the_last_token: bool
    keeps_victims_in_the_batch: bool
    dies_of_victims_in_the_batch: bool
    passes_over_behind_victims: bool
    ends_at_own_preemption: bool
    sets_long_prompts_aside: bool
    extends_keys_late: bool
    ties_in_order_of_the_trace: bool
    queues_empty_steps: bool
    goes_on_after_empty_steps: bool

    def __init__(self, version: Version = NEWEST, switched: tuple[str, ...] = ()) -> None:
        """`switched`: rules in which it differs from the real release."""
        self.version = version
        for name, rule in RULES.items():
            setattr(self, name, rule.holds(version) != (name in switched))


LATEST: Final = Release()

RECORDED: Final = frozenset(
    (0, *map(int, each.split(".")))
    for each in (
        *("8.5", "9.0", "9.1", "9.2", "10.0", "10.1", "10.1.1", "10.2", "11.0", "11.1", "11.2"),
        *("12.0", "13.0", "14.0", "15.0", "16.0", "17.0", "18.0", "19.0", "20.0", "20.2", "22.0"),
        *("22.1", "23.0", "24.0", "25.0", "26.0", "27.0", "27.1", "28.0", "29.0", "30.0", "31.0"),
        *("32.0", "33.0"),
    )
)
"""The releases whose own scheduler was run: the logs that `kvsim conform` reads, and seven more."""


def release_of(version: Version, switched: tuple[str, ...] = ()) -> Release:
    """What a release decides, but for the rules `switched`. Raises `ConfigError` for one that is
    not known."""
    if not OLDEST <= version < (0, NEWEST[1] + 1):
        raise ConfigError(
            f"vllm_version: {_written(version)}: what vLLM V1 decides is known from 0.8.5 to 0.33;"
            " use one of these"
        )
    return Release(version, switched)


def notes_on(release: Release, given: Mapping[str, object], features: Sequence[str]) -> list[str]:
    """What a reader of a result should know of the release, one line each.

    `given`: values of the settings that rules name; `features`: what was recorded of 0.33 alone.
    """
    version, name = release.version, f"vLLM {_written(release.version)}"
    said = [
        f"{rule.option}: {name} does not have it, {_written(rule.since)} does"
        for rule in RULES.values()
        if rule.is_missed(version, given)
    ]
    if not RECORDED.intersection(((*version, 0)[:3], (*version, 0, 0)[:3])):
        nearest = max(each for each in RECORDED if each <= version)
        said.insert(
            0, f"{name} was not recorded: it takes the rules of {_written(nearest)}, which were"
        )
    if given["scheduling_policy"] == "priority" and release.keeps_victims_in_the_batch:
        dies = ", or the engine dies" if release.dies_of_victims_in_the_batch else ""
        said.append(
            f"scheduling_policy priority under {name}: a preempted request may resume on cache"
            f" contents that were never computed{dies}, as in the real engine"
        )
    if features and version < NEWEST:
        said.append(
            f"{name}: {', '.join(features)}: as {_written(NEWEST)} decides; with older releases"
            " they were not recorded"
        )
    return said


def _written(version: Version) -> str:
    return ".".join(map(str, version))
