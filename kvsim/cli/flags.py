"""Every setting of a run as a flag, made from `RunConfig`.

`--block-size 32` is `block_size = 32`. Values are text here and become typed by the same rules as
in a configuration file, so that both give the same messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from typer import Option

from kvsim.cli.bundles import Bundle
from kvsim.config import GOODPUT_METRICS, JSON_TABLES, SIZES, RunConfig, nearest, read_size
from kvsim.errors import ConfigError
from kvsim.parsing import parse_json, typed

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
    flag = f"--{key.replace('_', '-')}"
    if key in JSON_TABLES:
        return _table(flag, value)
    if key in SIZES:
        value = read_size(key, value, flag)
    if _plain(hint) is float or float in get_args(_plain(hint)):
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
        choices = [c for c in _choices(hint) if c is not None]
        if choices:
            near = nearest(str(value), choices)
            raise ConfigError(
                f"{flag}: unknown {value!r};{near} choose from {', '.join(choices)}"
            ) from None
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


def _options() -> list[inspect.Parameter]:
    options = []
    for key in RunConfig.__struct_fields__:
        meta = next(m for m in _HINTS[key].__metadata__ if m.extra is not None)
        panel, text = meta.extra["panel"], meta.description
        if key == "cost":
            text = (
                "constant, roofline, table or module:Class; its arguments: --set cost.KEY=VALUE."
                " Default: a shipped profile of the hardware, scaled if need be, else roofline."
            )
            options.append(_option("cost_model", str, "--cost-model", "NAME", text, panel))
        elif key == "goodput":
            options.append(_option(key, list[str], "--goodput", "METRIC:MS ...", text, panel))
        elif key not in TABLES:
            options.append(_setting(key, _HINTS[key], text, panel))
    return options


def _setting(key: str, hint: Any, text: str, panel: str) -> inspect.Parameter:
    flag = f"--{key.replace('_', '-')}"
    if _plain(hint) is bool:
        return _option(key, bool, f"{flag}/--no-{flag[2:]}", None, text, panel)
    default = RunConfig.__struct_defaults__[RunConfig.__struct_fields__.index(key)]
    if default not in (None, "") and key not in JSON_TABLES:
        text = f"{text} [default: {default}]"
    choices = [choice for choice in _choices(hint) if choice is not None]
    kind = _plain(hint)
    metavar = "|".join(choices) or {int: "N", float: "X"}.get(kind, "TEXT")
    if key in JSON_TABLES:
        return _option(key, str, flag, "JSON", text, panel)
    if not choices and get_origin(kind) is not None:
        metavar = "X" if float in get_args(kind) else "N" if str not in get_args(kind) else "TEXT"
    return _option(key, str, flag, metavar, text, panel)


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


def _choices(hint: Any) -> tuple[Any, ...]:
    plain = _plain(hint)
    return get_args(plain) if get_origin(plain) is Literal else ()


Flags.__signature__ = inspect.Signature(_options())  # type: ignore[attr-defined]
