"""A server's arguments, and what each of them means for a simulation.

An engine has one table of `Flag`s, in a file of its own (`vllm.toml`, `sglang.toml`). An argument
of a command line or of a log is looked up in it:

| effect | what becomes of the argument |
|---|---|
| `Used` | it is a setting of the run |
| `Ignored` | it changes nothing here; one note lists all of them together |
| `Unsimulated` | it would change the answer: refused with its reason, unless it is off |
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from kvsim.errors import ConfigError, nearest
from kvsim.settings.config import RunConfig, to_table
from kvsim.settings.parsing import parse_json
from kvsim.settings.server import values


class Used(Struct, frozen=True):
    """The argument is the setting `key`, or `table.key` of a setting that is a table."""

    key: str
    read: Callable[[Any], Any]
    """The setting's value, of text or of a Python value; raises `ValueError` saying what it takes.
    None: the argument says nothing."""


class Ignored(Struct, frozen=True):
    """The argument changes nothing in a simulation."""

    why: str
    """Head of the note that lists arguments like it."""


class Unsimulated(Struct, frozen=True):
    """The argument changes what the server does in a way that is not simulated."""

    reason: str
    off: Callable[[Any], bool]
    """Whether a value means that the feature is not in use."""
    first: bool = False
    """Whether the line has flags that are known only where the feature is."""


Effect = Used | Ignored | Unsimulated


class Flag(NamedTuple):
    """One argument of an engine."""

    name: str
    """With underscores, as logs print it: `tensor_parallel_size`."""
    takes: Literal["nothing", "maybe", "value", "values"]
    """How many words follow it on a command line."""
    effect: Effect


class Table:
    """All arguments of an engine's command line. Its file is read when it is first asked for."""

    def __init__(self, name: str) -> None:
        """`name`: a file beside this module, which says what its keys mean."""
        self._name = name

    @cached_property
    def _file(self) -> dict[str, Any]:
        path = Path(__file__).with_name(self._name)
        return tomllib.loads(path.read_text(encoding="utf-8"))

    @cached_property
    def flags(self) -> dict[str, Flag]:
        """By name."""
        found: dict[str, Flag] = {}
        for entry in self._file["arguments"]:
            for takes in ("nothing", "maybe", "value", "values"):
                for words in entry.get(takes, "").split():
                    flag, _, key = words.partition("=")
                    found[flag] = Flag(flag, takes, _effect(entry, key or flag))
        return found

    def __getitem__(self, key: str) -> Any:
        """What the file says under a key beside the arguments."""
        return self._file[key]

    def find(self, name: str) -> Flag | None:
        """The flag with this name, or the only one whose name begins so, as argparse has it."""
        name = name.replace("-", "_")
        if name in self.flags:
            return self.flags[name]
        longer = [flag for known, flag in self.flags.items() if name and known.startswith(name)]
        return longer[0] if len(longer) == 1 else None


IGNORED = {
    "no effect": "of no effect on the engine",
    "slight": "not modelled, may change times or memory a little",
}
"""Word of an engine's file → `Ignored.why`."""


def empty(value: Any) -> bool:
    """Whether a value says nothing."""
    return value in (None, False, "", [], {}) or value == ()


def only_rope(value: Any) -> bool:
    """Whether overrides of the model's config change nothing but rotary embeddings.

    They may lengthen the context, which the longest length of the command then says.
    """
    try:
        table = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return False
    return empty(table) or (
        isinstance(table, dict)
        and all(
            key.startswith("rope")
            or key == "max_position_embeddings"
            or (key == "text_config" and only_rope(inner))
            for key, inner in table.items()
        )
    )


def _effect(entry: dict[str, Any], key: str) -> Effect:
    if "used" in entry:
        key = f"{entry['table']}.{key}" if "table" in entry else key
        return Used(key, getattr(values, entry["used"]))
    if "ignored" in entry:
        return Ignored(IGNORED[entry["ignored"]])
    also = entry.get("off", [])
    off = only_rope if also == "rope" else lambda value: empty(value) or value in also
    return Unsimulated(entry["unsimulated"], off, entry.get("first", False))


VLLM = Table("vllm.toml")
"""`vllm serve` of vLLM 0.33.0, with the arguments of earlier versions."""
SGLANG = Table("sglang.toml")
"""`sglang.launch_server` of SGLang 0.5.23."""


class Argument(NamedTuple):
    """An argument that was given."""

    name: str
    """The name of its flag (`Flag.name`)."""
    value: Any
    """Text, a list of texts or True from a command line; a Python value from a log."""
    where: str
    """For messages: `serve.sh: --tensor-parallel-size` or `vllm.log:42`."""


class Meaning(Struct):
    """What arguments say to a simulation."""

    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    """Setting → `Argument.where`."""
    ignored: dict[str, list[str]] = {}
    """`Ignored.why` → arguments as on a command line."""
    unknown: list[str] = []

    def set(self, key: str, value: Any, where: str) -> None:
        """Take a setting over, in place of what earlier arguments said.

        `key`: a setting, or `table.key` for a key of a setting that is a table.
        """
        key, _, inner = key.partition(".")
        if inner:
            value = {**self.settings.get(key, {}), inner: value}
        self.settings[key], self.sources[key] = value, where


def interpret(arguments: Iterable[Argument], table: Table) -> Meaning:
    """What the arguments mean; where one is given twice, the later counts, as for argparse.

    Raises `ConfigError` for a value that its flag does not take, and for what is not simulated.
    """
    meaning = Meaning()
    last = {argument.name: argument for argument in arguments}
    for argument in last.values():
        flag = table.flags.get(argument.name)
        if flag is None:
            meaning.unknown.append(spelled(argument.name))
        elif argument.value is not None:
            _take(meaning, flag, argument)
    return meaning


def _take(meaning: Meaning, flag: Flag, argument: Argument) -> None:
    effect = flag.effect
    if isinstance(effect, Ignored):
        meaning.ignored.setdefault(effect.why, []).append(spelled(flag.name))
    elif isinstance(effect, Unsimulated):
        if not effect.off(plain(argument.value)):
            raise not_simulated(_at(argument), effect)
    else:
        try:
            value = effect.read(check_written_out(argument.value))
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"{_at(argument)}: takes {error}, got {_short(argument.value)}"
            ) from None
        if value is not None:
            meaning.set(effect.key, value, argument.where)


def not_simulated(where: str, effect: Unsimulated) -> ConfigError:
    """The error for an argument whose feature is not simulated."""
    return ConfigError(
        f"{where}: {effect.reason}, which is not simulated; leave it out to simulate the server"
        " without it"
    )


_OPEN = re.compile(
    r"<[A-Za-z_][^<>]*>|\{\{.*?\}\}|(?:^|/)path/to/|\byour[-_]|^\.\.\.$", re.IGNORECASE
)
"""What stands for a value that somebody was to fill in."""


def check_written_out(value: Any) -> Any:
    """The value; raises `ValueError` where a shell variable or a placeholder stands for it."""
    if isinstance(value, str):
        if "$" in value:
            raise ValueError("a value instead of a shell variable")
        if _OPEN.search(value):
            raise ValueError("a value instead of a placeholder")
    return value


def unknown_flag(name: str, table: Table, where: str) -> ConfigError:
    """The error for a flag that an engine does not have."""
    near = nearest(name.replace("-", "_"), table.flags)
    return ConfigError(
        f"{where}: {table['program']} has no flag {_short(spelled(name), quoted=False)};{near}"
        " correct it, or leave it out"
    )


def spelled(name: str) -> str:
    """A flag as on a command line."""
    return f"--{name.replace('_', '-')}"


def plain(value: Any) -> Any:
    """A value without the quotes of a command line: `"1"` is 1, `"null"` is None."""
    if not isinstance(value, str):
        return value
    words = {"": None, "none": None, "null": None, "true": True, "false": False}
    text = value.strip()
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"-?\d{1,18}\.\d{0,18}", text):
        return float(text)
    return {"{}": {}, "[]": []}.get(text, text)


def _at(argument: Argument) -> str:
    name = spelled(argument.name)
    return argument.where if name in argument.where else f"{argument.where}: {name}"


def _short(value: Any, *, quoted: bool = True) -> str:
    text = repr(value) if quoted else value
    return text if len(text) <= 60 else f"{text[:57]}..."


ENGINES = {"0": "vllm-0.6.3", "1": "vllm-v1"}
"""Generation, as logs print it → `engine`."""

_V1_SINCE = (0, 8, 0)
"""The first vLLM version whose default is V1; before, `VLLM_USE_V1=1` chose it (0.7.3 and 0.8.0
`envs.py`, `engine/arg_utils.py`)."""


def generation(version: str | None, use_v1: str | None) -> str:
    """`0` or `1`, for a vLLM version as `0.9.2` and the environment variable `VLLM_USE_V1`."""
    if use_v1 in ("0", "1"):
        return use_v1
    new = version is None or tuple(map(int, version.split("."))) >= _V1_SINCE
    return "1" if new else "0"


def leave_unused(meaning: Meaning) -> None:
    """Take away the settings that the engine does not have, with a note for those that are set."""
    engine = meaning.settings.get("engine", "")
    for key in VLLM["unused"].get(engine, "").split():
        meaning.sources.pop(key, None)
        if meaning.settings.pop(key, None):
            meaning.ignored.setdefault(f"not used by {engine}", []).append(key)


def notes(meaning: Meaning, where: str, pool: str = "") -> list[str]:
    """What was taken from `where`, and what was left out; `pool`: the blocks, in words."""
    said = dict(meaning.settings)
    head = []
    if "model" in said:
        head.append(f"model {said.pop('model')}")
    if "vllm_version" in said:
        head.append(f"vLLM {said.pop('vllm_version')}")
    if pool:
        del said["num_gpu_blocks_override"], said["block_size"]
        head.append(pool)
    usual = to_table(RunConfig())
    words = {True: "on", False: "off"}
    rest = (
        f"{key} {words[value] if isinstance(value, bool) else value}"
        for key, value in said.items()
        if value != usual[key]
    )
    groups = dict(meaning.ignored)
    if meaning.unknown:
        groups["not known here"] = meaning.unknown
    return [
        f"from {where}: {', '.join([*head, *rest])}",
        *(f"from {where}, {why}: {', '.join(names)}" for why, names in groups.items()),
    ]
