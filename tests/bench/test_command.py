"""`kvsim bench` as a user meets it."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvsim.bench import repeat
from kvsim.bench.workloads import WORKLOADS, Checks
from kvsim.cli import main
from kvsim.errors import ConfigError

NAME = "decode-1"


def kvsim(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    return int(end.value.code or 0), *capsys.readouterr()


def test_a_stored_run_can_be_compared_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = kvsim(capsys, "--workload", NAME, "--repeats", "2", "--json")
    assert code == 0
    (name, found), *others = json.loads(out)["workloads"].items()
    assert (name, len(found), others) == (NAME, 2, [])
    assert {each["digest"] for each in found} == {WORKLOADS[NAME].checks.digest}
    path = tmp_path / "then.json"
    path.write_text(out)
    code, out, _ = kvsim(capsys, "--workload", NAME, "--repeats", "1", "--compare", str(path))
    assert code == 0
    for words in ("pings/step", "CPU now / then", WORKLOADS[NAME].checks.digest, "yes"):
        assert words in out


def test_a_run_that_comes_to_something_else_is_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = WORKLOADS[NAME]._replace(checks=Checks(1, 2, 3, 4, "5"))
    monkeypatch.setitem(WORKLOADS, NAME, other)
    code, out, errors = kvsim(capsys, "--workload", NAME, "--repeats", "1")
    assert code == 1
    assert "NO" in out
    assert errors == f"kvsim: wrong results: {NAME}\n"


def test_the_parts_around_a_run_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = kvsim(capsys, "--workload", NAME, "--around")
    assert code == 0
    for part in ("kvsim --help", "trace", "imports", "summary", "files", "page"):
        assert part in out


def test_what_the_simulator_counts_of_its_short_cuts_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from msgspec.structs import replace

    from kvsim.bench.measure import measure

    counted = replace(
        measure(NAME, "vllm-0.6.3", "constant"), fast_path={"some_steps": 12345, "why": "none"}
    )
    monkeypatch.setattr(repeat, "in_fresh_process", lambda *_: counted)
    code, out, _ = kvsim(capsys, "--workload", NAME, "--repeats", "1")
    assert code == 0
    assert "some steps" in out and "12,345" in out and "none" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--workload", "W22"], "bench: no workload 'W22'; did you mean 'W2'? there are "),
        (["--workload", "W4"], "bench: W4 needs Mooncake's conversation_trace.jsonl; give --trace"),
        (["--cost", "tabel"], "--cost: no 'tabel'; did you mean 'table'? choose from"),
        (["--compare", "none.json"], "none.json: cannot be read: No such file"),
        (["--workload", NAME, "--engine", "vlm-v1"], "engine: no 'vlm-v1'; did you mean"),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    code, out, errors = kvsim(capsys, *arguments)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"kvsim: {line}")


def test_without_unixs_accounts_bench_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delitem(sys.modules, "kvsim.bench.usage", raising=False)
    with pytest.raises(ConfigError, match="run it in WSL, on Linux or macOS"):
        import_module("kvsim.bench.usage")
