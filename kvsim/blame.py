"""Names the user's own policy that is at fault when a run raises an exception."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.config import RunConfig, to_table
from kvsim.errors import EngineStopped, KvsimError, PolicyError

_NAME = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""A `package.module:name`."""
_PACKAGE = __name__.partition(".")[0]


class _Place(NamedTuple):
    """A line of code that was running."""

    module: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}, in {self.function}"


@contextmanager
def blaming(*configs: RunConfig, router: str = "") -> Iterator[None]:
    """Raises `PolicyError` in place of an exception that a user's own policy raised, or that kvsim
    raised because such a policy broke a rule.

    Policies are those that the settings or `router` name as `package.module:name`. Without any,
    every exception passes; errors of kvsim (`KvsimError`) always pass.
    """
    try:
        yield
    except (KvsimError, EngineStopped):
        raise
    except (Exception, SystemExit) as error:
        policies = dict(_policies("router", router))
        for config in configs:
            policies |= _policies("", to_table(config))
        if not policies:
            raise
        raise PolicyError(_told(policies, error)) from error


def raised_here(error: BaseException) -> bool:
    """Whether kvsim raised an exception, or a library that keeps its times."""
    places = _places(error)
    return bool(places) and _package(places[-1].module) in (_PACKAGE, "simpy", "numpy")


def _told(policies: Mapping[str, str], error: BaseException) -> str:
    """The text for an exception: what was raised, where, and by which of the policies."""
    each: BaseException | None = error
    while each is not None:  # SimPy raises a copy, which has the one that was raised as its cause.
        for place in reversed(_places(each)):
            for label, module in policies.items():
                if _package(place.module) == _package(module):
                    return f"{label}: {_shown(each)} ({place}); {_REMEDY}"
        error, each = each, each.__cause__ or each.__context__
    broke = f"{' or '.join(policies)} may have broken a rule of kvsim"
    return f"{broke}: {_shown(error)} ({_places(error)[-1]}); {_REMEDY}"


_REMEDY = "kvsim.simulate() in Python shows the whole traceback"


def _shown(error: BaseException) -> str:
    """Class and text of an exception, as Python shows them, also where its text fails."""
    return "".join(traceback.format_exception_only(error)).strip()


def _places(error: BaseException) -> list[_Place]:
    """Where an exception came through, the line that raised it last."""
    return [
        _Place(
            str(frame.f_globals.get("__name__")),
            frame.f_code.co_filename,
            line,
            frame.f_code.co_name,
        )
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]


def _policies(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """The user's own policies named in a setting, as (setting and name, module)."""
    if isinstance(value, Mapping):
        for inner in value:
            yield from _policies(f"{key}.{inner}" if key else str(inner), value[inner])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _policies(key, inner)
    elif isinstance(value, str):
        found = _NAME.fullmatch(value)
        if found and found[1] in sys.modules and _package(found[1]) != _PACKAGE:
            yield f"{key}: {value}", found[1]


def _package(module: str) -> str:
    return module.partition(".")[0]
