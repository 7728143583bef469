"""What an upgrade changes, and which change does what."""

import json
from pathlib import Path

import pytest
from command import run_here
from exact.conformance.generate_v1 import make_case

from kvsim.against.conform import vllm_v1
from kvsim.engines.vllm_v1.releases import IDLE, RULES, Release
from kvsim.errors import ConfigError
from kvsim.search.compare import changes, upgrades
from kvsim.settings.config import make_config

NAMES = {
    "scheduling_policy": "policy",
    "enable_chunked_prefill": "v1_enable_chunked_prefill",
    "async_scheduling": "v1_async",
    "scheduler_reserve_full_isl": "v1_reserve_full_isl",
    "watermark": "v1_watermark",
}
"""Setting → its name in a recorded case, where that is another."""


def changed(before: str, after: str, **settings: object) -> list[str]:
    """The beginnings of the words on each change."""
    given = {"num_gpu_blocks_override": 600, **settings}
    one, other = (make_config({**given, "vllm_version": each}) for each in (before, after))
    return [" ".join(change.words.split()[:3]) for change in changes(one, other)]


def test_changes_are_defaults_the_pool_and_the_rules_at_work() -> None:
    assert changed("0.13.0", "0.14.0") == ["async_scheduling on, was"]
    assert changed("0.18.0", "0.19.0") == ["scheduler_reserve_full_isl on, was"]
    assert changed("0.23.0", "0.24.0") == ["blocks without content"]
    assert changed("0.23.0", "0.24.0", watermark=0.1) == [
        "admissions leave the",
        "blocks without content",
    ]
    assert changed("0.32.0", "0.33.0") == []
    assert changed("0.32.0", "0.33.0", scheduling_policy="priority") == ["where a request"]
    assert changed("0.19.0", "0.20.0", num_gpu_blocks_override=None)[0].endswith("GPU blocks,")


def test_only_neighbours_that_differ_in_the_release_are_upgrades() -> None:
    old, new = (make_config({"vllm_version": each}) for each in ("0.23.0", "0.24.0"))
    other = make_config({"vllm_version": "0.25.0", "max_num_seqs": 7})
    found = upgrades([("a", old), ("b", new), ("c", other), ("d", other)])
    assert [names for names, _ in found] == [("a", "b")]


@pytest.mark.parametrize("engine", ["sglang", "vllm-0.6.3"])
def test_other_engines_have_no_releases(engine: str) -> None:
    configs = [make_config({"engine": engine, "max_num_seqs": seqs}) for seqs in (1, 2)]
    with pytest.raises(ConfigError, match="one release"):
        changes(*configs)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.option])
def test_a_rule_decides_nothing_without_its_setting(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is set, its switch changes no record."""
    option = RULES[name].option
    for seed in range(12):
        config, trace = make_case(seed)
        for version in ((0, 9, 2), (0, 33)):
            given = {**config, "vllm_version": "0.33", NAMES.get(option, option): IDLE[option]}
            logs = []
            for switched in ((), (name,)):
                release = Release(version, switched)
                monkeypatch.setattr(vllm_v1, "release_of", lambda _, release=release: release)
                logs.append(list(vllm_v1.replay(given, trace)))
            assert logs[0] == logs[1], f"{name}, seed {seed}, {version}"


def tight(tmp_path: Path) -> list[str]:
    """Four prompts of four chunks each, and a pool for two of them and the first chunk of another,
    which is preempted if it is admitted for that."""
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i, "input_length": 2000, "output_length": 60} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "--num-gpu-blocks-override 300 --max-num-batched-tokens 500 --max-model-len 4000"
    return ["--trace", str(path), *words.split()]


def test_the_command_says_which_change_made_the_difference(tmp_path: Path) -> None:
    done = run_here(["compare", *tight(tmp_path), "--vllm-version", "0.18,0.19"])
    assert done.returncode == 0, done
    words = " ".join(done.stdout.split())
    assert "What vLLM 0.19 changes against vLLM 0.18, one change at a time" in words
    assert "scheduler_reserve_full_isl on, was off: " in words
    assert "Preemptions 0, and " in words.split("one change at a time")[1]


def test_nothing_changes_between_releases_that_decide_alike(tmp_path: Path) -> None:
    done = run_here(["compare", *tight(tmp_path), "--vllm-version", "0.31,0.32"])
    assert done.returncode == 0
    assert "Nothing that is at work in this run changed." in done.stdout


def test_several_releases_are_compared_on_one_engine(tmp_path: Path) -> None:
    releases = [*tight(tmp_path), "--vllm-version", "0.18,0.19"]
    one, fleet = run_here(["run", *releases]), run_here(["compare", "--replicas", "2", *releases])
    assert (one.returncode, fleet.returncode) == (2, 2)
    assert "0.18,0.19: a run has one release" in one.stderr.splitlines()[-1]
    assert "compare: give two" in fleet.stderr.splitlines()[-1]
