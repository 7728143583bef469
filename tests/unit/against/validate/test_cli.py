"""`kvsim validate` and bad input: one clear line, exit code 2, nothing measured."""

import json
from pathlib import Path

import pytest
from small import PROFILE, write_profile, write_trace

from kvsim.against.validate.setup import RECORDED_KEYS
from kvsim.cli import main

POOL = ["--num-gpu-blocks-override", "40"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cli")
    write_trace(made)
    write_profile(made)
    (made / "model.json").write_text('{"hidden_size": 8}')
    recording = {"schema": "kvsim.recording/1", "kvsim_version": "1"}
    (made / "recording.json").write_text(json.dumps(recording))
    foreign = {"policies": [{"name": "swap", "config": {"engine": "evil:run"}}]}
    whole = {**dict.fromkeys(RECORDED_KEYS), **recording, "setup": foreign}
    (made / "foreign.json").write_text(json.dumps(whole))
    (made / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    (made / "result.json").write_text('{"schema": "kvsim.validation/1"}')
    return made


CASES = [
    ([], ["--trace", "--from"]),
    (["--trace", "trace.jsonl"], ["--profile"]),
    (["--trace", "none.jsonl", "--profile", "profile.json"], ["none.jsonl", "no such file"]),
    (["--trace", "trace.jsonl", "--profile", "none.json"], ["none.json", "no such file"]),
    (["--trace", "trace.jsonl", "--profile", "model.json"], ["model.json", "no schema"]),
    (["--trace", "trace.jsonl", "--profile", "profile.json"], ["--num-gpu-blocks-override"]),
    (
        ["--trace", "trace.jsonl", "--profile", "profile.json", "--device", "tpu", *POOL],
        ["--device", "tpu", "cpu"],
    ),
    (
        ["--trace", "trace.jsonl", "--profile", "profile.json", "--policies", "swop", *POOL],
        ["--policies", "swop", "swap"],
    ),
    (
        ["--trace", "trace.jsonl", "--profile", "profile.json", "--engine", "nano-vllm", *POOL],
        ["engine", "nano-vllm"],
    ),
    (["--from", "none.json"], ["none.json", "cannot be read"]),
    (["--from", "profile.json"], ["kvsim.profile/1", "kvsim.recording/1"]),
    (["--from", "recording.json"], ["--profile"]),
    (["--from", "recording.json", "--profile", "profile.json"], ["device", "missing"]),
    (
        ["--from", "foreign.json", "--profile", "profile.json", "--trust", "evil:walk"],
        ["foreign.json", "runs 'evil:run'", "--trust evil:run"],
    ),
    (["--from", "result.json"], ["device", "missing"]),
]


@pytest.mark.parametrize(("arguments", "words"), CASES)
def test_one_line_says_what_to_do(
    folder: Path,
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        main(["validate", *arguments])
    said = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert len(said) == 1 and said[0].startswith("kvsim: ")
    assert all(word in said[0] for word in words), said
    assert sorted(folder.rglob("*")) == before


def test_what_is_left_open_is_as_the_profile_and_fits_the_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as stop:
        main(
            ["validate", "--prepare", "setup.json", "--trace", "trace.jsonl", "--profile",
             "profile.json", "--policies", "swap", "--max-num-seqs", "4", *POOL]
        )  # fmt: skip
    assert stop.value.code == 0
    assert "setup.json" in capsys.readouterr().out
    [policy] = json.loads(Path("setup.json").read_text())["policies"]
    config = policy["config"]
    assert (config["model"], config["dtype"], config["block_size"]) == ("tiny", "float32", 16)
    assert config["max_num_seqs"] == 4
    assert config["num_cpu_blocks_override"] == 40
    rows = [json.loads(line) for line in Path("trace.jsonl").read_text().splitlines()[1:]]
    longest = max(row["input_length"] + row["output_length"] for row in rows)
    assert config["max_model_len"] == longest <= PROFILE["fit"]["decode_v2"]["ctx"][-1]
