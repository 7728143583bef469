"""A setup says everything: what is built from it is what a run of kvsim has."""

import json
from pathlib import Path
from typing import Any

import pytest
from small import PROFILE, SETTINGS, write_trace

from kvsim.against.validate.__main__ import main
from kvsim.against.validate.setup import (
    POLICIES,
    SCHEMA,
    build,
    build_scheduler,
    foreign,
    prepare,
    read_json,
    refuse_foreign,
    refuse_other_model,
    write_json,
)
from kvsim.engines.vllm_063.scheduler import Vllm063
from kvsim.errors import ConfigError
from kvsim.policies.victims import most_computed
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config
from kvsim.workload import Trace, open_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return open_trace(str(write_trace(tmp_path_factory.mktemp("trace"))))


def state(thing: Any) -> dict[str, Any]:
    """Plain fields of an object; others by the name of their class, or of what they make."""
    plain = (int, float, str, bool, type(None), type, type(state))
    names = {name for kind in type(thing).__mro__ for name in vars(kind).get("__mypyc_attrs__", ())}
    compiled = {name: getattr(thing, name) for name in sorted(names) if hasattr(thing, name)}
    fields = (compiled | getattr(thing, "__dict__", {})).items()
    orders = [each for each in fields if each[0] in ("idle_order", "eviction")]
    made = {key: make(0, 4) for key, make in orders if not isinstance(make, type)}
    return {
        key: value if isinstance(value, plain) else type(value).__name__
        for key, value in (*fields, *made.items())
    }


FURTHER: list[dict[str, Any]] = [
    {},
    {"watermark": 0.1, "block_manager_args": {"growth": "when-needed"}},
    {"disable_async_output_proc": True, "victim": "most-computed"},
]


@pytest.mark.parametrize("further", FURTHER)
def test_what_is_built_is_what_a_run_has(trace: Trace, further: dict[str, Any]) -> None:
    config = make_config({**SETTINGS, **further})
    setup = json.loads(json.dumps(prepare(trace, config, tuple(POLICIES))))
    for policy in setup["policies"]:
        parts = assemble(make_config({**SETTINGS, **further, **POLICIES[policy["name"]]}))
        tables = build(policy["block_manager"])
        scheduler = build_scheduler(policy["scheduler"], policy["config"], tables)
        assert type(scheduler) is type(parts.scheduler)
        assert state(scheduler) == state(parts.scheduler)
        assert type(tables) is type(parts.blocks)
        assert state(tables) == state(parts.blocks)
        for pool, other in ((tables.gpu, parts.blocks.gpu), (tables.cpu, parts.blocks.cpu)):
            assert (pool.first, pool.size) == (other.first, other.size)
    if "victim" in further:
        assert scheduler.victim is most_computed


def test_the_requests_are_those_that_are_served(trace: Trace) -> None:
    for number, served in ((None, len(trace.rows)), (3, 3), (1 << 20, len(trace.rows))):
        setup = prepare(trace, make_config({**SETTINGS, "num_prompts": number}))
        assert setup["trace"]["requests"] == served > 0


def test_v1_is_run_synchronously(trace: Trace) -> None:
    settings = {**SETTINGS, "engine": "vllm-v1", "num_cpu_blocks_override": 0}
    with pytest.raises(ConfigError, match="add --no-async-scheduling"):
        prepare(trace, make_config(settings), ("prefix-caching",))
    setup = prepare(
        trace, make_config({**settings, "async_scheduling": False}), ("prefix-caching",)
    )
    assert setup["policies"][0]["scheduler"]["class"] == "kvsim.engines.vllm_v1.scheduler:VllmV1"


@pytest.mark.parametrize(
    ("further", "policies", "words"),
    [
        ({}, ("recompute", "swapp"), r"--policies: unknown 'swapp'; did you mean 'swap'\?"),
        ({"engine": "vllm-0.3.3"}, ("swap",), "engine: validate runs vllm-0.6.3, vllm-v1"),
        ({"tensor_parallel_size": 2}, ("swap",), "validate runs on one device"),
        ({"num_gpu_blocks_override": 9}, ("swap",), "do not fit into the KV cache"),
    ],
)
def test_what_cannot_be_run_is_refused(
    trace: Trace, further: dict[str, Any], policies: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(trace, make_config({**SETTINGS, **further}), policies)


@pytest.mark.parametrize(
    ("part", "key", "value"), [("model", "layers", 3), ("engine", "block_size", 32)]
)
def test_a_profile_of_another_model_is_refused(
    trace: Trace, part: str, key: str, value: int
) -> None:
    setup = prepare(trace, make_config(SETTINGS), ("swap",))
    refuse_other_model(setup, PROFILE)
    with pytest.raises(ConfigError, match=f"measured with {key} {value}, the setup has"):
        refuse_other_model(setup, {**PROFILE, part: {**PROFILE[part], key: value}})


class Own(Vllm063):
    """An engine of a user's own."""


@pytest.mark.parametrize("further", [*FURTHER, {"model": "c:/models/tiny.toml"}])
def test_a_setup_runs_what_is_of_kvsim(trace: Trace, further: dict[str, Any]) -> None:
    setup = prepare(trace, make_config({**SETTINGS, **further, "model": "tiny"}), tuple(POLICIES))
    for policy in setup["policies"]:
        policy["config"]["model"] = further.get("model", "tiny")
    refuse_foreign(setup, (), "setup.json")


def test_code_of_ones_own_is_run_where_it_is_named(trace: Trace) -> None:
    name = f"{__name__}:Own"
    setup = prepare(trace, make_config({**SETTINGS, "engine": name}))
    assert foreign(setup) == [name]
    with pytest.raises(ConfigError, match=rf"setup\.json: runs '{name}', .* add --trust {name}$"):
        refuse_foreign(setup, (), "setup.json")
    refuse_foreign(setup, [name], "setup.json")


@pytest.mark.parametrize(
    "name",
    ["evil:run", "evil", "evil:!", "os:system", "kvsim.writing:rmtree", "kvsim.none:Engine", 3],
)
@pytest.mark.parametrize("part", ["scheduler", "block_manager"])
def test_a_setup_does_not_say_which_code_runs(
    part: str, name: Any, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    setup = prepare(trace, make_config(SETTINGS), ("swap",))
    setup["policies"][0][part]["class"] = name
    write_json("setup.json", setup)
    write_json("profile.json", PROFILE)
    with pytest.raises(SystemExit) as stop:
        main(["setup.json", "--profile", "profile.json", "--out", "recording.json"])
    assert stop.value.code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "evil.py",
        "profile.json",
        "setup.json",
    ]


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("config", "engine"),
        ("config", "victim"),
        ("config", "scheduler_args"),
        ("config", "secondary_tiers"),
        ("scheduler", "arguments"),
        ("block_manager", "arguments"),
    ],
)
def test_nor_do_its_settings(part: str, key: str, trace: Trace) -> None:
    setup = prepare(trace, make_config(SETTINGS), ("swap",))
    table = setup["policies"][0][part]
    inner = {"module_path": "evil"} if key == "secondary_tiers" else "kvsim.writing:rmtree"
    table[key] = {"rule": [inner]} if key.endswith("s") else "evil:!"
    with pytest.raises(
        ConfigError, match=r"setup\.json: runs '(kvsim.writing:rmtree|evil:!|evil)'"
    ):
        refuse_foreign(setup, (), "setup.json")


@pytest.mark.parametrize("policies", [3, [3], [{}], [{"config": []}]], ids=str)
def test_a_damaged_setup(policies: Any) -> None:
    with pytest.raises(ConfigError, match=r"setup\.json: the setup is damaged; make it again"):
        refuse_foreign({"policies": policies}, (), "setup.json")


def test_files_are_read_as_they_were_written(trace: Trace, tmp_path: Path) -> None:
    setup = prepare(trace, make_config(SETTINGS))
    path = write_json(tmp_path / "deep" / "setup.json", setup)
    assert read_json(path, SCHEMA) == setup
    assert max(map(len, path.read_text().splitlines())) < 400


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "expected a table of keys, got a list"),
        ("{}", "has no schema"),
        ('{"schema": "kvsim.profile/1"}', "its schema is 'kvsim.profile/1'; expected"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_json(path, SCHEMA)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_json(tmp_path / "none.json", SCHEMA)
