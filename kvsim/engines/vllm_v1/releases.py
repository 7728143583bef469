"""What each release of vLLM V1 decides differently: a declaration per rule, named by what changed.

A rule is on in the releases from `since` to before `until`. Everything else is one scheduler
(`kvsim.engines.vllm_v1.scheduler`). Sources are files of the released wheels, below `vllm/v1/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

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


RULES: Final[dict[str, Rule]] = {
    "knows_priorities": Rule(
        "--scheduling-policy priority is known; before, everybody is served in order of arrival",
        since=(0, 9, 2),
        option="scheduling_policy",
        introduces=True,
    ),
    "cuts_on_request": Rule(
        "chunked prefill can be switched off; before, prompts are always cut",
        since=(0, 9, 2),
        option="enable_chunked_prefill",
        introduces=True,
    ),
    "schedules_ahead": Rule(
        "asynchronous scheduling is known",
        since=(0, 10),
        source="core/sched/async_scheduler.py",
        option="async_scheduling",
        introduces=True,
    ),
    "frees_last_block_first": Rule(
        "without a prefix cache, too, the last block of a table is freed first",
        since=(0, 9),
        source="core/kv_cache_manager.py, free",
        option="enable_prefix_caching",
    ),
    "reserves_whole_prompts": Rule(
        "a request is admitted where its whole prompt fits; before, where its first chunk does",
        since=(0, 19),
        source="core/kv_cache_manager.py, allocate_slots",
        option="scheduler_reserve_full_isl",
        introduces=True,
    ),
    "keeps_a_watermark": Rule(
        "admissions leave the blocks of --watermark free",
        since=(0, 24),
        source="core/kv_cache_manager.py, allocate_slots",
        option="watermark",
        introduces=True,
    ),
    "evicts_blank_blocks_first": Rule(
        "blocks without content are reused first; before, in the order in which they were freed",
        since=(0, 24),
        source="core/block_pool.py, free_blocks",
    ),
    "queues_blank_blocks_uncached": Rule(
        "without a prefix cache, blocks are reused in the order in which they were freed",
        since=(0, 27),
        until=(0, 28),
        source="core/block_pool.py, free_blocks",
        option="enable_prefix_caching",
    ),
    "spares_the_only_request": Rule(
        "--long-prefill-token-threshold does not cut the prompt of the only request",
        since=(0, 31),
        option="long_prefill_token_threshold",
    ),
    "knows_the_last_token": Rule(
        "with asynchronous scheduling, a request whose last token is in flight is not scheduled"
        " once more",
        since=(0, 11, 1),
        option="async_scheduling",
    ),
    "keeps_victims_in_the_batch": Rule(
        "a victim that the step had scheduled stays in the batch, and resumes on cache contents"
        " that were never computed",
        since=(0, 9, 2),
        until=(0, 11, 1),
        option="scheduling_policy",
    ),
    "dies_of_victims_in_the_batch": Rule(
        "the engine dies where such victims make the batch larger than the running requests",
        since=(0, 9, 2),
        until=(0, 10, 2),
        option="scheduling_policy",
    ),
    "passes_over_behind_victims": Rule(
        "a victim that the step had not scheduled makes the next running request miss the step",
        since=(0, 9, 2),
        until=(0, 28),
        option="scheduling_policy",
    ),
    "ends_at_own_preemption": Rule(
        "where a request is its own victim, those behind it get nothing in the step",
        until=(0, 33),
        option="scheduling_policy",
    ),
    "sets_long_prompts_aside": Rule(
        "without chunks, a prompt beyond the token budget lets those behind it go first",
        since=(0, 9, 2),
        until=(0, 12),
        option="enable_chunked_prefill",
    ),
    "extends_keys_late": Rule(
        "a request that was preempted while a token was in flight may miss its last full block",
        until=(0, 10, 1),
        source="core/kv_cache_manager.py, get_computed_blocks",
        option="async_scheduling",
    ),
    "ties_in_order_of_the_trace": Rule(
        "equal priorities and arrivals are an error of the engine; here, the trace decides",
        until=(0, 12),
        source="core/sched/request_queue.py",
        option="scheduling_policy",
    ),
    "queues_empty_steps": Rule(
        "a step that computes nothing takes its place among those in flight",
        since=(0, 10, 2),
        source="engine/core.py, step_with_batch_queue",
        option="async_scheduling",
    ),
    "goes_on_after_empty_steps": Rule(
        "a step that computes nothing is followed by another one at once",
        since=(0, 23),
        source="engine/core.py, step_with_batch_queue",
        option="async_scheduling",
    ),
}
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
    said = []
    version, name = release.version, f"vLLM {_written(release.version)}"
    if (*version, 0)[:3] not in RECORDED and (*version, 0, 0)[:3] not in RECORDED:
        nearest = max(each for each in RECORDED if each <= version)
        said.append(
            f"{name} was not recorded: it takes the rules of {_written(nearest)}, which were"
        )
    for rule in RULES.values():
        idle = given.get(rule.option) in (None, IDLE.get(rule.option))
        if rule.introduces and not rule.holds(version) and not idle:
            said.append(f"{rule.option}: {name} does not have it, {_written(rule.since)} does")
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
