"""SIGTERM and SIGHUP end a command as Ctrl-C does, so that nothing half-written stays behind."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType

_INTERRUPTS = [signal.SIGINT]
"""The signals that came, Ctrl-C first."""


_PYTHONS_OWN = signal.default_int_handler


def heed_signals() -> None:
    """From now on, SIGTERM and SIGHUP raise `KeyboardInterrupt`.

    A signal that is ignored, as under `nohup`, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    del _INTERRUPTS[1:]
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    sys.unraisablehook = _again


def all_is_done() -> None:
    """From now on, signals end the process at once: the results are written, and worker processes
    look themselves whether their parent is there."""
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) in (_interrupt, _PYTHONS_OWN):
                signal.signal(number, signal.SIG_DFL)


def exit_code() -> int:
    """The exit code of an interrupted command, as shells have it: 130, 143 or 129."""
    return 128 + _INTERRUPTS[-1]


def _again(lost: sys.UnraisableHookArgs) -> None:
    """Python drops an interrupt that is raised in a callback of its own: raise it once more."""
    if lost.exc_type is KeyboardInterrupt:
        # The signal that came: SIGINT may be ignored, as in a process in the background.
        signal.signal(_INTERRUPTS[-1], _interrupt)
        threading.Timer(0.01, _interrupt_main_thread, [_INTERRUPTS[-1]]).start()
    else:
        sys.__unraisablehook__(lost)


def _interrupt_main_thread(number: int) -> None:
    main = threading.main_thread().ident
    while _in_hook(sys._current_frames().get(main or 0)):
        time.sleep(0.001)  # Python would drop it there, too, and would not call the hook again.
    if sys.platform == "win32" or main is None:
        signal.raise_signal(number)
    else:
        # Sent to this thread, it would not wake the main thread where that sleeps.
        signal.pthread_kill(main, number)


def _in_hook(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _again.__code__:
        frame = frame.f_back
    return frame is not None


def _interrupt(number: int, _: object) -> None:
    _INTERRUPTS.append(signal.Signals(number))
    signal.signal(number, signal.SIG_DFL)  # A second one ends the process at once.
    raise KeyboardInterrupt
