"""Every setting of a run as a flag, made from `RunConfig`.

`--block-size 32` is `block_size = 32`. Values are text here and become typed by the same rules as
in a configuration file, so that both give the same messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from typer import Option

from kvsim.cli.options import Bundle
from kvsim.errors import ConfigError, check_choice
from kvsim.settings.config import GOODPUT_METRICS, JSON_TABLES, SIZES, RunConfig, read_size
from kvsim.settings.parsing import parse_json, typed

TABLES = ("cost", "scheduler_args", "block_manager_args", "goodput")
"""Keys that hold tables; `--cost-model`, `--goodput` and `--set` reach into them."""

_HINTS = get_type_hints(RunConfig, include_extras=True)
"""The type of each setting, with what is said about it."""


class Flags(Bundle):
    """The settings that were given as flags, typed; raises `ConfigError` naming the flag."""

    def __init__(self, **flags: Any) -> None:
        self.settings = settings(flags)


def settings(flags: Mapping[str, Any]) -> dict[str, Any]:
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
        text = str(error)
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
        meta = next(m for m in _HINTS[key].__metadata__ if m.extra is not None)
        panel, text = meta.extra["panel"], meta.description
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


def _metavar(kind: Any) -> str:
    """What stands for a value: its choices, or X, N or TEXT."""
    if choices := _choices(kind):
        return "|".join(choices)
    members = get_args(kind) or (kind,)
    return "X" if float in members else "TEXT" if str in members else "N"


def _option(
    name: str, kind: Any, flag: str, metavar: str | None, text: str, panel: str
) -> inspect.Parameter:
    option = Option(flag, metavar=metavar, help=text, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


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
