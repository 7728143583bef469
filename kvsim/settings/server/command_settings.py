"""The settings that a server's command line says, or the record of its run."""

from __future__ import annotations

import re
from pathlib import Path

from kvsim.errors import ConfigError
from kvsim.settings.server.arguments import Argument, Meaning, interpret
from kvsim.settings.server.command import parse
from kvsim.settings.server.files import read_text
from kvsim.settings.server.generations import ENGINES, generation, leave_unused
from kvsim.settings.server.notes import notes
from kvsim.settings.server.record import read_record
from kvsim.settings.server.script import ServerCommand, server_command
from kvsim.settings.server.sglang_arguments import SGLANG, complete, sglang_differs
from kvsim.settings.server.shell import commands
from kvsim.settings.server.vllm_arguments import VLLM

_NAMED = (
    r"(?:^|[\s/])vllm\s|vllm\.entrypoints|vllm-openai|api_server\.py"
    r"|sglang\.launch_server|(?:^|[\s/])sglang\s+serve"
)
"""What a text has that names its server."""


def settings_of_text(text: str) -> tuple[Meaning, list[str]]:
    """What a command line says, and notes for people; `vllm serve` may be left out.

    One of `sglang.launch_server` is SGLang's.

    Raises `ConfigError` for an unknown flag, and for one that cannot be simulated.
    """
    return _settings(_command(text), "--vllm", None)


def settings_of_file(path: str) -> tuple[Meaning, list[str]]:
    """What the command line in a script says, or what a record says of its engine; and notes."""
    text = read_text(path)
    record = read_record(text, path)
    if record is None:
        return _settings(server_command(text, path), path, Path(path).parent)
    meaning = _vllm(record.arguments, record.version, None, f"{path}: vllm_version", path)
    if record.hardware is not None:
        meaning.set("hardware", record.hardware, f"{path}: hardware.device_name")
    return meaning, notes(meaning, path)


def arguments(vllm: str | None, vllm_file: str | None) -> list[Argument]:
    """The arguments of a command line, or of the one in a file; empty without either.

    Raises `ConfigError` as the settings do.
    """
    if vllm is not None:
        return parse(_command(vllm).arguments, VLLM, "--vllm")
    if vllm_file is None:
        return []
    text = read_text(vllm_file)
    record = read_record(text, vllm_file)
    if record is not None:
        return record.arguments
    command = server_command(text, vllm_file)
    return parse(command.arguments, VLLM, vllm_file, Path(vllm_file).parent)


def _command(text: str) -> ServerCommand:
    where = "--vllm"
    if re.search(_NAMED, text):
        return server_command(text, where)
    found = list(commands(text, where))
    if len(found) != 1:
        raise ConfigError(f"{where}: not one command; give one, as in {where} 'vllm serve MODEL'")
    words = found[0].words
    words = words[1:] if words[0] == "serve" else words
    return ServerCommand(words, None, found[0].variables)


def _settings(command: ServerCommand, where: str, folder: Path | None) -> tuple[Meaning, list[str]]:
    if command.server == "sglang":
        meaning = interpret(parse(command.arguments, SGLANG, where, folder), SGLANG)
        complete(meaning, command.variables, where)
        meaning.set("engine", "sglang", where)
        return meaning, [*notes(meaning, where), *sglang_differs(command.version, where)]
    given = parse(command.arguments, VLLM, where, folder)
    wish = command.variables.get("VLLM_USE_V1")
    meaning = _vllm(given, command.version, wish, f"{where}: the image", where)
    return meaning, notes(meaning, where)


def _vllm(
    given: list[Argument], version: str | None, use_v1: str | None, said: str, where: str
) -> Meaning:
    """What arguments of vLLM mean. `use_v1`: the variable `VLLM_USE_V1`; `said`: what names the
    version."""
    meaning = interpret(given, VLLM)
    meaning.set("engine", ENGINES[generation(version, use_v1)], where)
    if version:
        meaning.set("vllm_version", version, said)
    leave_unused(meaning)
    return meaning
