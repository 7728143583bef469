"""Where in a shell script the server's command is.

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
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvsim.errors import ConfigError
from kvsim.settings.server.shell import commands

_IMAGE = re.compile(r"(?:\S*/)?vllm-openai[\w-]*(?::(?:v?(\d{1,4}\.\d{1,4}\.\d{1,4}))?\S*|@\S*)?")
_SGLANG_IMAGE = re.compile(r"(?:\S*/)?sglang:v?(\d{1,4}\.\d{1,4}\.\d{1,4})\S*")
_SERVERS = re.compile("vllm|sglang")
_MODULE = re.compile(r"vllm\.entrypoints\.(?:openai\.)?api_server")
_CONTAINER = re.compile(
    r"^(?:FROM[ \t]+\S|[ \t]*(?:- +)?(?:apiVersion|services|image|command|args):(?:\s|$))",
    re.MULTILINE,
)
"""A line of a Dockerfile, or of a Compose, pod or Helm file."""
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
    """The one server command of a script; `where` is its path, or what stands for it in messages.

    Raises `ConfigError` if there is none, or more than one, and for files of containers.
    """
    if where.lower().endswith((".yaml", ".yml")) or _CONTAINER.search(text):
        raise ConfigError(
            f"{where}: files of containers are not read; paste the words of `command`, `args` or"
            " CMD, as a shell would have them, into --vllm, and give --vllm-version"
        )
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
