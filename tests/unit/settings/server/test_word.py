"""The log's word and the command line's, joined; and what the command `kvsim` makes of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from command import run_here
from places import ROOT
from startup_logs import v0_log, v1_log

from kvsim.errors import ConfigError
from kvsim.run.assembly import assemble
from kvsim.settings.config import RunConfig, load_config, make_config
from kvsim.settings.server import ServerWord, server_settings

CHAT = str(ROOT / "traces" / "chat.jsonl")


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "vllm.log"
    path.write_text(v1_log(arguments="'model': 'llama-3-8b', 'max_num_seqs': 256"))
    return str(path)


def test_nothing_said() -> None:
    assert server_settings() == ServerWord()


def test_the_command_line_counts_more_than_the_log(log: str) -> None:
    word = server_settings(log, "vllm serve other --max-num-seqs 8 --enforce-eager")
    assert word.settings["model"] == "other"
    assert word.settings["max_num_seqs"] == 8
    assert word.settings["max_num_batched_tokens"] == 2048
    assert word.sources["max_num_seqs"] == "--vllm: --max-num-seqs"
    assert word.sources["max_num_batched_tokens"] == f"{log}:4"
    assert [note.partition(":")[0] for note in word.notes] == [f"from {log}", "from --vllm"]


def test_the_blocks_of_the_log_count_more_than_formulas(log: str) -> None:
    word = server_settings(log, "vllm serve m --gpu-memory-utilization 0.5")
    assert word.settings["num_gpu_blocks_override"] == 2588
    word = server_settings(log, "vllm serve m --num-gpu-blocks-override 5")
    assert word.settings["num_gpu_blocks_override"] == 5


def test_the_log_knows_what_the_command_line_assumes(tmp_path: Path) -> None:
    """Engine, version and `auto`."""
    path = tmp_path / "vllm.log"
    path.write_text(v0_log())
    word = server_settings(str(path), "vllm serve m --max-model-len auto")
    assert word.settings["engine"] == "vllm-0.6.3"
    assert word.settings["max_model_len"] == 4096


def test_one_command_line_at_most() -> None:
    with pytest.raises(ConfigError, match="--vllm-file"):
        server_settings(vllm="vllm serve m", vllm_file="start.sh")


def test_every_setting_has_a_source_and_is_one(log: str) -> None:
    word = server_settings(log, "vllm serve m -tp 2 --port 80")
    assert word.settings.keys() == word.sources.keys()
    assert isinstance(make_config(word.settings), RunConfig)


def test_file_and_flags_count_more(log: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("max_num_seqs = 4\nblock_size = 32\n")
    word = server_settings(log)
    flags = {"max_num_batched_tokens": 9}
    config = load_config(str(tmp_path / "run.toml"), flags, ["watermark=0.5"], word.settings)
    assert config.max_num_seqs == 4
    assert config.max_num_batched_tokens == 9
    assert config.watermark == 0.5
    assert config.num_gpu_blocks_override == 2588


def test_the_null_block_of_v1_is_among_the_blocks_of_the_log(log: str) -> None:
    """The published run with 2,588 blocks printed shares of 2,587 in use."""
    parts = assemble(load_config(beneath=server_settings(log).settings))
    assert parts.blocks.gpu.free == 2587


def test_a_block_count_under_other_settings_is_doubted(log: str) -> None:
    word = server_settings(log)
    assert word.doubts(load_config(beneath=word.settings)) == []
    other = load_config(None, {"tensor_parallel_size": 2}, (), word.settings)
    [doubt] = word.doubts(other)
    assert "2,588 blocks" in doubt
    assert "tensor_parallel_size 1, not 2" in doubt
    counted = {"tensor_parallel_size": 2, "num_gpu_blocks_override": 9}
    assert word.doubts(load_config(None, counted, (), word.settings)) == []


# -- the command line of kvsim -----------------------------------------------------------------


def kvsim(*arguments: str, cwd: Path) -> CompletedProcess[str]:
    return run_here(arguments, cwd, columns=200)


def test_run_with_a_log(log: str, tmp_path: Path) -> None:
    run = ["run", "--trace", CHAT, "--num-prompts", "5", "--json", "--startup-log", log]
    result = kvsim(*run, "--vllm", "vllm serve llama-3-8b --port 80 --max-num-seqs 9", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"note: from {log}: model llama-3-8b, vLLM 0.19.0, 2,588 blocks")
    assert "note: from --vllm, of no effect on the engine: --port" in lines
    config = json.loads(result.stdout)["meta"]["config"]
    assert config["num_gpu_blocks_override"] == 2588
    assert config["max_num_seqs"] == 9
    assert config["engine"] == "vllm-v1"


@pytest.mark.parametrize("command", ["run", "size", "sweep", "compare"])
def test_every_command_that_simulates_takes_a_server(command: str, tmp_path: Path) -> None:
    further = {
        "run": [],
        "size": ["--slo", "p99_ttft<2s", "--find", "request_rate"],
        "sweep": ["--out", "result", "--grid", "block_size=16,32"],
        "compare": ["naive", "auto"],
    }[command]
    arguments = [command, *further, "--trace", CHAT, "--vllm", "vllm serve m --tensor-size 3"]
    result = kvsim(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result
    [line] = result.stderr.splitlines()
    assert line.startswith("kvsim: --vllm: ") and "--tensor-size" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\x7fELF\0\0", "not a text"),
        (b"\x1f\x8b\x08\0\0", "gzip"),
        (b"hello\n" * 9, "no line of a vLLM or SGLang start"),
    ],
)
def test_a_bad_log_is_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.log").write_bytes(content)
    result = kvsim("run", "--trace", CHAT, "--startup-log", "bad.log", cwd=tmp_path)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("kvsim: bad.log") and words in line


OWN_CODE = {
    "--kv-transfer-config": [
        {"kv_connector": "Mine", "kv_role": "kv_both", "kv_connector_module_path": "mine"},
        {"kv_connector": "mine:Mine", "kv_role": "kv_both"},
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 1_000_000_000,
                "spec_name": "TieringOffloadingSpec",
                "secondary_tiers": [{"type": "Mine", "module_path": "mine"}],
            },
        },
    ],
    "--speculative-config": [{"method": "mine:Mine", "num_speculative_tokens": 2}],
}
"""Flag of vLLM → values with which code of one's own runs."""
CODED = [(flag, value) for flag, values in OWN_CODE.items() for value in values]


@pytest.mark.parametrize(("flag", "value"), CODED)
@pytest.mark.parametrize("record", [False, True])
def test_files_of_a_server_do_not_say_which_code_runs(
    record: bool, flag: str, value: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the command line does."""
    (tmp_path / "mine.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    text = json.dumps(value)
    key = flag.removeprefix("--").replace("-", "_")
    script = f"vllm serve llama-3-8b {flag} '{text}'"
    made_with = {"model": "llama-3-8b", "engine_kwargs": {key: value}}
    Path("server").write_text(json.dumps(made_with) if record else script)
    words = ["run", "--trace", CHAT, "--num-prompts", "2", "--vllm-file", "server"]
    done = run_here(words, tmp_path)
    assert done.returncode == 2 and not Path("ran").exists()
    source = key if record else flag
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"kvsim: server: {source}: runs 'mine") and said.endswith("too")
    named = [[*words, flag, text], [*words[:-2], "--vllm", script]]
    if "method" in value:
        named.append([*words, "--set", "speculative_config.method=mine:Mine"])
    for line in named:
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        done = run_here(line, tmp_path)
        assert Path("ran").exists(), done.stderr
        Path("ran").unlink()


@pytest.mark.parametrize("model", ["org:model", "c:/models/tiny"])
def test_a_model_is_no_code(model: str, tmp_path: Path) -> None:
    drafter = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "model": model})
    (tmp_path / "serve.sh").write_text(f"vllm serve {model} --speculative-config '{drafter}'")
    word = server_settings(vllm_file=str(tmp_path / "serve.sh"))
    word.refuse_code(make_config(word.settings), [])
