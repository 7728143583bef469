"""Where in a shell script the server's command is.

| text | command |
|---|---|
| `vllm serve MODEL ...` | the words after `serve` |
| `python -m vllm.entrypoints.openai.api_server ...` | the words after the module |
| `docker run ... vllm/vllm-openai:v0.19.0 ...` | the words after the image |
| `python -m sglang.launch_server ...`, `sglang serve ...` | the words after it, for SGLang |
| `bash -c "vllm serve ..."` | that of the text in quotes |

Words are those that a shell would pass to each command, as far as the text tells: quotes, comments,
continued lines, redirections, here-documents' texts, assignments and `$NAME` are read. What only a
running shell knows (`$(nvidia-smi ...)`, variables from outside) stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.errors import ConfigError

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
        begin, version, server = _begin(words)
        if quoted := list(_quoted(words, where, nested)):
            yield from (found._replace(version=found.version or version) for found in quoted)
        elif begin is not None:
            yield ServerCommand(words[begin:], version, variables, server)


def _quoted(words: list[str], where: str, nested: int) -> Iterator[ServerCommand]:
    """The server commands in the texts that a shell is given: `bash -c "..."`."""
    if "-c" in words and nested < _MOST_NESTED:
        for word in words[words.index("-c") + 1 :]:
            if " " in word and _SERVERS.search(word):
                yield from _found(word, where, nested + 1)


def _begin(words: list[str]) -> tuple[int | None, str | None, str]:
    """The place of the server's first argument among the words, the version of the image, and whose
    command it is."""
    begin = version = None
    for place, (word, following) in enumerate(pairwise([*words, ""])):
        program = word.rpartition("/")[2]
        if program in ("vllm", "sglang") and following == "serve":
            return place + 2, version, program
        if _MODULE.fullmatch(word) or word.endswith("openai/api_server.py"):
            return place + 1, version, "vllm"
        if word == "sglang.launch_server":
            return place + 1, version, "sglang"
        if begin is None and (image := _IMAGE.fullmatch(word)):
            begin, version = place + 1 + (following == "serve"), image[1]
        elif image := _SGLANG_IMAGE.fullmatch(word):
            version = image[1]
    return begin, version, "vllm"


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-([^{}]*))?\})")
_DECLARING = ("export", "local", "declare", "readonly")
_CONTINUED = re.compile(r"\\[ \t]*\r?\n|(?<=[ \t])\\(?=[ \t])")
"""A line goes on; also where the line was folded, and a backslash stands alone."""
_FOLDED = re.compile(r"\\[ \t]*\r?\n")
_REDIRECTION = re.compile(r"(?:&(?=>))?[<>]+[&|]?")
"""`2>&1`, `> FILE`: neither is a word of the command."""
_PLACEHOLDER = re.compile(r"<[A-Za-z_][\w ./:|-]*>")
"""A word in angle brackets that somebody was to replace, not a redirection."""


class Command(NamedTuple):
    """One command of a script."""

    words: list[str]
    variables: Mapping[str, str]
    """What the script assigns anywhere."""


def commands(text: str, where: str) -> Iterator[Command]:
    """The commands of a script, in order; assignments before a command are not among its words.

    Raises `ConfigError` for a quote that is not closed.
    """
    yield from _Reader(text, where).read()


class _Reader:
    """Goes through the characters once."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where
        self._place = 0
        self._variables: dict[str, str] = {}
        self._words: list[str] = []
        self._word: str | None = None
        self._redirected = False

    def read(self) -> Iterator[Command]:
        text = self._text
        while self._place < len(text):
            character = text[self._place]
            if match := _CONTINUED.match(text, self._place):
                self._place = match.end()
            elif match := _PLACEHOLDER.match(text, self._place):
                self._append(match[0], match.end())
            elif match := _REDIRECTION.match(text, self._place):
                # The number of a file descriptor, as in `2>&1`, is no word.
                if self._word is not None and self._word.isdigit():
                    self._word = None
                self._end_word()
                self._place = match.end()
                self._redirected = not match[0].startswith("<<")
            elif character in "\n;&|()":
                yield from self._end_command()
                self._place += 1
            elif character in " \t\r":
                self._end_word()
                self._place += 1
            elif character == "#" and self._word is None:
                end = text.find("\n", self._place)
                self._place = len(text) if end < 0 else end
            else:
                self._add(character)
        yield from self._end_command()

    def _append(self, piece: str, place: int) -> None:
        """Go on with a word, and at a place of the text."""
        self._word, self._place = (self._word or "") + piece, place

    def _add(self, character: str) -> None:
        """A character of a word, or a quoted part of one."""
        text, place = self._text, self._place
        if character == "'":
            end = self._closing("'", place)
            self._append(text[place + 1 : end], end + 1)
        elif character == '"':
            self._double_quoted()
        elif character == "\\":
            self._append(text[place + 1 : place + 2], place + 2)
        elif character in "$`":
            value, known = self._expanded()
            # Each space in an expansion without quotes ends a word.
            first, *others = (value.split() or [""]) if known else [value]
            self._word = (self._word or "") + first
            for piece in others:
                self._end_word()
                self._word = piece
            self._word = self._word or None
        else:
            self._append(character, place + 1)

    def _double_quoted(self) -> None:
        text, start = self._text, self._place
        self._append("", start + 1)
        while self._place < len(text):
            place, character = self._place, text[self._place]
            if character == '"':
                self._place += 1
                return
            if character in "$`":
                self._append(self._expanded()[0], self._place)
            elif character == "\\" and text[place + 1 : place + 2] in list('"\\$`'):
                self._append(text[place + 1], place + 2)
            elif folded := _FOLDED.match(text, place):
                self._place = folded.end()
            else:
                self._append(character, place + 1)
        raise self._unclosed('"', start)

    def _expanded(self) -> tuple[str, bool]:
        """What the expansion at this place stands for, and whether that is known; passes it."""
        text, start = self._text, self._place
        if variable := _VARIABLE.match(text, start):
            self._place = variable.end()
            value = self._variables.get(variable[1] or variable[2], variable[3])
            return (variable[0], False) if value is None else (value, True)
        if text[start] == "`":
            self._place = self._closing("`", start) + 1
        elif text.startswith(("$(", "${"), start):
            self._place = self._balanced(start + 1)
        else:
            self._place += 1
            return "$", True
        return f"${text[start : self._place].removeprefix('$')}", False

    def _balanced(self, start: int) -> int:
        """The place after the bracket that closes the one at `start`."""
        opening = self._text[start]
        closing = ")" if opening == "(" else "}"
        depth = 0
        for place in range(start, len(self._text)):
            depth += (self._text[place] == opening) - (self._text[place] == closing)
            if not depth:
                return place + 1
        raise self._unclosed(opening, start)

    def _closing(self, quote: str, start: int) -> int:
        """The place of the quote that closes the one at `start`."""
        end = self._text.find(quote, start + 1)
        if end < 0:
            raise self._unclosed(quote, start)
        return end

    def _unclosed(self, opening: str, start: int) -> ConfigError:
        line = self._text.count("\n", 0, start) + 1
        return ConfigError(f"{self._where}: line {line}: no end of the {opening} that begins there")

    def _end_word(self) -> None:
        word, self._word = self._word, None
        if word is None:
            return
        if self._redirected:  # where to: no word of the command
            self._redirected = False
            return
        match = _ASSIGNMENT.fullmatch(word)
        if match and (not self._words or self._words[0] in _DECLARING):
            self._variables[match[1]] = match[2]
            return
        self._words.append(word)

    def _end_command(self) -> Iterator[Command]:
        self._end_word()
        if self._words:
            yield Command(self._words, self._variables)
        self._words, self._redirected = [], False


MOST_COMMAND_BYTES = 1 << 20


def read_text(path: str | Path) -> str:
    """A small text file; raises `ConfigError` for what is none."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_COMMAND_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if len(raw) > MOST_COMMAND_BYTES:
        raise ConfigError(
            f"{path}: larger than {MOST_COMMAND_BYTES:,} bytes; give a file with one command"
        )
    if not raw.strip():
        raise ConfigError(f"{path}: the file is empty")
    if b"\0" in raw:
        raise ConfigError(f"{path}: not a text file")
    return raw.decode("utf-8-sig", errors="replace")


def read_yaml(text: str, where: str) -> Any:
    """The content of a YAML text; raises `ConfigError` where it is none."""
    import yaml

    try:
        return yaml.safe_load(text)
    # PyYAML raises plain exceptions for tags with values that are not theirs, as in `!!bool x`.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{where}: not YAML: {problem[:200]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not YAML: nested too deeply") from None


def unreadable(path: str | Path, error: Exception) -> ConfigError:
    """The error for a file that the system does not give."""
    problem = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ConfigError(f"{path}: cannot be read: {problem}")
