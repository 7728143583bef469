"""The README keeps its promises: commands, files and flags that it names exist."""

import re
from pathlib import Path
from typing import Any

from kvsim.cli.deferred import COMMANDS, load

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_first_screen_has_the_two_commands() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)[:2]
    assert all(command.startswith("python3 -m venv") for command in commands)
    assert "kvsim run --trace traces/chat.jsonl" in commands[0]
    assert commands[1].endswith("pytest")


def test_named_commands_and_flags_exist() -> None:
    known = {"--version", "--help"}.union(*(options_of(load(name)) for name in COMMANDS))
    # Those of `python -m kvsim.validate` and `python -m kvsim_kernels.calibrate` are the same.
    assert set(re.findall(r"--[a-z][a-z-]+", README)) <= known
    for name in re.findall(r"`kvsim ([a-z]+)", README):
        assert name in COMMANDS, name


def options_of(command: Any) -> set[str]:
    """The flags of a command and of its own commands."""
    found = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    return found.union(*map(options_of, getattr(command, "commands", {}).values()))
