"""What a `vllm serve` command line says: vLLM 0.33.0's spellings, and what becomes of each flag."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from kvsim.errors import ConfigError
from kvsim.settings.config import RunConfig
from kvsim.settings.server import server_settings
from kvsim.settings.server.arguments import (
    SGLANG,
    VLLM,
    Argument,
    Table,
    Unsimulated,
    Used,
    interpret,
)
from kvsim.settings.server.command import parse

V1 = {"engine": "vllm-v1"}


def said(command: str) -> dict[str, Any]:
    return dict(server_settings(vllm=command).settings)


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("vllm serve m", {}),
        ("m", {}),
        ("serve m", {}),
        ("/opt/venv/bin/vllm serve m", {}),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", {}),
        ("python /app/vllm/entrypoints/openai/api_server.py --model=m", {}),
        ("vllm serve --port 80 m", {}),
        ("vllm serve m -tp 2 -pp=3 -dp 4 -ep", {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 3,
            "data_parallel_size": 4,
            "enable_expert_parallel": True,
        }),
        ("vllm serve m -q awq_marlin", {"quantization": "awq"}),
        ("vllm serve m --tensor_parallel_size=2", {"tensor_parallel_size": 2}),
        ("vllm serve m --tensor_parallel 2", {"tensor_parallel_size": 2}),
        ("vllm serve m --tensor-parallel-size 2 -tp 4", {"tensor_parallel_size": 4}),
        ("vllm serve m --device-memory-utilization .5", {"gpu_memory_utilization": 0.5}),
        ("vllm serve m --max-model-len 32K", {"max_model_len": 32768}),
        ("vllm serve m --max-model-len 32k", {"max_model_len": 32000}),
        ("vllm serve m --max-num-batched-tokens 25.6k", {"max_num_batched_tokens": 25600}),
        ("vllm serve m --kv-cache-memory-bytes 10G", {"kv_cache_memory_bytes": 10 * 2**30}),
        ("vllm serve m --no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("vllm serve m --disable-prefix-caching", {"enable_prefix_caching": False}),
        ("vllm serve m --no-async-scheduling", {"async_scheduling": False}),
        ("vllm serve m --kv-offloading-size 20", {"kv_offloading_size": 20.0}),
        ("vllm serve m --enable-lora --max-loras 4 --lora-modules a=/a b=/b", {
            "enable_lora": True, "max_loras": 4,
        }),
        ("vllm serve m -sc.method mtp -sc.num_speculative_tokens 2", {
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        }),
        ("vllm serve m --mamba_ssm_cache_dtype float32", {"mamba_ssm_cache_dtype": "float32"}),
        ("vllm serve m --enforce-eager --dtype half", {"enforce_eager": True, "dtype": "float16"}),
        ("vllm serve m --kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}),
        ("vllm serve m --swap-space 8 --preemption-mode swap", {}),
        ("VLLM_USE_V1=0 vllm serve m --swap-space 8 --preemption-mode swap", {
            "engine": "vllm-0.6.3", "swap_space": 8.0, "preemption_mode": "swap",
        }),
        ("docker run --gpus all -e A=b vllm/vllm-openai:v0.9.2-cu128 --model m", {
            "vllm_version": "0.9.2",
        }),
        ("docker run -d ghcr.io/x/vllm-openai:v0.6.3 --model m", {
            "vllm_version": "0.6.3", "engine": "vllm-0.6.3",
        }),
        ("docker run vllm/vllm-openai vllm serve m --max-num-seqs 7", {"max_num_seqs": 7}),
        ('bash -c "source x && vllm serve m --max-num-seqs 7"', {"max_num_seqs": 7}),
        ("nohup vllm serve m --max-num-seqs 7 > log 2>&1 &", {"max_num_seqs": 7}),
        ("cd x; vllm serve m --max-num-seqs 7 | tee log", {"max_num_seqs": 7}),
        ("N=3; vllm serve m --max-num-seqs ${N:-5}", {"max_num_seqs": 3}),
        ("vllm serve m --max-num-seqs ${N:-5} --api-key $KEY", {"max_num_seqs": 5}),
        ("A='-tp 2 --max-num-seqs 7'; vllm serve m $A", {
            "tensor_parallel_size": 2, "max_num_seqs": 7,
        }),
    ],
)  # fmt: skip
def test_what_is_used(command: str, settings: dict[str, Any]) -> None:
    assert said(command) == {"model": "m", **V1, **settings}


@pytest.mark.parametrize(
    ("words", "table"),
    [
        ("X.key1 value1 X.key2.key3 2", {"key1": "value1", "key2": {"key3": 2}}),
        ("X.key4+ value3 X.key4+=value4,5", {"key4": ["value3", "value4", "5"]}),
        ("X.sizes [1,2] X.sizes=[4]", {"sizes": [1, 2, 4]}),
        ('X.key2 {"a":1} X.key2.b true', {"key2": {"a": 1, "b": True}}),
        ("X.key2.a 1 X.key2 none", {"key2": "none"}),
    ],
)
def test_tables_are_written_key_by_key(words: str, table: dict[str, Any]) -> None:
    """As vLLM's `FlexibleArgumentParser` merges them, and its help says of `KEY+`."""
    (argument,) = parse(words.replace("X", "--kv-transfer-config").split(), VLLM, "--vllm")
    assert argument.value == table


@pytest.mark.parametrize(
    "command",
    [
        "--port 80 --host 0.0.0.0 --served-model-name a b c --api-key k --uvicorn-log-level info",
        "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3",
        "--chat-template 'a > b # c'",
        "-O3",
        "-O 2",
        "-cc.mode 3 --compilation-config.pass_config.fuse true",
        "--compilation-config '{\"mode\": 3}' --attention-backend FLASHINFER",
        '--hf-overrides \'{"rope_parameters": {"factor": 4}}\'',
        "--no-disable-custom-all-reduce --disable-log-stats",
        "--hf-token --seed -1",
        "--decode-context-parallel-size 1 --num-scheduler-steps 1 --kv-offloading-backend native",
        "--speculative-config null --performance-mode balanced --runner generate",
    ],
)
def test_what_changes_nothing(command: str) -> None:
    assert said(f"vllm serve m {command} --max-num-seqs 7") == {
        "model": "m",
        "max_num_seqs": 7,
        **V1,
    }


def test_notes_are_one_line_for_each_reason() -> None:
    word = server_settings(vllm="vllm serve m --port 1 --host h -O3 --swap-space 8 -tp 2")
    assert word.notes == [
        "from --vllm: model m, tensor_parallel_size 2",
        "from --vllm, of no effect on the engine: --port, --host",
        "from --vllm, not modelled, may change times or memory a little: --optimization-level",
        "from --vllm, not used by vllm-v1: swap_space",
    ]
    assert word.sources["tensor_parallel_size"] == "--vllm: --tensor-parallel-size"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vllm serve m --tensor-paralel-size 2", ["--tensor-paralel-size", "tensor_parallel_size"]),
        ("vllm serve m --max-num 2", ["--max-num"]),  # several flags begin so
        ("vllm serve m -xy 2", ["-xy"]),
        ("vllm serve m --tensor-parallel-size", ["--tensor-parallel-size", "missing"]),
        ("vllm serve m --tensor-parallel-size --port 80", ["--tensor-parallel-size", "missing"]),
        ("vllm serve m --max-num-seqs many", ["--max-num-seqs", "'many'"]),
        ("vllm serve m --max-num-seqs 0", ["max_num_seqs", "0"]),
        ("vllm serve m --max-model-len 1.5K", ["--max-model-len", "1.5K"]),
        ("vllm serve m --dtype int3", ["--dtype", "int3", "bfloat16"]),
        ("vllm serve m --max-num-seqs $N", ["--max-num-seqs", "$N"]),
        ("vllm serve m --max-num-seqs $(nproc --all)", ["--max-num-seqs", "$(nproc --all)"]),
        ("vllm serve m n", ["'n'"]),
        ('vllm serve m "${ARGS[@]}"', ["${ARGS[@]}"]),
        ("vllm serve 'm", ["'", "line 1"]),
        ("vllm bench serve --model m", ["no vLLM command"]),
        ("vllm serve m; vllm serve n", ["2 vLLM commands"]),
        ("", ["--vllm"]),
        ("vllm serve m --speculative-config mtp", ["--speculative-config", "in JSON"]),
        ("vllm serve m --spec-method mtp", ["speculative decoding"]),
        ("vllm serve m --kv-transfer-config '{}x'", ["--kv-transfer-config", "JSON"]),
        ("vllm serve m --kv-offloading-backend lmcache", ["--kv-offloading-backend", "offloaded"]),
        ("vllm serve m -dcp 2", ["--decode-context-parallel-size", "context parallelism"]),
        ("vllm serve m --num-scheduler-steps 8", ["--num-scheduler-steps"]),
        ("vllm serve m --runner pooling", ["--runner", "generates nothing"]),
        ("vllm serve m --hf-overrides '{\"num_hidden_layers\": 2}'", ["--hf-overrides"]),
        ("vllm serve m --performance-mode throughput", ["--performance-mode"]),
        ("vllm serve m --config nowhere.yaml", ["--config", "nowhere.yaml", "no such file"]),
    ],
)
def test_what_is_refused(command: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        server_settings(vllm=command)
    text = str(caught.value)
    assert "\n" not in text
    for word in ["--vllm" if "--config" not in command else "--config", *words]:
        assert word in text, text


def test_a_length_that_the_engine_chooses() -> None:
    """`auto` and -1 stay words: the longest that fits is known later."""
    for text in ("auto", "-1"):
        arguments = parse(["m", "--max-model-len", text], VLLM, "here")
        assert interpret(arguments, VLLM).settings["max_model_len"] == "auto"


def test_a_configuration_file_of_vllm_comes_before_the_line(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(
        "model: m\nport: 80\ntensor-parallel-size: 4\nmax_num_seqs: 7\nenforce-eager: true\n"
        "served-model-name: [a, b]\ncompilation-config: {mode: 3}\nno-enable-prefix-caching: true\n"
    )
    (tmp_path / "start.sh").write_text("vllm serve --config serve.yaml -tp 2\n")
    word = server_settings(vllm_file=str(tmp_path / "start.sh"))
    assert word.settings == {
        "model": "m",
        "tensor_parallel_size": 2,
        "max_num_seqs": 7,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        **V1,
    }
    assert word.sources["max_num_seqs"] == f"{tmp_path / 'serve.yaml'}: --max-num-seqs"


@pytest.mark.parametrize("text", ["- a", "a: [", "tensor-paralel-size: 2", "", "a: !!bool x"])
def test_a_bad_configuration_file_of_vllm(text: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        server_settings(vllm=f"vllm serve m --config {path}")


# -- the table ------------------------------------------------------------------------------------


def test_the_table_is_whole() -> None:
    """`vllm serve` of 0.33.0 has 321 arguments; 64 are of earlier versions or of
    vLLM-Omni only, or `model_tag`."""
    assert len(VLLM.flags) == 385
    assert set(VLLM["short"].values()) <= set(VLLM.flags)
    assert all(name == flag.name and "-" not in name for name, flag in VLLM.flags.items())


def test_every_flag_that_is_used_is_a_setting() -> None:
    keys = {flag.effect.key for flag in VLLM.flags.values() if isinstance(flag.effect, Used)}
    assert keys <= set(RunConfig.__struct_fields__)


def test_reasons_make_one_sentence() -> None:
    for flag in VLLM.flags.values():
        if isinstance(flag.effect, Unsimulated):
            assert "\n" not in flag.effect.reason
            assert not flag.effect.reason.endswith(".")
            assert flag.effect.off(None) and flag.effect.off(False)


@pytest.mark.parametrize("table", [VLLM, SGLANG])
def test_nothing_is_in_two_lists(table: Table) -> None:
    name = "vllm.toml" if table is VLLM else "sglang.toml"
    lists = tomllib.loads((ROOT / "kvsim" / "settings" / "server" / name).read_text())["arguments"]
    kinds = ("nothing", "maybe", "value", "values")
    words = [word for each in lists for kind in kinds for word in each.get(kind, "").split()]
    assert len(words) == len(table.flags)


# -- whatever people paste ------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        *(f"--{name.replace('_', '-')}" for name in VLLM.flags if name != "config"),
        *VLLM["short"],
        *["vllm", "serve", "m", "1", "-1", "8k", "{}", "'", '"', "\\", "\n", ";", "|", ">", "2>&1"],
        *["$X", "${X:-1}", "$(", ")", "`", "#", "A=1", "--", "-", "-.", "--.", "=", "--no-", "-O9"],
    ]
)


@given(st.lists(WORDS, max_size=12).map(" ".join) | st.text() | st.lists(WORDS).map("".join))
def test_nothing_but_a_config_error(text: str) -> None:
    for command in (text, f"vllm serve m {text}"):
        try:
            server_settings(vllm=command)
        except ConfigError as error:
            assert "\n" not in str(error)


@given(
    st.sampled_from(sorted(VLLM.flags)),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.text())
    | st.dictionaries(st.text(), st.none()),
)
def test_values_of_logs_raise_nothing_else(name: str, value: Any) -> None:
    try:
        interpret([Argument(name, value, "here")], VLLM)
    except ConfigError as error:
        assert f"--{name.replace('_', '-')}" in str(error)
