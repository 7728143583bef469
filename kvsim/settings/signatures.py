"""What a class takes and is, also where it is compiled and does not say it itself."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_Kind = inspect._ParameterKind


def signature(constructor: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a function, or of a class. Raises `TypeError` or `ValueError` where nobody
    says them."""
    owner: Any = _owner(constructor)
    node = _written(owner) if owner else _written_function(constructor)
    if node is None:
        return inspect.signature(constructor)
    scope, arguments = scope_of(constructor), node.args
    places = arguments.args[1 if owner else 0 :]
    defaults = [None] * (len(places) - len(arguments.defaults)) + list(arguments.defaults)
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters = [
        _parameter(each, default, kind, scope)
        for kind, pairs in (
            (_Kind.POSITIONAL_OR_KEYWORD, zip(places, defaults, strict=True)),
            (_Kind.KEYWORD_ONLY, named),
        )
        for each, default in pairs
    ]
    return inspect.Signature(parameters)


def docstring(described: Any) -> str:
    """What a class or function says of itself; empty: nothing."""
    compiled = isinstance(described, type) and "__mypyc_attrs__" in vars(described)
    node = _class_of(described) if compiled else None
    return (ast.get_docstring(node) if node else inspect.getdoc(described)) or ""


def scope_of(constructor: Callable[..., Any]) -> Mapping[str, Any]:
    """The names that its annotations may use."""
    compiled: Any = constructor if _is_compiled(constructor) else _owner(constructor)
    if compiled is not None:
        return vars(sys.modules[compiled.__module__])
    function = constructor
    if isinstance(constructor, type):
        function = getattr(constructor, "__init__", constructor)
    found: Mapping[str, Any] = getattr(function, "__globals__", {})
    return found


def _owner(constructor: Callable[..., Any]) -> type | None:
    """The compiled class whose constructor a class has; None if it is not compiled."""
    for each in constructor.__mro__ if isinstance(constructor, type) else ():
        compiled = "__mypyc_attrs__" in vars(each)
        if compiled and _written(each) is not None:
            return each
        if not compiled and "__init__" in vars(each):
            return None
    return None


@cache
def _written(compiled: type) -> ast.FunctionDef | None:
    """The constructor of a compiled class in its source; None if it has none
    of its own."""
    node = _class_of(compiled)
    for each in node.body if node else ():
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return each
    return None


def _written_function(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """A compiled function in its source; None if it is not compiled."""
    node = _definition(function.__module__, function.__name__) if _is_compiled(function) else None
    return node if isinstance(node, ast.FunctionDef) else None


def _is_compiled(function: Callable[..., Any]) -> bool:
    return inspect.isbuiltin(function) and function.__module__.startswith("kvsim.")


def _class_of(compiled: type) -> ast.ClassDef | None:
    """A class in its source."""
    node = _definition(compiled.__module__, compiled.__name__)
    return node if isinstance(node, ast.ClassDef) else None


@cache
def _definition(module: str, name: str) -> ast.stmt | None:
    """What has a name in a module, a class up to its constructor, in its source, which may lie
    elsewhere than what is compiled."""
    package, *names = module.split(".")
    place = sys.modules[package].__file__
    assert place is not None
    source = Path(place).parent.joinpath(*names).with_suffix(".py").read_text("utf-8")
    begin = re.search(rf"^(?:class|def) {name}\b", source, re.MULTILINE)
    if begin is None:
        return None
    end = re.compile(r"^[\w@]", re.MULTILINE).search(source, begin.end())
    found = source[begin.start() : end.start() if end else len(source)]
    # To parse what follows the constructor takes longer than a short run.
    following = re.compile(r"^    (?:def|@)", re.MULTILINE)
    next_one = following.search(found, found.find("\n    def __init__(") + 2)
    return ast.parse(found[: next_one.start()] if next_one else found).body[0]


def _parameter(
    argument: ast.arg, default: ast.expr | None, kind: Any, scope: Mapping[str, Any]
) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    value = empty
    if default is not None:
        value = eval(compile(ast.Expression(default), "<default>", "eval"), dict(scope))
    annotation = empty if argument.annotation is None else ast.unparse(argument.annotation)
    return inspect.Parameter(argument.arg, kind, default=value, annotation=annotation)
