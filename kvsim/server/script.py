"""Where in a text the server's command is: a shell script, a Dockerfile, a Compose or pod file.

| text | command |
|---|---|
| `vllm serve MODEL ...` | the words after `serve` |
| `python -m vllm.entrypoints.openai.api_server ...` | the words after the module |
| `docker run ... vllm/vllm-openai:v0.19.0 ...` | the words after the image |
| `python -m sglang.launch_server ...`, `sglang serve ...` | the words after it, for SGLang |
| `bash -c "vllm serve ..."` | that of the text in quotes |
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.parsing import parse_json
from kvsim.server.files import read_yaml
from kvsim.server.shell import commands

_IMAGE = re.compile(r"(?:\S*/)?vllm-openai[\w-]*(?::(?:v?(\d{1,4}\.\d{1,4}\.\d{1,4}))?\S*|@\S*)?")
_SGLANG_IMAGE = re.compile(r"(?:\S*/)?sglang:v?(\d{1,4}\.\d{1,4}\.\d{1,4})\S*")
_SERVERS = re.compile("vllm|sglang")
_MODULE = re.compile(r"vllm\.entrypoints\.(?:openai\.)?api_server")
_INSTRUCTION = re.compile(r"(FROM|CMD|ENTRYPOINT|ENV|ARG)\s+(.*)", re.IGNORECASE)
_MOST_NESTED = 5
"""Commands in quotes within commands in quotes that are looked through."""


class ServerCommand(NamedTuple):
    """The server's command in a text."""

    arguments: list[str]
    version: str | None
    """The version of the image, such as `0.19.0`."""
    variables: Mapping[str, str]
    """Assigned in the text."""
    server: str = "vllm"
    """Whose command it is: `vllm` or `sglang`."""


def server_command(text: str, where: str) -> ServerCommand:
    """The one server command of a text; raises `ConfigError` if there is none, or more than one.

    `where`: the path of the text, or what stands for it in messages; YAML ends in `.yaml` or
    `.yml`.
    """
    if where.lower().endswith((".yaml", ".yml")):
        text = _of_yaml(text, where)
    elif re.search(r"^FROM[ \t]+\S", text, re.MULTILINE):
        text = _of_dockerfile(text)
    different = {tuple(command.arguments): command for command in _found(text, where)}
    if not different:
        raise ConfigError(
            f"{where}: no vLLM command; it takes `vllm serve MODEL ...`, `python -m"
            " vllm.entrypoints.openai.api_server ...`, a container of vllm/vllm-openai, or `python"
            " -m sglang.launch_server ...`"
        )
    if len(different) > 1:
        begins = "; ".join(" ".join(arguments)[:40] for arguments in different)
        raise ConfigError(f"{where}: {len(different)} vLLM commands ({begins!r}); keep only one")
    [found] = different.values()
    return found


def _found(text: str, where: str, nested: int = 0) -> Iterator[ServerCommand]:
    for words, variables in commands(text, where):
        begin, version = _begin(words)
        server = "vllm"
        if begin is None:
            (begin, version), server = _begin_sglang(words), "sglang"
        quoted = []
        if "-c" in words and nested < _MOST_NESTED:
            script = (word for word in words[words.index("-c") + 1 :] if _SERVERS.search(word))
            quoted = [
                found for word in script if " " in word for found in _found(word, where, nested + 1)
            ]
        if quoted:
            yield from (found._replace(version=found.version or version) for found in quoted)
        elif begin is not None:
            yield ServerCommand(words[begin:], version, variables, server)


def _begin(words: list[str]) -> tuple[int | None, str | None]:
    """The place of the server's first argument among the words, and the version of the image."""
    begin = version = None
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        image = _IMAGE.fullmatch(word)
        if image and begin is None:
            begin, version = place + 1, image[1]
            if following == "serve":
                begin += 1
        elif word.rpartition("/")[2] == "vllm" and following == "serve":
            return place + 2, version
        elif _MODULE.fullmatch(word) or word.endswith("openai/api_server.py"):
            return place + 1, version
    return begin, version


def _begin_sglang(words: list[str]) -> tuple[int | None, str | None]:
    """The same of an SGLang server."""
    version = None
    for place, word in enumerate(words):
        if image := _SGLANG_IMAGE.fullmatch(word):
            version = image[1]
        if word == "sglang.launch_server":
            return place + 1, version
        if word.rpartition("/")[2] == "sglang" and words[place + 1 : place + 2] == ["serve"]:
            return place + 2, version
    return None, version


def _of_dockerfile(text: str) -> str:
    """A shell script that does what a container of the file would do."""
    image, lines = "", []
    entry = command = ""
    for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines():
        match = _INSTRUCTION.match(line.strip())
        if match is None:
            continue
        instruction, rest = match[1].upper(), match[2].strip()
        if instruction == "FROM":
            image = rest.split()[0] if rest else ""
        elif instruction in ("ENV", "ARG"):
            lines.append(f"{instruction} {rest}")
        elif instruction == "CMD":
            command = _exec_form(rest)
        else:
            entry, command = _exec_form(rest), ""
    whole = f"{entry} {command}".strip()
    if _IMAGE.fullmatch(image) or _SGLANG_IMAGE.fullmatch(image):
        whole = f"{image} {whole}"
    return "\n".join([*lines, whole])


def _exec_form(rest: str) -> str:
    """`["vllm", "serve"]` as a shell would write it; the shell form stays."""
    try:
        words = parse_json(rest)
    except ValueError:
        return rest
    return shlex.join(map(str, words)) if isinstance(words, list) else rest


def _of_yaml(text: str, where: str) -> str:
    """A shell script of the containers in a Compose or pod file."""
    trees = read_yaml(text, where)
    return "\n".join(dict.fromkeys(line for tree in trees for line in _containers(tree, set())))


def _containers(tree: Any, seen: set[int]) -> Iterator[str]:
    """One line of shell for each container in a tree; what an alias repeats is read once."""
    if id(tree) in seen or not isinstance(tree, (Mapping, list)):
        return
    seen.add(id(tree))
    if isinstance(tree, Mapping):
        parts = [_words(tree.get(key)) for key in ("image", "entrypoint", "command", "args")]
        words = [word for part in parts for word in part]
        if any(parts[1:]) and any(map(_SERVERS.search, words)):
            yield " ".join(words)
    for child in tree.values() if isinstance(tree, Mapping) else tree:
        yield from _containers(child, seen)


def _words(value: Any) -> list[str]:
    """Words as a shell reads them: those of a list are quoted, a text is one line of shell."""
    if isinstance(value, str):
        return [re.sub(r"\\?\n", " ", value)]
    if isinstance(value, list):
        return [shlex.quote(str(word)) for word in value]
    return []
