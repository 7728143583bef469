"""The command line: the only place that prints and exits.

Results go to standard output and to files; notes, progress and errors to standard error. Exit
codes: `docs/reference/exit-codes.md`. SIGTERM and SIGHUP end a command as Ctrl-C does, so that
nothing half-written stays behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from io import TextIOWrapper
from types import FrameType

import typer
from typer import Option

from kvsim.cli import commands
from kvsim.cli.commands import DeferredGroup
from kvsim.core import compiled
from kvsim.errors import KvsimError, shortened
from kvsim.settings.limits import VARIABLE, factor
from kvsim.version import __version__

_INTERRUPTED = 130

_GREETING = f"""\
kvsim {__version__} replays a request trace through the scheduler and the KV cache of an
LLM server, and says where memory and time went. Three commands to try:

  kvsim run chat --out runs/first
  kvsim advise burst --slo "p99_ttft<1s"
  kvsim size chat --find num_gpu_blocks --slo "p99_ttft<2s"

`kvsim -h` lists commands, `kvsim COMMAND -h` options, `--help-all` settings."""

app = typer.Typer(
    name="kvsim",
    cls=DeferredGroup,
    help="Simulate the KV cache and the scheduler of an LLM server, from a request trace.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Plain help: the list of commands is there at once.
)


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context,
    version: bool = Option(False, "--version", help="Print the version."),
    quiet: bool = Option(
        False, "--quiet", help="With any command: no notes and no progress, results alone."
    ),
    limits: str = Option(
        None, metavar="X", help="Multiply the limits on the size of traces, as in --limits 10."
    ),
) -> None:
    """The version, or a greeting."""
    if limits is not None:
        os.environ[VARIABLE] = limits
        factor()
    if version:
        print(f"kvsim {__version__} ({compiled.explanation()})")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(_GREETING)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; a user's error is one line and exit code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands.asked |= {each: f"--{each}" in given for each in commands.asked}
    given = ["--help" if each == commands.SHOW_ALL else each for each in given if each != "--quiet"]
    # The user's own schedulers are imported from the folder in which the command runs.
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.append("")
    _mend_streams()
    heed_signals()
    sys.exit(_run(_repeat_lists(given)))


def _mend_streams() -> None:
    """Let anything be printed anywhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Closed, as by `>&-`: nobody wants what is printed there.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    # A terminal may lack letters, and file names may hold bytes that are no text.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _run(arguments: list[str]) -> int:
    """Run a command and say what went wrong; returns the exit code."""
    try:
        code = app(arguments, standalone_mode=False)
    except KvsimError as error:
        return _failed(str(error))
    except typer.TyperException as error:
        text = error.format_message()  # Without a command there is none: the help was printed.
        return _failed(text) if text else 2
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except OSError as error:
        return _failed(f"{error.filename or 'output'}: {error.strerror or error}")
    if code != _INTERRUPTED:  # as typer returns it
        return code if isinstance(code, int) else 0
    print("kvsim: interrupted", file=sys.stderr)
    # Python remembers an interrupt that passed through `exec`, as dataclasses call it, and would
    # end by SIGINT, whatever exit code it is given, unless it runs something else.
    exec("")
    return exit_code()


def _repeat_lists(arguments: list[str]) -> list[str]:
    """Turn `--goodput a b`, as `vllm bench serve` takes it, into `--goodput a --goodput b`."""
    out: list[str] = []
    listing = False
    for argument in arguments:
        if argument.startswith("-"):
            listing = argument == "--goodput"
        elif listing and out[-1] != "--goodput" and ":" in argument:
            out.append("--goodput")
        elif listing and out[-1] != "--goodput":
            listing = False
        out.append(argument)
    return out


def _failed(line: str) -> int:
    """Say what went wrong; returns the exit code."""
    print("kvsim: " + shortened(" ".join(line.split())), file=sys.stderr)
    return 2


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
