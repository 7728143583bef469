"""The first screen of the README keeps its promises; `test_docs` checks what it names."""

import re

from places import ROOT

README = (ROOT / "README.md").read_text()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_first_screen_has_the_two_commands() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)[:2]
    assert all(command.startswith("python3 -m venv") for command in commands)
    assert "kvsim run --trace traces/chat.jsonl" in commands[0]
    assert commands[1].endswith("pytest")
