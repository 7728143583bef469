"""Names the user's own policy that is at fault when a run raises an exception or does not go on."""

from __future__ import annotations

import inspect
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from kvsim.core import guard
from kvsim.errors import EngineStopped, KvsimError, PolicyError
from kvsim.settings import limits
from kvsim.settings.config import RunConfig, to_table

_NAME = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""A `package.module:name`."""
_PACKAGE = __name__.partition(".")[0]
_LOOKS = 6
"""How often a call is looked at, until it has taken too long."""


class _Place(NamedTuple):
    """A line of code that was running."""

    module: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}, in {self.function}"


class _Overdue(BaseException):
    """One call of a policy takes too long. Nothing that a policy expects to catch."""


@contextmanager
def blaming(*configs: RunConfig, router: str = "") -> Iterator[None]:
    """Raises `PolicyError` in place of an exception that a user's own policy raised, or that kvsim
    raised because such a policy broke a rule, and where one call of a policy takes longer than
    `limits.POLICY_CALL_S`.

    Policies are those that the settings or `router` name as `package.module:name`. Without any,
    every exception passes; errors of kvsim (`KvsimError`) always pass. With one, the books of the
    engine are closed meanwhile (`kvsim.core.guard`).
    """
    policies = dict(_policies("router", router))
    for config in configs:
        policies |= _policies("", to_table(config))
    packages = {_package(module) for module in policies.values()}
    begin = sys._getframe(2)  # below this one and that of `contextmanager`
    try:
        with guard.closed() if policies else nullcontext(), _watched(packages, begin):
            yield
    except (KvsimError, EngineStopped):
        raise
    except (Exception, SystemExit, _Overdue) as error:
        policies = {label: module for label, module in policies.items() if module in sys.modules}
        if not policies:
            raise
        raise PolicyError(_told(policies, error)) from error


@contextmanager
def _watched(packages: Collection[str], begin: FrameType) -> Iterator[None]:
    """Raises `_Overdue` in a call of these packages that takes too long: in the main thread, where
    signals are handled, and on systems that have timers.

    Looks now and then from outside, so that no call costs anything. `begin`: where the run begins;
    who called it may be of the same packages.
    """
    timed = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    # Where somebody else has set an alarm, that one stays.
    if not (packages and timed and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL):
        yield
        return
    most_s = limits.POLICY_CALL_S * limits.factor()
    seen: FrameType | None = None
    since_s = 0.0

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal seen, since_s
        call = _call(frame, packages, begin)
        debugged = sys.gettrace() is not None  # It may wait for its user.
        if call is None or call is not seen or debugged:
            seen, since_s = call, time.monotonic()
        elif time.monotonic() - since_s >= most_s:
            raise _Overdue(
                f"a call has not returned within {most_s:g} s; --limits 10 waits ten times as long"
            )

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, most_s / _LOOKS, most_s / _LOOKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        seen = None


def _call(frame: FrameType | None, packages: Collection[str], begin: FrameType) -> FrameType | None:
    """The call from kvsim into one of these packages that is under way; None: none is."""
    call = None
    # From the inside out: the outermost call counts, however deep the policy is in calls of its
    # own.
    while frame is not None and frame is not begin:
        # A generator has the same frame whenever it goes on.
        package = _package(str(frame.f_globals.get("__name__")))
        if package in packages and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            call = frame
        frame = frame.f_back
    return call


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
    if isinstance(error, _Overdue):
        return str(error)
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
    if isinstance(value, str):
        found = _NAME.fullmatch(value) if ":" in value else None
        if found and _package(found[1]) != _PACKAGE:
            yield f"{key}: {value}", found[1]
    elif isinstance(value, dict):
        for inner in value:
            yield from _policies(f"{key}.{inner}" if key else str(inner), value[inner])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _policies(key, inner)


def _package(module: str) -> str:
    return module.partition(".")[0]
