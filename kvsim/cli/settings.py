"""The settings of runs and fleets as options.

What a real server says counts less than a configuration file, and that less than a flag. Every
setting of a run is a flag, made from `RunConfig`: `--block-size 32` is `block_size = 32`. Values
are text here and become typed by the same rules as in a file, so that both give the same messages.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from typer import Option

from kvsim.cli.commands import note
from kvsim.cli.options import Bundle, Options
from kvsim.errors import ConfigError, check_choice
from kvsim.settings.config import (
    GOODPUT_METRICS,
    JSON_TABLES,
    SIZES,
    RunConfig,
    about,
    layered,
    merged,
    read_size,
    read_toml,
)
from kvsim.settings.limits import REPLICAS, check_size
from kvsim.settings.parsing import parse_json, typed

if TYPE_CHECKING:
    from kvsim.settings.server import ServerWord


class Given(Bundle, kw_only=True):
    """Every setting of a run, as flags."""

    assignments: list[str] | None = Option(
        None, "--set", metavar="KEY=VALUE", help="Any setting, as in --set cost.step_us=5000."
    )
    flags: Flags


class Settings(Bundle, kw_only=True):
    """The settings of a run, and where a real server says its own."""

    startup_log: str | None = Option(
        None,
        metavar="FILE",
        help="Settings and block count from the log of a vLLM or SGLang server; .gz too.",
    )
    vllm: str | None = Option(
        None,
        metavar="COMMAND",
        help="Settings from `vllm serve ...` or `python -m sglang.launch_server ...`.",
    )
    vllm_file: str | None = Option(
        None,
        metavar="FILE",
        help="Settings from the command in a shell script, or from the meta.json of a recorded"
        " run.",
    )
    given: Given

    @cached_property
    def word(self) -> ServerWord:
        """What the server says; where its settings come from goes to standard error."""
        from kvsim.settings.server import server_settings

        word = server_settings(self.startup_log, self.vllm, self.vllm_file)
        note(*word.notes)
        return word

    def load(self, config: str | None, word: ServerWord | None = None) -> RunConfig:
        """The settings of a run: what the file `config` or a flag says counts more than the server.

        What the server's block count means goes to standard error. Raises `ConfigError`.
        """
        path = config_path(config)
        return self.over({} if path is None else read_toml(path), path or "configuration", word)

    def over(
        self, table: Mapping[str, Any], where: str, word: ServerWord | None = None
    ) -> RunConfig:
        """`load` of a table that was read at `where`."""
        word, flags, assigned = word or self.word, self.given.flags, self.given.assignments or ()
        loaded = layered(table, where, flags.settings, assigned, word.settings)
        if not word.origin:
            return loaded
        from kvsim.run.told import settled

        values = [assignment.partition("=")[2] for assignment in assigned]
        word.refuse_code(loaded, [table, flags.settings, *values])
        note(*word.doubts(loaded))
        loaded, notes = settled(loaded, word)
        note(*notes)
        return loaded


def config_path(config: str | None) -> str | None:
    """The file that a name in configs/runs, or a path, stands for."""
    if config is None:
        return None
    from kvsim.settings.library import find

    return str(find("runs", config))


TABLES = ("cost", "scheduler_args", "block_manager_args", "goodput")
"""Keys that hold tables; `--cost-model`, `--goodput` and `--set` reach into them."""

_HINTS = get_type_hints(RunConfig, include_extras=True)
"""The type of each setting, with what is said about it."""


class Flags(Options):
    """The settings that were given as flags."""

    def __init__(self, **flags: Any) -> None:
        self.settings = typed_settings(flags)


def typed_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given as flags, typed; raises `ConfigError` naming the flag."""
    table: dict[str, Any] = {}
    for key, value in flags.items():
        if value is None or value == []:
            continue
        if key == "cost_model":
            table["cost"] = {"model": value}
        elif key == "goodput":
            table["goodput"] = dict(map(_objective, value))
        else:
            table[key] = _typed(key, value, _HINTS[key])
    return table


def _typed(key: str, value: Any, hint: Any) -> Any:
    flag, kind = f"--{key.replace('_', '-')}", _plain(hint)
    if key in JSON_TABLES:
        return _table(flag, value)
    if key in SIZES:
        value = read_size(key, value, flag)
    if float in (kind, *get_args(kind)):
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"{flag}: {value!r} is not a number") from None
    try:
        taken = typed(value, hint, strict=False)
        if taken is None:  # what msgspec makes of the word `null`
            raise msgspec.ValidationError("Expected a value")
        return taken
    except msgspec.ValidationError as error:
        if choices := _choices(kind):
            check_choice(flag, str(value), choices)
        text = str(error).partition(", got ")[0].replace(" | null", "")
        raise ConfigError(f"{flag}: {text[:1].lower()}{text[1:]}, got {value!r}") from None


def _table(flag: str, text: str) -> dict[str, Any]:
    try:
        table = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{flag}: expected a table of keys in JSON, got {text!r}")
    return table


def _objective(text: str) -> tuple[str, float]:
    metric, colon, limit = text.partition(":")
    try:
        if not colon or metric not in GOODPUT_METRICS:
            raise ValueError
        return metric, float(limit)
    except ValueError:
        raise ConfigError(
            f"--goodput {text}: expected METRIC:MILLISECONDS with"
            f" {', '.join(GOODPUT_METRICS)}, as in --goodput ttft:500 tpot:50"
        ) from None


def _options() -> Iterator[inspect.Parameter]:
    defaults = RunConfig.__struct_defaults__
    for key, default in zip(RunConfig.__struct_fields__, defaults, strict=True):
        panel, text = about()[key]
        flag, kind = f"--{key.replace('_', '-')}", _plain(_HINTS[key])
        if key == "cost":
            text = (
                "constant, roofline, table or module:Class; its arguments: --set cost.KEY=VALUE."
                " Default: a shipped profile of the hardware, scaled if need be, else roofline."
            )
            yield _option("cost_model", str, "--cost-model", "NAME", text, panel)
        elif key == "goodput":
            yield _option(key, list[str], flag, "METRIC:MS ...", text, panel)
        elif kind is bool:
            yield _option(key, bool, f"{flag}/--no-{flag[2:]}", None, text, panel)
        elif key in JSON_TABLES:
            yield _option(key, str, flag, "JSON", text, panel)
        elif key not in TABLES:
            if default not in (None, ""):
                text = f"{text} [default: {default}]"
            yield _option(key, str, flag, _metavar(kind), text, panel)


_WIDEST = 60
"""Characters of choices that stand beside a flag; the texts of others name them."""


def _metavar(kind: Any) -> str:
    """What stands for a value: its choices, or X, N or TEXT."""
    if choices := _choices(kind):
        listed = "|".join(choices)
        return listed if len(listed) <= _WIDEST else "TYPE"
    members = get_args(kind) or (kind,)
    return "X" if float in members else "TEXT" if str in members else "N"


def _option(
    name: str, kind: Any, flag: str, metavar: str | None, text: str, panel: str
) -> inspect.Parameter:
    # As the default, because to annotate a hundred types takes longer than all else of this module.
    option = Option(
        None, flag, metavar=metavar, help=text, rich_help_panel=panel, show_default=False
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=option, annotation=kind | None)


def _plain(hint: Any) -> Any:
    """The type without annotations; unions keep their members, stripped."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_args(hint) and get_origin(hint) is not Literal:
        members = tuple(_plain(member) for member in get_args(hint))
        rest = tuple(member for member in members if member is not type(None))
        return rest[0] if len(rest) == 1 else Union[rest]  # noqa: UP007
    return hint


def _choices(kind: Any) -> list[Any]:
    """The values of a type that lists them; none for others."""
    values = get_args(kind) if get_origin(kind) is Literal else ()
    return [value for value in values if value is not None]


Flags.__signature__ = inspect.Signature(list(_options()))  # type: ignore[attr-defined]


class FleetOptions(Bundle, kw_only=True):
    """How many engines there are, who sends them requests, and their settings."""

    replicas: int | None = Option(None, min=1, metavar="N", help="Simulate N engines and a router.")
    prefill_replicas: int | None = Option(
        None, min=1, metavar="N", help="Split prefill and decode: N engines compute prompts."
    )
    decode_replicas: int | None = Option(
        None, min=1, metavar="N", help="N engines generate the outputs."
    )
    router: str | None = Option(
        None, metavar="NAME", help="The router: round-robin, dynamo-kv, ..."
    )
    router_set: list[str] | None = Option(
        None, metavar="KEY=VALUE", help="An argument of the router."
    )
    settings: Settings

    def table(self) -> dict[str, Any]:
        """What is said of the fleet, as keys of `FleetConfig`; empty if nothing is. Raises
        `ConfigError` for a prefill/decode split, which these keys cannot say."""
        if self._split():
            raise ConfigError(
                "--prefill-replicas: only `kvsim run` and `kvsim compare` split prefill and decode;"
                " leave it and --decode-replicas out"
            )
        return self._said()

    def _said(self) -> dict[str, Any]:
        args = dict(map(_argument, self.router_set or ()))
        given = {"replicas": self.replicas, "router": self.router, "router_args": args}
        return {key: value for key, value in given.items() if value}

    def _split(self) -> list[dict[str, Any]]:
        """The kinds of replicas of a prefill/decode split; none without one. Raises
        `ConfigError`."""
        from kvsim.run.offload import NIXL

        numbers = {"kv_producer": self.prefill_replicas, "kv_consumer": self.decode_replicas}
        if set(numbers.values()) == {None}:
            return []
        if None in numbers.values() or self.replicas is not None:
            raise ConfigError(
                "--prefill-replicas: a prefill/decode split has both sides, and no other replicas;"
                " give --prefill-replicas and --decode-replicas, and leave --replicas out"
            )
        return [
            {"count": number, "kv_transfer_config": {"kv_connector": NIXL, "kv_role": role}}
            for role, number in numbers.items()
        ]

    def load(self, config: str | None) -> tuple[list[tuple[str, dict[str, Any]]], list[RunConfig]]:
        """What the file `config` and flags, which count more, say: the routers, each with its
        arguments, and the settings of the replicas. Without replicas and routers there is one
        engine, and no router. Raises `ConfigError`."""
        from kvsim.fleet import FleetConfig, make_settings
        from kvsim.fleet.settings import each_kind, parted

        path = config_path(config)
        where = path or "configuration"
        said, shared = parted({} if path is None else read_toml(path))
        kinds, said = self._split() or said.get("replicas"), merged(said, self._said())
        if not isinstance(kinds, list):
            configs = [self.settings.over(shared, where)]
            said = _with_ranks(said, configs[0].data_parallel_size)
        elif self.replicas is None:
            configs = [
                loaded
                for count, table, place in each_kind(kinds, shared, where)
                for loaded in [self.settings.over(table, place)] * count
            ]
            said["replicas"] = len(configs)
        else:
            raise ConfigError(f"--replicas: {where} lists its replicas; leave one of the two out")
        fleet = make_settings(said, where)
        if not isinstance(fleet, FleetConfig):
            return [], configs
        check_size("--replicas", fleet.replicas, REPLICAS)
        if not isinstance(kinds, list):
            configs *= fleet.replicas
        return [(name, fleet.router_args) for name in fleet.router.split(",")], configs


def _with_ranks(said: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What is said of a fleet, where data-parallel ranks are replicas of it. Raises
    `ConfigError`."""
    from kvsim.fleet.settings import RANKS_ROUTER

    if ranks == 1:
        return said
    if said.get("replicas", ranks) != ranks:
        raise ConfigError(
            f"replicas: data_parallel_size {ranks} is simulated as {ranks} replicas; leave one of"
            " the two out"
        )
    return {"replicas": ranks, "router": RANKS_ROUTER, **said}


def _argument(assignment: str) -> tuple[str, Any]:
    """KEY=VALUE; the value as in JSON, or else as text."""
    key, equals, value = assignment.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(f"--router-set: {assignment!r} is no KEY=VALUE, as in temperature=0.5")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
