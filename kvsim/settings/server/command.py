"""The arguments of a server's command line, as the engine's own parser takes them apart, and the
settings that they say.

Source: vLLM 0.33.0 `utils/argparse_utils.py`, `FlexibleArgumentParser`: underscores or dashes,
`--flag=value`, `--flag.key value` for tables, `--no-flag`, `-O3`, the start of a long flag where
no other begins so, and `--config FILE`, whose arguments come before those of the line.

A record of a run, a `meta.json`, says its arguments, too:

```
{"model": "Qwen/Qwen3-32B", "vllm_version": "0.19.0",
 "engine_kwargs": {"tensor_parallel_size": 2, "data_parallel_size": 1, ...},
 "kv_cache": {"num_gpu_blocks": 2588, "block_size": 16, ...},      where the engine was asked
 "hardware": {"device_name": "NVIDIA GeForce RTX 4090", ...}}
```
Source: `bench/core/recorder.py` and `runner.py` of github.com/casys-kaist/LLMServingSim. The blocks
are those of all data-parallel ranks together (vLLM 0.33.0 `v1/engine/core_client.py`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.errors import ConfigError
from kvsim.settings.config import RunConfig, to_table
from kvsim.settings.parsing import parse_json
from kvsim.settings.server.arguments import (
    ENGINES,
    SGLANG,
    VLLM,
    Argument,
    Flag,
    Meaning,
    Table,
    Unsimulated,
    Used,
    check_written_out,
    generation,
    interpret,
    leave_unused,
    not_simulated,
    notes,
    spelled,
    unknown_flag,
)
from kvsim.settings.server.script import (
    ServerCommand,
    commands,
    read_text,
    read_yaml,
    server_command,
)
from kvsim.settings.server.sglang import complete, sglang_differs
from kvsim.settings.server.values import switch

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def parse(words: list[str], table: Table, where: str, folder: Path | None = None) -> list[Argument]:
    """The arguments of a command line, in the order in which they count.

    `folder`: where relative paths of `--config` begin; by default, the working directory. Raises
    `ConfigError` naming the flag that is unknown or lacks its value.
    """
    for word in words:
        flag = table.flags.get(word[2:]) if word.startswith("--") else None
        if flag is not None and isinstance(flag.effect, Unsimulated) and flag.effect.first:
            raise not_simulated(f"{where}: {word}", flag.effect)
    found = list(_Words(words, table, where).read())
    configs = [argument for argument in found if argument.name == "config"]
    if not configs:
        return found
    name = str(configs[-1].value)
    try:
        path = Path(folder or ".", check_written_out(name))
    except ValueError as error:
        raise ConfigError(f"{configs[-1].where}: takes {error}, got {name[:60]!r}") from None
    return [*_of_file(path, table), *found]


class _Words:
    """Takes words one by one."""

    def __init__(self, words: list[str], table: Table, where: str) -> None:
        self._words = words
        self._table = table
        self._where = where
        self._place = 0

    def read(self) -> Iterator[Argument]:
        positional = False
        tables: dict[str, dict[str, Any]] = {}
        while self._place < len(self._words):
            word = self._words[self._place]
            self._place += 1
            if not word.startswith("-"):
                if positional:
                    raise self._stray(word)
                positional = True
                yield self._argument(self._table["positional"], word)
                continue
            name, equals, value = word.partition("=")
            head, _, keys = name.partition(".")
            flag, on = self._flag(head)
            if re.fullmatch(r"-O\w+", word):
                yield self._argument(flag.name, word[2:])
            elif keys:
                inner = self._one(flag) if not equals else value
                _merge(tables.setdefault(flag.name, {}), _nested(keys, inner))
            else:
                yield self._argument(flag.name, self._value(flag, on, value if equals else None))
        for name, inner_table in tables.items():
            yield self._argument(name, inner_table)

    def _stray(self, word: str) -> ConfigError:
        """The error for a word that belongs to no flag."""
        try:
            check_written_out(word)
        except ValueError as error:
            kind = str(error).removeprefix("a value instead of ")
            return ConfigError(f"{self._where}: {word[:60]!r} is {kind}; write out what it means")
        return ConfigError(f"{self._where}: {word[:60]!r} belongs to no flag; correct the command")

    def _argument(self, name: str, value: Any) -> Argument:
        return Argument(name, value, f"{self._where}: {spelled(name)}")

    def _flag(self, head: str) -> tuple[Flag, bool]:
        """The flag of a word, and whether the word turns it on."""
        if not head.startswith("--"):
            short = "-O" if head.startswith("-O") else head
            if short in self._table["short"]:
                return self._table.flags[self._table["short"][short]], True
            raise ConfigError(
                f"{self._where}: {self._table['program']} has no flag {head[:60]}; correct it, or"
                " leave it out"
            )
        name = head[2:].replace("-", "_")
        flag = self._table.find(name)
        if flag is not None:
            return flag, True
        inverses = {"no_": "", "disable_": "enable_", "enable_": "disable_"}
        for prefix, other in inverses.items():
            if name.startswith(prefix):
                flag = self._table.find(other + name.removeprefix(prefix))
                if flag is not None and flag.takes == "nothing":
                    return flag, False
        raise unknown_flag(name, self._table, self._where)

    def _value(self, flag: Flag, on: bool, given: str | None) -> Any:
        if flag.takes == "nothing":
            if given is None:
                return on
            return given if on else not given
        if given is not None:
            return given
        if flag.takes == "value":
            return self._one(flag)
        values = []
        while self._is_value():
            values.append(self._one(flag))
        if not values and flag.takes == "values":
            return self._one(flag)
        return values

    def _is_value(self) -> bool:
        if self._place >= len(self._words):
            return False
        word = self._words[self._place]
        # As argparse has it, negative numbers are values, and so are words with a space.
        return not word.startswith("-") or _NUMBER.fullmatch(word) is not None or " " in word

    def _one(self, flag: Flag) -> str:
        if not self._is_value():
            raise ConfigError(f"{self._where}: {spelled(flag.name)}: its value is missing")
        self._place += 1
        return self._words[self._place - 1]


def _nested(keys: str, text: str) -> dict[str, Any]:
    """The table that `--flag.KEY.KEY TEXT` says: a value in JSON, or the text itself. `KEY+` takes
    a list of the texts between commas."""
    value: Any = text
    if keys.endswith("+"):
        keys, value = keys[:-1], text.split(",")
    else:
        with suppress(ValueError):
            value = parse_json(text)
    for key in reversed(keys.split(".")):
        value = {key: value}
    table: dict[str, Any] = value
    return table


def _merge(table: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put one table into another: tables of both are merged, lists joined."""
    for key, value in more.items():
        held = table.get(key)
        if isinstance(value, dict) and isinstance(held, dict):
            _merge(held, value)
        elif isinstance(value, list) and isinstance(held, list):
            held += value
        else:
            table[key] = value


def _of_file(path: Path, table: Table) -> Iterator[Argument]:
    """The arguments of a YAML file: `tensor-parallel-size: 4`."""
    try:
        content = read_yaml(read_text(path), str(path))
    except ConfigError as error:
        raise ConfigError(f"--config: {error}; correct it, or write its flags out") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config: {path}: expected lines as `tensor-parallel-size: 4`")
    words = [word for key, value in content.items() for word in _as_words(str(key), value)]
    yield from _Words(words, table, str(path)).read()


def _as_words(key: str, value: Any) -> list[str]:
    """A line of the file as words of a command line; a `null` says nothing."""
    if value is None or value == []:
        return []
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    if isinstance(value, Mapping):
        return [f"--{key}={json.dumps(value, default=str)}"]
    return [f"--{key}={value}"]


def serve_line(arguments: Iterable[Argument], changes: Mapping[str, Any]) -> str:
    """`vllm serve MODEL --flag value ...`, quoted for a shell.

    The arguments keep their order and their values, except those that say what `changes` says
    otherwise. `changes`: keys and values of `RunConfig` for which the server has an argument.
    """
    kept = {each.name: each.value for each in arguments if _key(each.name) not in changes}
    kept |= {_names()[key]: value for key, value in changes.items()}
    model = kept.pop("model", None) or kept.pop("model_tag", None)
    return shlex.join([*VLLM["program"].split(), *([str(model)] if model else []), *flags(kept)])


def flags(values: Mapping[str, Any]) -> list[str]:
    """Names and values as words of a command line."""
    return [word for name, value in values.items() for word in _words(name, value)]


def given_settings(config: RunConfig, source: str) -> dict[str, Any]:
    """The settings that differ from kvsim's defaults and for which the server has an argument.

    A model that is shipped under a short name gets the name under which it is published, which
    `source` says: where its geometry comes from, as in `Model.source`.
    """
    usual = to_table(RunConfig())
    given = {
        key: value
        for key, value in to_table(config).items()
        if key in _names() and value is not None and value != usual[key]
    }
    published = re.search(r"config\.json of (\S+/\S+)", source)
    short = "/" not in config.model_name
    given["model"] = published[1] if published and short else config.model_name
    return given


def _key(name: str) -> str | None:
    """The setting that an argument is."""
    effect = VLLM.flags[name].effect if name in VLLM.flags else None
    return effect.key if isinstance(effect, Used) else None


def _words(name: str, value: Any) -> list[str]:
    flag = VLLM.flags.get(name)
    if flag is not None and flag.takes == "nothing":
        value = switch(value)
    if isinstance(value, bool):
        return [spelled(name if value else f"no_{name}")]
    if isinstance(value, Mapping):
        return [spelled(name), json.dumps(value)]
    if isinstance(value, list):
        return [spelled(name), *map(str, value)]
    return [spelled(name), str(value)]


@cache
def _names() -> dict[str, str]:
    """Setting → argument; the first where several have the same meaning."""
    names = reversed(list(VLLM.flags))
    return {key: name for name in names if (key := _key(name)) is not None}


_NAMED = (
    r"(?:^|[\s/])vllm\s|vllm\.entrypoints|vllm-openai|api_server\.py"
    r"|sglang\.launch_server|(?:^|[\s/])sglang\s+serve"
)
"""What a text has that names its server."""


def settings_of_command(
    vllm: str | None = None, vllm_file: str | None = None
) -> tuple[Meaning, list[str]]:
    """What a command line says, that of the script in a file, or a record of its engine; and notes
    for people. `vllm serve` may be left out; one of `sglang.launch_server` is SGLang's.

    Raises `ConfigError` for an unknown flag, and for one that cannot be simulated.
    """
    said, where = _said(vllm, vllm_file)
    if said.server == "sglang":
        meaning = interpret(said.arguments, SGLANG)
        complete(meaning, said.variables, where)
        meaning.set("engine", "sglang", where)
        return meaning, [*notes(meaning, where), *sglang_differs(said.version, where)]
    meaning = interpret(said.arguments, VLLM)
    engine = ENGINES[generation(said.version, said.variables.get("VLLM_USE_V1"))]
    meaning.set("engine", engine, where)
    if said.version:
        meaning.set("vllm_version", said.version, f"{where}: {said.telling}")
    leave_unused(meaning)
    if said.hardware is not None:
        meaning.set("hardware", said.hardware, f"{where}: hardware.device_name")
    return meaning, notes(meaning, where)


def arguments(vllm: str | None, vllm_file: str | None) -> list[Argument]:
    """The arguments of a command line, or of the one in a file; empty without either.

    Raises `ConfigError` as the settings do.
    """
    if vllm is None and vllm_file is None:
        return []
    return _said(vllm, vllm_file)[0].arguments


class Said(NamedTuple):
    """What a command line, or a record, says of its server."""

    arguments: list[Argument]
    version: str | None
    """As `0.19.0`."""
    telling: str
    """What tells the version."""
    server: str = "vllm"
    """`vllm` or `sglang`."""
    variables: Mapping[str, str] = {}
    """Those of its environment."""
    hardware: str | None = None
    """The name of the GPU."""


def _said(vllm: str | None, vllm_file: str | None) -> tuple[Said, str]:
    """What was given says, and where for messages."""
    if vllm is not None or vllm_file is None:
        where, folder, command = "--vllm", None, _command(vllm or "")
    else:
        where, folder, text = vllm_file, Path(vllm_file).parent, read_text(vllm_file)
        if record := read_record(text, where):
            return record, where
        command = server_command(text, where)
    table = SGLANG if command.server == "sglang" else VLLM
    given = parse(command.arguments, table, where, folder)
    return Said(given, command.version, "the image", command.server, command.variables), where


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


_CACHE = {
    "num_gpu_blocks": "num_gpu_blocks_override",
    "block_size": "block_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "enable_prefix_caching": "enable_prefix_caching",
}
"""Key of `kv_cache` → argument."""


def read_record(text: str, where: str) -> Said | None:
    """The record in a text; None if the text is something else.

    Raises `ConfigError` for blocks that are no number of blocks of each rank.
    """
    try:
        table = parse_json(text)
    except ValueError:
        return None
    if not isinstance(table, dict) or not isinstance(table.get("engine_kwargs"), dict):
        return None
    given: dict[str, Any] = {"model": table.get("model"), **table["engine_kwargs"]}
    cache = _inner(table, "kv_cache")
    given |= {name: cache[key] for key, name in _CACHE.items() if cache.get(key) is not None}
    if "num_gpu_blocks_override" in given:
        given["num_gpu_blocks_override"] = _blocks_of_rank(given, where)
    release = re.match(r"\d{1,4}\.\d{1,4}\.\d{1,4}", str(table.get("vllm_version")))
    device = _inner(table, "hardware").get("device_name")
    return Said(
        [Argument(name, value, f"{where}: {name}") for name, value in given.items()],
        release and release[0],
        "vllm_version",
        hardware=device if isinstance(device, str) else None,
    )


def _blocks_of_rank(given: dict[str, Any], where: str) -> int:
    """The blocks of one of the ranks that a record counts together."""
    blocks, ranks = given["num_gpu_blocks_override"], given.get("data_parallel_size") or 1
    if type(blocks) is not int or type(ranks) is not int or blocks < ranks or ranks < 1:
        raise ConfigError(
            f"{where}: kv_cache.num_gpu_blocks {blocks!r} for data_parallel_size {ranks!r}:"
            " expected at least a block for each rank; correct it, or remove kv_cache"
        )
    return blocks // ranks


def _inner(table: dict[str, Any], key: str) -> dict[str, Any]:
    """A table in a table; empty if there is none."""
    inner = table.get(key)
    return inner if isinstance(inner, dict) else {}
