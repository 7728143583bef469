"""Commands are listed without being imported, and are what the list says."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.cli.deferred import COMMANDS, load

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_what_the_list_says_of_it(name: str) -> None:
    command = load(name)
    assert command.name == name
    assert " ".join((command.help or "").split("\n\n")[0].split()) == COMMANDS[name][1]


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from kvsim.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "heavy = {'numpy', 'simpy', 'msgspec', 'pyarrow', 'pandas', 'plotly', 'kvsim.config',"
        " 'kvsim.cli.commands', 'kvsim.run'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    shown = capsys.readouterr()
    assert (stop.value.code, shown.err) == (2, "")
    assert all(f"\n  {name} " in shown.out for name in COMMANDS)


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
