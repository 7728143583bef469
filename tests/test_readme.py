"""The README keeps its promises: commands, files and flags that it names exist."""

import re
from pathlib import Path

from kvsim.cli.flags import _options

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_first_screen_has_the_two_commands() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv") for command in commands)
    assert "kvsim run --trace traces/chat.jsonl" in commands[0]
    assert commands[1].endswith("pytest")


def test_named_flags_exist() -> None:
    known = {f"--{option.name.replace('_', '-')}" for option in _options()}
    known |= {"--trace", "--config", "--out", "--set", "--help", "--engine", "--against"}
    known |= {"--step-log", "--device", "--limit-s"}
    assert set(re.findall(r"--[a-z][a-z-]+", README)) <= known
