"""What a run says of its release of vLLM V1, beside deciding as it does."""

import pytest

from kvsim.engines.vllm_v1.releases import IDLE, NEWEST, RULES, release_of
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config


def said(version: str, **settings: object) -> list[str]:
    """The notes of a run that name vLLM."""
    given = {"num_gpu_blocks_override": 600, "max_model_len": 2048, **settings}
    notes = assemble(make_config({**given, "vllm_version": version})).notes
    return [note for note in notes if "vLLM" in note]


def test_a_release_that_was_not_recorded_takes_the_rules_of_its_group() -> None:
    expected = "vLLM 0.21.0 was not recorded: it takes the rules of 0.20.2, which were"
    assert said("0.21.0") == [expected]
    assert said("0.9.3")[0].endswith("it takes the rules of 0.9.2, which were")
    for version in ("0.8.5", "0.9", "0.18", "v0.20.2", "0.33.0.post1"):
        assert said(version) == []
    assert vars_of("0.21.0") == vars_of("0.20.2") != vars_of("0.24.0")


def vars_of(version: str) -> list[bool]:
    release = release_of(tuple(map(int, version.split("."))))
    return [getattr(release, name) for name in RULES]


@pytest.mark.parametrize(
    ("version", "warns", "dies"),
    [
        ("0.9.2", True, True),
        ("0.10.1", True, True),
        ("0.10.2", True, False),
        ("0.11.0", True, False),
        ("0.11.1", False, False),
        ("0.33.0", False, False),
    ],
)
def test_priorities_warn_of_victims_in_the_batch(version: str, warns: bool, dies: bool) -> None:
    words = " ".join(said(version, scheduling_policy="priority"))
    assert ("cache contents that were never computed" in words) == warns
    assert ("or the engine dies" in words) == dies
    assert said(version) == []


BEFORE: dict[str, tuple[object, str, str]] = {
    "scheduling_policy": ("priority", "0.9.1", "0.9.2"),
    "enable_chunked_prefill": (False, "0.9.1", "0.9.2"),
    "async_scheduling": (True, "0.9.2", "0.10"),
    "scheduler_reserve_full_isl": (True, "0.18.0", "0.19"),
    "watermark": (0.1, "0.23.0", "0.24"),
}
"""Setting → a value at work, a release without it, and the first with it."""


@pytest.mark.parametrize("key", BEFORE)
def test_a_setting_that_the_release_does_not_have_is_named(key: str) -> None:
    value, version, first = BEFORE[key]
    settings = {key: value, "max_num_batched_tokens": 2048}
    assert said(version, **settings) == [f"{key}: vLLM {version} does not have it, {first} does"]
    assert said(version, **{**settings, key: IDLE[key]}) == []
    assert not any(note.startswith(f"{key}: vLLM") for note in said(first, **settings))


def test_every_setting_that_came_with_a_rule_is_tried() -> None:
    assert set(BEFORE) == {rule.option for rule in RULES.values() if rule.introduces}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_offloading_size": 0.5}, "connectors"),
        ({"enable_lora": True, "pipeline_parallel_size": 2}, "adapters, pipelines"),
        ({"model": "gemma-3-1b", "num_gpu_blocks_override": 2000}, "groups of layers"),
    ],
)
def test_what_was_recorded_of_one_release_alone_is_named(
    settings: dict[str, object], words: str
) -> None:
    newest = ".".join(map(str, NEWEST))
    told = f"vLLM 0.18: {words}: as {newest} decides; with older releases they were not recorded"
    assert told in said("0.18", **settings)
    assert not any("not recorded" in note for note in said(newest, **settings))
