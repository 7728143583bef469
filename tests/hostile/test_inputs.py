"""Hostile settings, headers and names: one line and exit code 2, or a result; never a traceback."""

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import run_here
from places import ROOT
from shared import SHARED

from kvsim.cli import main
from kvsim.cost.profile import load_profile
from kvsim.errors import ConfigError, TraceError, nearest
from kvsim.machine import load_model
from kvsim.run.simulation import simulate
from kvsim.settings.limits import check_run
from kvsim.settings.parsing import parse_json, parse_toml
from kvsim.workload import Row, Trace, open_trace
from kvsim.workload.spec import Workload, made_from, make_trace

CHAT = str(ROOT / "traces" / "chat.jsonl")
DIGITS, DEEP, DEEPER = "1" * 5000, "[" * 101 + "]" * 101, "[" * 5000 + "]" * 5000
CONSTANT = ["run", "--trace", CHAT, "--num-prompts", "5", "--cost-model", "constant"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error of a command that is refused."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    printed = capsys.readouterr()
    assert stop.value.code == 2, printed.err
    assert printed.err.count("\n") == 1 and printed.err.startswith("kvsim: "), printed.err
    return printed.err


def header(command: str) -> str:
    source = {"format": "synthetic", "command": command}
    rows = [{"arrival_s": i, "input_length": 5, "output_length": 5} for i in range(2)]
    lines = [{"kvsim_trace": 1, "source": source}, *rows]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    "command",
    [
        "kvsim trace synth random --seed 0 --requests 1000000000",
        "kvsim trace synth chat --requests 1000000000",
        "kvsim trace synth 'x",
        "kvsim trace synth random --requests " + DIGITS,
        "kvsim trace synth random --seed -1 --requests 2",
    ],
)
def test_the_header_of_a_trace_is_no_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evil.jsonl"
    path.write_text(header(command))
    asked = []
    monkeypatch.setattr(
        "kvsim.workload.spec.made_trace", lambda kind, rows, *_: asked.append(len(rows))
    )
    assert made_from(open_trace(str(path))) is None
    assert asked == []


@pytest.mark.parametrize("name", ["evil_source_command.jsonl", "quote.jsonl"])
def test_the_reported_headers_are_harmless(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = SHARED / "repro" / name
    if not path.is_file():
        pytest.skip("the reported files are not at hand")
    with pytest.raises(SystemExit) as stop:
        main(["compare", "naive", "prefix-caching", "--trace", str(path), "--seeds", "2"])
    assert stop.value.code == 0, capsys.readouterr().err


def test_a_workload_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"requests: 1,000,000,000 is above .* --limits 10"):
        make_trace(Workload("random", requests=10**9), 0)
    monkeypatch.setenv("KVSIM_LIMITS", "0.000001")
    with pytest.raises(ConfigError, match="requests: 1,000 is above the limit of 4"):
        make_trace(Workload("random"), 0)
    monkeypatch.setenv("KVSIM_LIMITS", "many")
    with pytest.raises(ConfigError, match="--limits: 'many' is not a factor"):
        make_trace(Workload("random"), 0)


@pytest.mark.parametrize("text", [DIGITS, DEEP, DEEPER, "NaN", "[1e999]", b"\xff"])
def test_faults_of_json_are_one_line(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]{,100}$"):
        parse_json(text)


@pytest.mark.parametrize("text", [DIGITS, DEEP, DEEPER, "= 3"])
def test_faults_of_toml_are_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]{,100}$"):
        parse_toml(f"x = {text}")


@pytest.mark.parametrize("text", [DIGITS, DEEP], ids=["digits", "deep"])
def test_deep_and_endless_settings(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f"seed = {text}")
    assert "bad.toml" in refused(["run", "--trace", CHAT, "--config", str(path)], capsys)
    refused([*CONSTANT, "--set", f"cost.step_us={text}"], capsys)


@pytest.mark.parametrize("step_us", ["1e300", "1e15", "1e12", "1e11"])
def test_times_beyond_what_a_row_holds(step_us: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(
        ["run", "--trace", CHAT, "--cost-model", "constant", "--set", f"cost.step_us={step_us}"],
        capsys,
    )
    assert "lasts too long" in line and "--cost-model" in line


@pytest.mark.parametrize("flag", ["--hardware", "--model", "--config"])
def test_names_that_no_file_can_have(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no " in refused(["run", "--trace", CHAT, flag, "h" * 5000], capsys)


def test_blocks_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused([*CONSTANT, "--block-size", str(2**32)], capsys)
    assert "block_size: 4,294,967,296 is above the limit" in line


@pytest.mark.parametrize(
    "argument",
    [
        "schedule_conservativeness=-1",
        "environment={new_token_ratio_decay_steps=0}",
        "environment={init_new_token_ratio=-0.5}",
    ],
)
def test_shares_of_sglang_are_not_negative(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--trace", CHAT, "--engine", "sglang", "--set", f"scheduler_args.{argument}"]
    line = refused(words, capsys)
    assert argument.removeprefix("environment={").partition("=")[0] in line


def test_a_long_run_of_many_short_requests_fits() -> None:
    """300 requests over three years: 2 ** 63 ns are passed by their number times the run's time,
    not by the time that they spend."""
    rows = [Row(i, f"r{i}", i + 2, i * 330_000 * 10**9, 40, 20) for i in range(300)]
    assert rows[-1].arrival_ns * len(rows) > 1 << 63
    result = simulate(Trace("made", "native", "", rows), {"model": "tiny"})
    assert result.summary["completed"] == len(rows)


@pytest.mark.parametrize("scale", ["inf", "1e300"])
def test_think_times_without_end(scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["run", "--trace", str(ROOT / "traces" / "agents.jsonl")]
    assert "think_time_scale" in refused([*trace, "--think-time-scale", scale], capsys)


def test_long_words_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(["run", "--trace", CHAT, "--model", "x" * 100_000], capsys)
    assert len(line) < 1500 and "no model named 'xxx" in line
    assert "the path of a" in line
    assert nearest("x" * 10**6, ["x" * 10]) == ""


@pytest.mark.parametrize(
    "error",
    [
        {"decode": {"points": "many"}},
        {"decode": {"points": 3, "median_percent": "x" * 5000}},
        {"decode": {"points": 3, "deep": {"points": 1, "p95_percent": None}}},
        {"others": 3},
        {"others": {"16": "x"}},
    ],
)
def test_figures_of_a_profile_are_numbers(error: dict[str, object], tmp_path: Path) -> None:
    shipped = ROOT / "configs" / "hardware" / "h100-sxm-llama-3-8b-public.json"
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(shipped.read_text()), "error": error}))
    with pytest.raises(ConfigError, match=r"profile\.json: error\."):
        load_profile(str(path))


def test_names_and_terminals_that_are_not_utf_8(tmp_path: Path) -> None:
    trace = os.fsencode(tmp_path) + b"/tr\xffce.jsonl"
    with open(trace, "wb") as file:  # noqa: PTH123 - a name that is no text
        file.write(Path(CHAT).read_bytes())
    result = subprocess.run(
        [*(sys.executable, "-m", "kvsim", "run", "--trace", trace), "--num-prompts=3", "--out=r"],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "r" / "summary.json").read_bytes())
    assert os.fsencode(summary["meta"]["trace"]["path"]) == trace


WRITERS = [
    ["run", "--csv", "--trace", CHAT],
    ["run", "--replicas", "2", "--router", "vllm-dp", "--trace", CHAT],
    ["compare", "naive", "prefix-caching", "--trace", CHAT],
    ["sweep", "--grid", "max_num_seqs=4,8", "--jobs", "1", "--trace", CHAT],
]


@pytest.mark.parametrize("words", WRITERS, ids=lambda words: " ".join(words[:3]))
def test_folders_that_are_not_utf_8(words: list[str], tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")
    done = run_here([*words, "--num-prompts", "3", "--out", folder], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["r\udcff"]


def test_results_whose_folder_is_not_utf_8_are_read(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")
    assert run_here(["run", "--trace", CHAT, "--num-prompts", "3", "--out", folder]).returncode == 0
    for words in (["report", folder], ["trace", "info", f"{folder}/requests.parquet"]):
        done = run_here(words, tmp_path)
        assert done.returncode == 0, done.stderr


def zipped(tmp_path: Path, text: bytes) -> str:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(text))
    return str(path)


ROW = b'{"timestamp":0,"input_length":5,"output_length":5}\n'
HASHES = b'{"kvsim_trace":1,"block_size":1,"hash_kind":"prefix","partial_hash":true}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROW + b"\n" * (1 << 21), ":1048578: bytes of blank lines above the limit of 1,048,576"),
        (ROW + b" " * (1 << 25), ":2: a line of bytes above the limit of 16,777,216"),
        (ROW.replace(b'length":5}', b'length":1048577}'), ":1: .*an output of 1,048,577 tokens"),
    ],
    ids=["blank lines", "a blank line", "output"],
)
def test_what_a_small_file_unfolds_to_is_bounded(
    tmp_path: Path, text: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsim.settings.limits.BLANK_BYTES", 1 << 20)  # each is a line to be read
    with pytest.raises(TraceError, match=rf"{message}.* --limits 10"):
        open_trace(zipped(tmp_path, text))


def test_rows_and_bytes_of_a_trace_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zipped(tmp_path, ROW * 9)
    monkeypatch.setattr("kvsim.settings.limits.ROWS", 8)
    with pytest.raises(TraceError, match=":9: rows above the limit of 8"):
        open_trace(path)
    monkeypatch.setenv("KVSIM_LIMITS", "10")
    assert len(open_trace(path).rows) == 9
    monkeypatch.setattr("kvsim.settings.limits.TRACE_BYTES", 5)
    with pytest.raises(TraceError, match=":1: bytes above the limit of 50"):
        open_trace(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_far_too_many_rows_are_refused_by_the_size_of_the_file(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"trace.jsonl{suffix}"
    text = "".join(
        f'{{"timestamp":{i},"input_length":{i % 97 + 1},"output_length":5}}\n' for i in range(20000)
    ).encode()
    path.write_bytes(gzip.compress(text, 0) if suffix else text)  # in more pieces than one
    monkeypatch.setattr("kvsim.settings.limits.ROWS", 10_000)
    monkeypatch.setattr("kvsim.workload.source._SAMPLE_ROWS", 9_900)
    with pytest.raises(TraceError, match=r"gz: about|jsonl: about") as refused:
        open_trace(str(path))
    foreseen = int(str(refused.value).split("about ")[1].split(" ")[0].replace(",", ""))
    assert 15_000 < foreseen < 21_000
    monkeypatch.setenv("KVSIM_LIMITS", "2")
    assert len(open_trace(str(path)).rows) == 20_000


ALIKE_OR_NOT = pytest.mark.parametrize(
    "head", [b"", random.Random(1).randbytes(3000).hex().encode()], ids=["alike", "not"]
)


@ALIKE_OR_NOT
def test_the_rows_of_a_gzip_file_are_counted_before_most_are_read(
    head: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their packed size foretells: rows that are alike take next to nothing."""
    first = [b'{"timestamp":0,"input_length":5,"output_length":5,"x":"%s"}\n' % head] * 10
    path = zipped(tmp_path, b"".join(first) + b"\n" + ROW * 991)
    monkeypatch.setattr("kvsim.settings.limits.ROWS", 1_000)
    monkeypatch.setattr("kvsim.workload.source._SAMPLE_ROWS", 10)
    with pytest.raises(TraceError, match=r"gz: rows above the limit of 1,000; "):
        open_trace(path)
    with gzip.open(path, "wb") as file:
        file.write(b"".join(first) + b"\n" * 3 + ROW * 990)
    assert len(open_trace(path).rows) == 1_000


def test_the_memory_of_a_run_is_foreseen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"10,000,000 requests .* about 10\.1 GB of memory"):
        check_run(10_000_000, 1)
    with pytest.raises(ConfigError, match=r"about 6\.2 GB of memory, above the limit of 6\.0 GB"):
        check_run(4_000_000, 33_000_000)
    check_run(3_000_000, 1_000_000)
    monkeypatch.setattr("kvsim.settings.limits.MEMORY_BYTES", 10**8 + 10**6)
    line = refused(["run", "--trace", CHAT, "--cost-model", "constant"], capsys)
    assert (
        "1,200 requests in 1,992 steps or more" in line
        and "--num-prompts" in line
        and "--limits 10" in line
    )
    monkeypatch.setenv("KVSIM_LIMITS", "2")
    assert simulate(CHAT, {"cost": {"model": "constant"}}).summary["completed"] == 1200


def test_the_steps_of_a_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.settings.limits.STEPS", 4_000)
    for engine in ("vllm-0.6.3", "vllm-v1"):
        with pytest.raises(ConfigError, match=r"steps: \d+,\d+ is above .* 4,000; .*--limits"):
            assert simulate(CHAT, {"engine": engine, "cost": {"model": "constant"}}).steps


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-num-seqs", "\udcff"],
        ["--num-gpu-blocks-override", "\udcff"],
        ["--set", "max_num_seqs=\udcff"],
        ["--set", "cost.step_us=\udcff"],
    ],
)
def test_flags_that_are_not_utf_8(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "a text is not UTF-8" in refused([*CONSTANT, *flags], capsys)


def test_a_name_that_ends_a_line_is_shown_on_one() -> None:
    with pytest.raises(ConfigError) as error:
        simulate(CHAT, {"hardware": "h100\u2028ß../x"})
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("command", ["policies", "sample"])
def test_blocks_that_are_looked_at_one_by_one_are_bounded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few lines of the same long prompt have few different blocks, but very many in all."""
    row = {"input_length": 1 << 23, "output_length": 1, "prefix": [["a", 1 << 23]]}
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"kvsim_trace": 1}, *[row] * 5])))
    said = refused(["cache", command, str(path), "--capacity", "9", "--block-size", "1"], capsys)
    assert "block references: 41,943,040 is above the limit of 33,554,432; give less" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--replicas", "8192"], "replicas: 8,192 is above the limit of 1,024"),
        (["--max-num-batched-tokens", "9" * 60], "--max-num-batched-tokens: expected `int` <="),
        (["--max-model-len", str(1 << 64)], "--max-model-len: expected `int` <="),
        (
            ["--engine", "sglang", "--set", "scheduler_args.prefill_decode_interval=16777216"],
            "prefill_decode_interval: 16,777,216 is above 65,536 steps; give less",
        ),
        (
            ["--engine", "sglang", "--set", "scheduler_args.environment.RATIO=0.5"],
            "environment: unknown RATIO; known: init_new_token_ratio",
        ),
        (
            ["--num-gpu-blocks-override", "1", "--max-model-len", "5", "--model", "gpt-oss-20b"],
            "(1 blocks of 16); raise --num-gpu-blocks-override",
        ),
    ],
)
def test_numbers_beyond_all_use(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(["run", "--trace", CHAT, "--num-prompts", "5", *flags], capsys)


def test_half_a_surrogate_pair_in_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    table = {"model_type": "llama", "vocab_size": 512, **dict.fromkeys(keys, 64)}
    path.write_text(json.dumps({**table, "hidden_size": "\ud800"}))
    with pytest.raises(ConfigError, match=r"config\.json: a text is not UTF-8"):
        load_model(str(path))


def test_times_a_thousand_years_apart_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = ("2024-05-10 00:00:01,10,5", "1024-05-10 00:00:00,10,5")
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    with pytest.raises(TraceError, match=r"azure\.csv: times are more than 146 years apart"):
        open_trace(str(path))


@pytest.mark.parametrize("ids", ["1, 2 3", "1, 9999999999999999999"])
def test_token_ids_of_a_log_are_numbers(ids: str, tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(
        f"DEBUG 11-22 06:00:01 [request_logger.py:50] Request a details: prompt: 'hi',"
        f" prompt_token_ids: [{ids}], prompt_embeds shape: None.\n"
        "INFO 11-22 06:00:01 [request_logger.py:60] Received request a: params:"
        " SamplingParams(n=1, max_tokens=16), lora_request: None.\n"
    )
    with pytest.raises(TraceError, match=r"log:1: prompt_token_ids: .* is not a token id"):
        open_trace(str(path))


def test_a_turn_that_no_native_file_can_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "aiperf.jsonl"
    metrics = {"value": 5, "unit": "tokens"}
    table = {
        "metadata": {"request_start_ns": 5, "x_correlation_id": "c", "turn_index": 1 << 31},
        "metrics": {"input_sequence_length": metrics, "output_sequence_length": metrics},
    }
    path.write_text(json.dumps(table))
    with pytest.raises(TraceError, match=r"turn_index: 2147483648 is above"):
        open_trace(str(path))


def test_one_run_of_hash_ids_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = (1 << 24) - 2
    row = {"input_length": length, "output_length": 1, "hash_runs": [[0, length]]}
    path = zipped(tmp_path, HASHES + json.dumps(row).encode())
    assert "different blocks: 16,777,214 is above" in refused(["trace", "info", path], capsys)


def test_limits_are_raised_by_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsim.settings.limits.ROWS", 1)
    path = zipped(tmp_path, ROW * 9)
    assert "--limits 10" in refused(["trace", "info", path], capsys)
    monkeypatch.setenv("KVSIM_LIMITS", "1")  # set again by the flag, and undone by the test
    with pytest.raises(SystemExit) as stop:
        main(["--limits", "10", "trace", "info", path])
    assert stop.value.code == 0
    assert "--limits: 'x'" in refused(["--limits", "x", "trace", "info", path], capsys)


@pytest.mark.parametrize("gap_s", [1e308, 1e-320])
def test_measured_times_beyond_all_use(gap_s: float, tmp_path: Path) -> None:
    """Their sum is beyond the largest float; or the prediction is, as a share of them."""
    result = {"input_lens": [10] * 9, "output_lens": [5] * 9, "itls": [[gap_s] * 4] * 9}
    result |= {"ttfts": [gap_s] * 9, "start_times": [0.1 * i for i in range(9)]}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(result))
    done = run_here(["check", str(path), "--max-model-len", "4096", "--no-corrections"])
    assert done.returncode == (2 if gap_s > 1 else 0), done.stderr
    assert done.stdout or "not a time in seconds" in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({3: 4}, "unknown key 3"),
        ({"speculative_config": {"method": [1], "num_speculative_tokens": 1}}, "method: expected"),
    ],
)
def test_settings_that_are_no_words(settings: dict[Any, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate("chat", {"num_prompts": 5, **settings})
