"""Commands are listed without being imported, and are what the list says."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from kvsim.cli import main
from kvsim.cli.commands import COMMANDS, load


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_what_the_list_says_of_it(name: str) -> None:
    command = load(name)
    assert command.name == name
    assert " ".join((command.help or "").split("\n\n")[0].split()) == COMMANDS[name]


def modules_after(*arguments: str) -> tuple[set[str], str]:
    """What a command has imported when it is over, and its output."""
    code = (
        "import sys\n"
        "from kvsim.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split()), done.stdout


def test_help_imports_no_command_and_nothing_heavy() -> None:
    loaded, out = modules_after("--help")
    heavy = {"numpy", "simpy", "msgspec", "pyarrow", "pandas", "plotly"}
    assert not loaded & (heavy | {"kvsim.settings.config", "kvsim.cli.run", "kvsim.run.simulation"})
    for name in COMMANDS:
        assert name in out


def test_a_run_imports_what_it_needs() -> None:
    """No reader of another format, no workload without one, no library that only pages need."""
    loaded, _ = modules_after("run", "--trace", "api", "--num-prompts", "50")
    libraries = {"pyarrow", "pandas", "plotly", "torch", "numpy.ma"}
    assert not loaded & (libraries | {"kvsim.workload.spec"})
    rooms = (
        "kvsim.workload.formats.",
        "kvsim.against.conform",
        "kvsim.search.sweep",
        "kvsim.report.pages",
    )
    rooms += (
        "kvsim.explain.cache_",
        "kvsim.engines.vllm_033",
        "kvsim.fleet.fleet",
        "kvsim.fleet.routers",
    )
    assert not [name for name in loaded if name.startswith(rooms)]


def test_a_run_with_a_page_imports_no_other_page(tmp_path: Path) -> None:
    loaded, _ = modules_after("run", "--trace", "api", "--num-prompts", "5", "--out", str(tmp_path))
    assert not loaded & {"pandas", "plotly", "torch", "numpy.ma", "kvsim.against.conform"}
    drawn = {
        name.removeprefix("kvsim.report.pages.")
        for name in loaded
        if name.startswith("kvsim.report.pages.")
    }
    shared = {"block_map", "figures", "html", "latencies", "over_time", "view"}
    assert drawn == {"run", *shared}


def test_without_a_command_five_lines_greet_and_name_three_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    shown = capsys.readouterr()
    assert (stop.value.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("  kvsim ")]
    assert len(commands) == 3
    assert len(lines) <= 8
    for name, *words in commands:
        flags = {flag for each in load(name).params for flag in each.opts}
        assert {word for word in words if word.startswith("--")} <= flags


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_cuts_no_name(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([name, "--help-all"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    pair = re.compile(r"  --\S+ / --no-\S+$")  # of a flag whose two names are longer than a line
    assert max(len(line) for line in shown.splitlines() if not pair.match(line)) <= 80
    assert "…" not in shown
    assert not re.search(r"--[\w-]+-$", shown, re.MULTILINE), "a name goes on in the next line"
    flags = {flag for each in load(name).params for flag in (*each.opts, *each.secondary_opts)}
    assert {flag for flag in flags if flag.startswith("-")} <= set(re.split(r"[\s,]+", shown))


def test_short_help_says_where_the_settings_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "-h"])
    shown = capsys.readouterr().out
    assert "--trace" in shown and "--max-num-seqs" not in shown and shown.count("\n") < 50
    assert "--help-all also lists settings: Load (" in shown


@pytest.mark.parametrize("command", [["run", "--num-prompts", "2"], ["trace", "info"]])
@pytest.mark.parametrize("trace", [["api"], ["--trace", "api"], ["--trace=api"]])
def test_a_trace_is_given_by_itself_or_by_its_option(
    command: list[str], trace: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, *trace, "--json"])
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out)


def test_two_traces_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["api", "chat"], ["--trace", "api", "chat"]):
        with pytest.raises(SystemExit) as stop:
            main(["run", *words])
        assert stop.value.code == 2
        assert "unexpected extra argument" in capsys.readouterr().err


def test_quiet_leaves_results_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "untimed.jsonl"
    trace.write_text('{"kvsim_trace":1}\n{"input_length":20,"output_length":5}\n')
    said = []
    for more in ([], ["--quiet"]):
        with pytest.raises(SystemExit):
            main(["run", str(trace), "--out", str(tmp_path / "run"), *more])
        said.append(capsys.readouterr())
    assert "note: " in said[0].err and not said[1].err
    assert "written to" in said[0].out and "written to" not in said[1].out


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("kvsim ad", ["advise"]), ("kvsim run --max-num", ["--max-num-seqs"]), ("kvsim zz", [])],
)
def test_the_shell_completes_commands_and_options(typed: str, completed: list[str]) -> None:
    code = "import sys; sys.argv = ['kvsim']; from kvsim.cli import main; main()"
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **asked, "_KVSIM_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split()[: len(completed)] == completed


@pytest.mark.parametrize("arguments", [[], ["policies"], ["trace"], ["trace", "info"]])
def test_h_is_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "-h"])
    assert stop.value.code == 0
    assert "Show this message and exit." in capsys.readouterr().out


def test_a_misspelt_command_is_answered_with_the_nearest() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvsim", "benhc"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "kvsim: No such command 'benhc'. Did you mean 'bench'?\n"


def test_a_command_ends_when_what_is_registered_for_its_end_is_done() -> None:
    """It keeps its code and what it has printed; objects are not freed one by one."""
    code = (
        "import atexit, sys, kvsim.cli\n"
        "from kvsim.__main__ import run\n"
        "class Held:\n"
        "    def __del__(self): print('freed')\n"
        "held = Held()\n"
        "def main():\n"
        "    atexit.register(print, 'registered')\n"
        "    sys.stdout.write('printed, ')\n"
        "    sys.exit(3)\n"
        "kvsim.cli.main = main\n"
        "run()\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed, registered\n", "")
