"""Rules by name: a word of a table, or `package.module:name` of an outsider.

What finds an outsider's rule is imported when it is needed: a machine that measures steps of a
built-in engine has few libraries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kvsim.errors import ConfigError


def find_rule(
    argument: str,
    table: Mapping[str, Any],
    name: Any,
    guard: Callable[[str, Any], Any],
    /,
    **given: Any,
) -> Any:
    """The rule that `name` stands for: a key of `table`, or `package.module:name`; a rule that is
    there already stands for itself.

    A class makes the rule of those of `given` that its constructor names. `guard` makes of an
    outsider's rule one that can be trusted, from the words that open its messages and the rule.
    Raises `ConfigError`.
    """
    if callable(name) or isinstance(name, tuple):
        return name
    if name in table and not isinstance(table[name], type):
        return table[name]
    from kvsim.settings.library import build, look_up

    found = look_up(argument, table, str(name))
    label = f"{argument}: {name}"
    if isinstance(found, type):
        found = build(label, found, {}, **given)
    return found if name in table else guard(label, found)


def callable_with(label: str, found: Any, *arguments: str) -> None:
    """Raises `ConfigError` for an outsider's rule that cannot be called with these arguments."""
    try:
        inspect.signature(found).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{label} is not called as ({', '.join(arguments)}): {error}") from None
