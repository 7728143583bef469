"""Options that several commands share, declared once.

A command takes a bundle as one parameter, and Typer sees an option for each of its fields:

```
@takes_bundles
def run(*, trace: TracePath = None, server: ServerOptions) -> None: ...
```
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, get_type_hints


class Bundle:
    """Several options: the parameters of a subclass, which may be bundles themselves."""


def takes_bundles(command: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer, in which each bundle has given way to its options."""

    @wraps(command)
    def unbundled(**given: Any) -> None:
        _made(command, given)

    options = list(_options(command))
    unbundled.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    unbundled.__annotations__ = {each.name: each.annotation for each in options}
    return unbundled


def _options(made: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter, hint in _parameters(made):
        if _is_bundle(hint):
            yield from _options(hint)
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            yield parameter.replace(annotation=hint, kind=kind)


def _made(made: Callable[..., Any], given: dict[str, Any]) -> Any:
    """What `made` returns for the values of the options."""
    return made(
        **{
            parameter.name: _made(hint, given) if _is_bundle(hint) else given[parameter.name]
            for parameter, hint in _parameters(made)
        }
    )


@cache  # They are asked for twice: to declare the options, and to use them.
def _parameters(made: Callable[..., Any]) -> list[tuple[inspect.Parameter, Any]]:
    """The parameters of a command or of a bundle, each with its type."""
    hints = get_type_hints(made, include_extras=True)
    parameters = inspect.signature(made).parameters.values()
    return [(each, hints.get(each.name, each.annotation)) for each in parameters]


def _is_bundle(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Bundle)
