"""Finds what a name stands for: a shipped file, or the class behind a policy's name.

A constructor's signature is the schema of its settings: `construct` checks the user's arguments
against it before calling, so that a policy states each of its settings exactly once. The
`**settings` of a class stand for what the class that it is made from takes.

A policy is an *oracle* if its constructor names the parameter `future`: nothing else hands it out.

What a class takes and is, is found also where it is compiled and does not say it itself. Nothing
that a machine with torch alone lacks is imported before it is used.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from kvsim.errors import ConfigError, KvsimError, PolicyError, nearest
from kvsim.settings.parsing import parse_json, typed

if TYPE_CHECKING:
    import msgspec

B = TypeVar("B")
T = TypeVar("T", bound="msgspec.Struct")

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_KINDS = {
    "models": ("model", "configs/models", ".toml"),
    "hardware": ("hardware", "configs/hardware", ".toml"),
    "profiles": ("profile", "configs/hardware", ".json"),
    "runs": ("run", "configs/runs", ".toml"),
    "workloads": ("workload", "configs/workloads", ".toml"),
    "traces": ("trace", "traces", ".jsonl"),
}
"""Kind -> (word in messages, shipped folder, suffix)."""


def is_at(kind: Callable[[Path], bool], path: Path) -> bool:
    """`path.is_file()` and the like, also for names that no file can have."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False


def find(kind: str, name_or_path: str) -> Path:
    """The file that `name_or_path` means, for a kind of `models`, `hardware`, `profiles`, `runs`,
    `workloads`, `traces`.

    A file that exists is taken as it is; anything else must be the name of a shipped file.
    Raises `ConfigError` with the nearest right name and the list of names.
    """
    path = Path(name_or_path)
    if is_at(Path.is_file, path):
        return path
    word, folder, suffix = _KINDS[kind]
    shipped = _shipped(folder) / f"{name_or_path}{suffix}"
    if name_or_path in names(kind):
        return shipped
    if len(path.parts) > 1 or path.suffix in (".toml", ".json", ".jsonl"):
        raise ConfigError(f"{name_or_path}: no such file; give a {word} file that exists")
    raise ConfigError(
        f"no {word} named {name_or_path!r};{nearest(name_or_path.lower(), names(kind))}"
        f" give one of {', '.join(names(kind))}, or the path of a file"
    )


def read_by(reader: Callable[[Path], T], kind: str, path: Path) -> T:
    """What `reader` makes of a file of this kind. A shipped one is read once in a process."""
    shipped = path.parent == _shipped(_KINDS[kind][1])
    return _read_once(reader, path) if shipped else reader(path)


@cache
def _read_once(reader: Callable[[Path], T], path: Path) -> T:
    """What is shipped does not change while a process runs."""
    return reader(path)


def names(kind: str) -> list[str]:
    """Names of the shipped files of a kind, in alphabetical order."""
    _, folder, suffix = _KINDS[kind]
    return list(_names(_shipped(folder), suffix))


@cache
def _names(folder: Path, suffix: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob(f"*{suffix}")))


def convert(table: Mapping[str, Any], struct: type[T], where: str) -> T:
    """A `struct` from plain values, or a `ConfigError` that names `where` and the key."""
    for key in table:
        if key not in struct.__struct_encode_fields__:
            raise ConfigError(
                f"{where}: unknown key {key!r};{nearest(key, struct.__struct_encode_fields__)}"
                f" it takes {', '.join(struct.__struct_encode_fields__)}"
            )
    return converted(table, struct, where)


def converted(table: Mapping[str, Any], struct: type[T], where: str) -> T:
    """`convert` for a document of others: keys that `struct` does not have are skipped."""
    try:
        result: T = typed(dict(table), struct)
    except ValueError as error:
        text, _, at = str(error).partition(" - at `$.")
        key = f"{at.rstrip('`')}: " if at else ""
        raise ConfigError(f"{where}: {key}{text[:1].lower()}{text[1:]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply; give a flat table of keys") from None
    return result


def read_json(path: Path, *, infinities: bool = False) -> dict[str, Any]:
    """The table of a JSON file without NaN and, but for `infinities`, without those, or a
    `ConfigError` with its line."""
    try:
        table = parse_json(path.read_bytes(), infinities=infinities)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected a table of keys, got a {type(table).__name__}")
    return table


def construct(
    kind: str, table: Mapping[str, Any], name: str, args: Mapping[str, Any], /, **given: Any
) -> Any:
    """The object that `name` stands for: a key of `table`, or `package.module:Class`.

    `kind` is the word for messages (`cost`, `engine`, ...). Of `given`, what the constructor
    names is passed on; `args` are the user's and must be keyword arguments of the constructor.
    Raises `ConfigError` for an unknown name, a missing, unknown or ill-typed argument, and in
    place of a `ValueError` of the constructor.
    """
    return build(f"{kind}: {name}", look_up(kind, table, name), args, **given)


def look_up(kind: str, table: Mapping[str, Any], name: str) -> Any:
    """What is behind a key of `table` or behind `package.module:name`, not called.

    Raises `ConfigError` for an unknown name, and `PolicyError` for a module that cannot be imported
    or has nothing of this name.
    """
    if name in table:
        return table[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"{kind}: unknown {name!r};{nearest(name, table)}"
            f" choose from {', '.join(table)}, or give package.module:name"
        )
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever an outsider's module does while it is imported
        raise PolicyError(
            f"{kind}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise PolicyError(
            f"{kind}: module {module_name!r} has no {attribute!r};"
            f"{nearest(attribute, vars(module))} write package.module:name"
        )
    return found


def build(label: str, constructor: Callable[..., B], args: Mapping[str, Any], /, **given: Any) -> B:
    """`constructor` called with the user's `args` and those of `given` that it names.

    `label` opens every message. Errors as in `construct`.
    """
    hints, required, anything = _parameters(label, constructor)
    settable = [key for key in hints if key not in given]
    _check_names(label, args, settable, required, anything)
    named = {k: v for k, v in given.items() if k in hints or (anything and k != "future")}
    if "future" in named:
        named["future"].given_to(label)
    values = {key: checked(f"{label}: {key}", args[key], hints.get(key, Any)) for key in args}
    try:
        return constructor(**{**named, **values})
    except KvsimError:
        raise
    except ValueError as error:
        raise ConfigError(f"{label}: {error}") from None
    except Exception as error:  # whatever an outsider's constructor does
        raise PolicyError(f"{label}: {type(error).__name__}: {error}") from error


def takes(label: str, constructor: Callable[..., Any], key: str) -> bool:
    """Whether `build` would pass an argument of this name on. Errors as in `build`."""
    hints, _, anything = _parameters(label, constructor)
    return key in hints or anything


def _check_names(
    label: str, args: Mapping[str, Any], settable: list[str], required: set[str], anything: bool
) -> None:
    """Refuse arguments that nothing takes, and the absence of those that something needs."""
    for key in args:
        if key not in settable and not anything:
            takes = f"it takes {', '.join(settable)}" if settable else "it takes no arguments"
            raise ConfigError(f"{label} takes no {key!r};{nearest(key, settable)} {takes}")
    for key in settable:
        if key in required and key not in args:
            raise ConfigError(f"{label} needs {key!r}")


def _shipped(folder: str) -> Path:
    """A shipped folder: inside the package in a wheel, beside it in a checkout."""
    return _near(__file__, folder)


@cache
def _near(module: str, folder: str) -> Path:
    package = Path(module).parents[1]
    installed = package / f"_{folder}"
    return installed if installed.is_dir() else package.parent / folder


def _parameters(
    label: str, constructor: Callable[..., Any]
) -> tuple[dict[str, Any], set[str], bool]:
    """What can be passed by keyword, with its type; what must be; and whether anything can."""
    try:
        return _declared(constructor)
    except (TypeError, ValueError):
        raise ConfigError(f"{label} does not say what arguments it takes") from None


@cache
def _declared(constructor: Callable[..., Any]) -> tuple[dict[str, Any], set[str], bool]:
    hints: dict[str, Any] = {}
    required: set[str] = set()
    # A constructor, and those that it hands its `**settings` on to.
    chain = [constructor]
    if isinstance(constructor, type):
        # Only while each has `**settings`: they stand for what the next one takes.
        chain += [b for b in constructor.__mro__[1:] if "__init__" in vars(b) and b is not object]
    for each in chain:
        forwards = False
        for key, parameter in signature(each).parameters.items():
            forwards |= parameter.kind is parameter.VAR_KEYWORD
            if parameter.kind in _BY_KEYWORD and key not in hints:
                hints[key] = _hint(each, parameter)
                if parameter.default is parameter.empty:
                    required.add(key)
        if not forwards:
            return hints, required, False
    return hints, required, True


def _hint(constructor: Any, parameter: inspect.Parameter) -> Any:
    """The type that the constructor declares for a parameter; `Any` where it declares none."""
    if parameter.annotation is parameter.empty:
        return Any
    alone = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    written = _as_written(constructor)
    function = getattr(written, "__init__", None) if isinstance(written, type) else written
    scope = getattr(function, "__globals__", {})
    try:
        return get_type_hints(alone, scope, include_extras=True)[parameter.name]
    except NameError:  # imported for type checkers only
        return Any


def checked(label: str, value: Any, hint: Any) -> Any:
    """A value as the type `hint`, or a `ConfigError` that `label` opens. Ready-made rules pass."""
    if callable(value):
        return value
    try:
        return typed(value, hint)
    except ValueError as error:
        text = str(error)
        raise ConfigError(f"{label}: {text[:1].lower()}{text[1:]} ({value!r})") from None
    except TypeError:  # a type that cannot be checked
        return value


def overridden(built: object, known: type) -> set[str]:
    """The names of the attributes that an object overrides, compared with `known`, a class of which
    it is an instance."""
    above = known.__mro__
    own = {name for kind in type(built).__mro__ if kind not in above for name in vars(kind)}
    shadowed = {name for name in vars(built) if callable(getattr(known, name, None))}
    return ({name for name in own if hasattr(known, name)} | shadowed) - _SAYS_NOTHING


_SAYS_NOTHING = {"__module__", "__doc__", "__annotations__", "__dict__", "__weakref__"}


def signature(constructor: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a function, or of a class. Raises `TypeError` or `ValueError` where nobody
    says them."""
    return inspect.signature(_as_written(constructor))


def docstring(described: Any) -> str:
    """What a class or function says of itself; empty: nothing."""
    compiled = isinstance(described, type) and "__mypyc_attrs__" in vars(described)
    return inspect.getdoc(_twin(described) if compiled else described) or ""


def _as_written(constructor: Any) -> Any:
    """What says what a constructor takes: itself, or the twin of what is compiled."""
    if inspect.isbuiltin(constructor) and constructor.__module__.startswith("kvsim."):
        return _twin(constructor)
    for each in constructor.__mro__ if isinstance(constructor, type) else ():
        if "__mypyc_attrs__" in vars(each):
            if "__init__" in vars(twin := _twin(each)):
                return twin
        elif "__init__" in vars(each):
            break
    return constructor


@cache
def _twin(compiled: Any) -> Any:
    """A function, or a class up to its constructor, as Python makes it of the source: it has the
    annotations and docstrings that what is compiled lacks. Nobody calls it."""
    module, name = compiled.__module__, compiled.__name__
    tree = ast.parse(_source(module, name))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):  # What is compiled takes no heirs of another kind.
            node.bases, node.keywords = [], []
    scope = dict(vars(sys.modules[module]))
    # Annotations stay texts, as in this module.
    exec(compile(tree, module, "exec"), scope)
    return scope[name]


def _source(module: str, name: str) -> str:
    """The text of a function, or of a class up to the end of its constructor; it may lie elsewhere
    than what is compiled."""
    package, *names = module.split(".")
    place = sys.modules[package].__file__
    assert place is not None
    source = Path(place).parent.joinpath(*names).with_suffix(".py").read_text("utf-8")
    begin = re.search(rf"^(?:class|def) {name}\b", source, re.MULTILINE)
    assert begin is not None
    end = re.compile(r"^[\w@]", re.MULTILINE).search(source, begin.end())
    found = source[begin.start() : end.start() if end else len(source)]
    # To parse what follows the constructor takes longer than a short run.
    following = re.compile(r"^    (?:def|@)", re.MULTILINE)
    next_one = following.search(found, found.find("\n    def __init__(") + 2)
    return found[: next_one.start()] if next_one else found
