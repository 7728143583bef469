"""`kvsim conform` on files of others: one line and exit code 2 where nothing can be compared."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from command import run_here

from kvsim.against.conform.cases import run_case
from kvsim.settings.limits import most

ENGINE = "nano-vllm"
CONFIG = {"block_size": 16, "num_gpu_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 128}
CONFIG |= {"max_steps": 1000}
REQUEST = {"id": "a", "arrival": 0.0, "prompt_token_ids": [1] * 20, "output_len": 3}
STEPS = list(run_case(ENGINE, CONFIG, [REQUEST]))
CASE: dict[str, Any] = {"seed": 7, "config": CONFIG, "trace": [REQUEST], "steps": STEPS}


def refused(path: Path, *words: str, engine: str | None = ENGINE) -> str:
    """The one line with which the command refuses a file."""
    named = [] if words or engine is None else ["--engine", engine]
    done = run_here(["conform", str(path), *words, *named])
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("kvsim: ") and done.stderr.count("\n") == 1
    return done.stderr


def file_of(tmp_path: Path, *cases: Any) -> Path:
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return path


def test_the_case_itself_is_repeated(tmp_path: Path) -> None:
    done = run_here(["conform", str(file_of(tmp_path, CASE)), "--engine", ENGINE])
    assert done.returncode == 0
    assert done.stdout == f"1 cases, 1 identical, {len(STEPS)} records\n"


def test_a_folder_of_files_says_how_each_release_did(tmp_path: Path) -> None:
    """A threshold cuts the prompt of the only request before 0.31: 20 tokens take two steps."""
    config = CONFIG | {"max_model_len": 64, "long_prefill_token_threshold": 10}
    for release in ("0.9.0", "0.33.0"):
        said = config | {"vllm_version": release}
        case = CASE | {"config": config, "release": release}
        case["steps"] = list(run_case("vllm-v1", said, [REQUEST]))
        (tmp_path / f"{release}.jsonl").write_text(json.dumps(case) + "\n")
    done = run_here(["conform", str(tmp_path), "--engine", "vllm-v1"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "vLLM 0.9.0: 1 cases, 1 identical, 4 records",
        "vLLM 0.33.0: 1 cases, 1 identical, 3 records",
        "2 cases, 2 identical, 7 records",
    ]
    done = run_here(["conform", str(tmp_path), "--engine", "vllm-v1", "--release", "0.30.0"])
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        "vLLM 0.30.0: 2 cases, 1 identical, 8 records",
        "2 cases, 1 identical, 8 records",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", ENGINE, "--release", "0.9.0"], "leave it out"),
        (["--engine", "vllm-v1", "--release", "0.34"], "from 0.8.5 to 0.33"),
        (["--engine", "vllm-v1", "--release", "new"], "not a version"),
        (["--against", "--release", "0.9.0"], "--release"),
    ],
)
def test_a_release_that_cannot_be(words: list[str], told: str, tmp_path: Path) -> None:
    assert told in refused(file_of(tmp_path, CASE), *words)


@pytest.mark.parametrize("place", [15, 40, -5, None], ids=str)
def test_a_damaged_gzip_file(place: int | None, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl.gz"
    packed = bytearray(gzip.compress((json.dumps(CASE) + "\n").encode()))
    if place is None:
        packed = packed[:-20]
    else:
        packed[place] ^= 0x5A
    path.write_bytes(packed)
    assert "cases.jsonl.gz" in refused(path)


def test_a_bombed_gzip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cases.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"config":' + b" " * 2_000_000 + b"{}}\n"))
    monkeypatch.setattr("kvsim.settings.limits.LINE_BYTES", 1_000_000)
    assert "a line of bytes above the limit of 1,000,000" in refused(path)
    monkeypatch.setattr("kvsim.settings.limits.BLANK_BYTES", 1_000)
    path.write_bytes(gzip.compress(b" \n" * 1_000_000))
    assert f"bytes of blank lines above the limit of {most(1000):,}" in refused(path)


WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([CASE], "not an object"),
    "no configuration": ({"trace": [], "steps": []}, ":1: not a case"),
    "a configuration that is none": (CASE | {"config": []}, ":1: not a case"),
    "requests that are none": (CASE | {"trace": [3]}, ":1: not a case"),
    "a log that is none": (CASE | {"steps": {}}, ":1: not a case"),
    "a request without a prompt": (
        CASE | {"trace": [{"id": "a"}]},
        "cases-7: no case of nano-vllm",
    ),
    "no log": ({"config": CONFIG, "trace": [REQUEST]}, "none of 1 cases has a recorded log"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_case(name: str, tmp_path: Path) -> None:
    case, told = WRONG[name]
    assert told in refused(file_of(tmp_path, case))


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 0, 1.5], ids=str)
@pytest.mark.parametrize("key", CONFIG)
def test_a_setting_that_is_wrong(key: str, value: Any, tmp_path: Path) -> None:
    """A log that differs or not, or one line: never a traceback."""
    path = file_of(tmp_path, CASE | {"config": CONFIG | {key: value}})
    done = run_here(["conform", str(path), "--engine", ENGINE])
    assert done.returncode in (0, 1, 2)
    assert done.stderr.count("\n") == (done.returncode == 2)


@pytest.mark.parametrize("engine", ["vllm-0.3.3", "vllm-0.6.3", "vllm-v1", "sglang"])
def test_a_case_of_another_engine(engine: str, tmp_path: Path) -> None:
    assert f"cases-7: no case of {engine}: KeyError" in refused(
        file_of(tmp_path, CASE), engine=engine
    )


def test_folders_without_a_log_of_this_engine(tmp_path: Path) -> None:
    folder = tmp_path / "cases" / "one"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "trace.jsonl").write_text(json.dumps(REQUEST))
    (folder / "nano.steps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in STEPS))
    assert "none of 1 cases has a recorded log of sglang" in refused(folder, engine="sglang")
    done = run_here(["conform", str(folder.parent), "--engine", ENGINE])
    assert done.stdout == f"1 cases, 1 identical, {len(STEPS)} records\n"
    (folder / "config.json").write_text("[]")
    assert "config.json" in refused(folder)


@pytest.mark.parametrize("words", [["--engine", ENGINE], ["--router", "sglang"]])
def test_an_empty_file(words: list[str], tmp_path: Path) -> None:
    assert "cases.jsonl" in refused(file_of(tmp_path), *words)


@pytest.mark.parametrize("run", [3, [], {"header": 3, "records": []}, {"header": {}, "records": 3}])
def test_what_is_no_run_of_a_router(run: Any, tmp_path: Path) -> None:
    assert "cases.jsonl:1: not a" in refused(file_of(tmp_path, run), "--router", "sglang")


def test_lines_that_say_their_engine_or_router(tmp_path: Path) -> None:
    """A router of one worker names it; a log that lacks its end is told from the whole."""
    header = {"case": "x", "config": {"policy": "vllm_dp"}, "workers": [0]}
    route = {"op": "route", "id": "a", "snapshot": [[0, 0, 0]], "chosen": 0}
    run = {"router": "vllm-dp", "header": header, "records": [route, {"op": "end", "id": "a"}]}
    file_of(tmp_path, CASE | {"engine": ENGINE}, run)
    counts = f"2 cases, 2 identical, {len(STEPS) + 1} records"
    done = run_here(["conform", str(tmp_path)])
    assert done.returncode == 0
    assert done.stdout == f"cases: {counts}\nin all: {counts}\n"
    file_of(tmp_path, CASE | {"engine": ENGINE, "steps": STEPS[:-1]})
    done = run_here(["conform", str(tmp_path)])
    assert done.returncode == 1
    assert done.stdout.startswith("cases-7: recorded | kvsim: record")
    assert done.stdout.endswith(f"in all: 1 cases, 0 identical, {len(STEPS)} records\n")


NAMED: dict[str, tuple[Any, str]] = {
    "no name": (CASE, ":1: does not say which engine or router it is of; give --engine"),
    "a name that is none": (CASE | {"engine": 3}, ":1: does not say which engine"),
    "an unknown engine": (CASE | {"engine": "nano"}, "engine: unknown 'nano'; did you mean"),
    "an unknown router": (
        {"router": "vllm", "header": {}, "records": []},
        "router: unknown 'vllm'; did you mean 'vllm-dp'?",
    ),
    "no log": (
        {"engine": ENGINE, "config": CONFIG, "trace": [REQUEST]},
        "cases-1: nothing is recorded in it",
    ),
    "no run": ({"router": "vllm-dp", "header": {}, "records": 3}, ":1: not a run"),
    "no case": ({"engine": ENGINE, "config": [], "trace": []}, ":1: not a case"),
}


@pytest.mark.parametrize("name", NAMED)
def test_lines_that_do_not_say_their_engine(name: str, tmp_path: Path) -> None:
    line, told = NAMED[name]
    assert told in refused(file_of(tmp_path, line), engine=None)


def test_empty_logs_are_not_compared(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    assert "no records" in refused(path, str(path), "--against")


def test_a_seed_names_no_other_folder(tmp_path: Path) -> None:
    path, out = file_of(tmp_path, CASE | {"seed": "/../../../escaped"}), tmp_path / "a" / "b"
    assert run_here(["conform", str(path), "--engine", ENGINE, "--out", str(out)]).returncode == 0
    assert [each.name for each in out.iterdir()] == ["cases-1"]
