"""Commands: imported when they are called, so that the others start quickly; and what they say
besides results, notes, progress, and where files are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command, get_group

from kvsim.report import make_console

if TYPE_CHECKING:
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace


COMMANDS = {
    "run": "Replay a trace through an engine and see where memory and time went.",
    "compare": "Run each configuration on the same requests and show what differs.",
    "diff": "Say why two runs of the same requests differ: which decision, which time, which"
    " requests.",
    "why": "Tell one request's story: what it waited for, what delayed it, where its time went.",
    "serve": "Serve vLLM's HTTP interface, metrics and KV events from the simulated engine.",
    "timeline": "Write a run as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing.",
    "report": "Rebuild report.html from the results in a folder.",
    "policies": "List every engine, block manager and cost model, with its parameters.",
    "conform": "Replay recorded cases on the virtual clock and compare every decision.",
    "bench": "Measure CPU time and memory of runs that anybody can rebuild.",
    "sweep": "Run every combination of settings once, and show which are best.",
    "check": "Replay a measured run, show predicted beside measured, and say what to correct"
    " first.",
    "size": "Find the least memory, the fewest replicas, the highest rate or the best limit"
    " that keeps the objectives.",
    "advise": "Try the settings that matter, and say which to change for these objectives.",
    "validate": "Run the scheduler on a real engine and show how far the profile is off.",
    "calibrate": "Time the kernels here and write a profile with its own held-out error.",
    "crossover": "Compare swapping a request out and in with computing it again, by length and"
    " link.",
    "trace": "Look at a trace, check it, convert it, or make one.",
    "cache": "Hit rate of a trace by cache size; audit of a run's cache.",
    "profile": "Make a profile from measured kernel times, look at it, compare two.",
}
"""Name → the first line of its help. Its module has its name, if `_MODULES` names no other."""

_MODULES = {
    **dict.fromkeys(("diff", "why", "report"), "folders"),
    **dict.fromkeys(("compare", "sweep", "size", "advise"), "search"),
    **dict.fromkeys(("check", "validate", "conform", "bench"), "against"),
    **dict.fromkeys(("calibrate", "crossover"), "profile"),
}
_GROUPS = ("trace", "cache", "profile")
"""Commands that are groups of commands."""

_NAME, _NO_BREAK = re.compile(r"--[\w-]+"), "\u2011"
"""An option in a text, and a hyphen at which no line ends."""

SHOW_ALL = "--help-all"
asked = {"quiet": False, "json": False, "help-all": False}
"""Whether nothing but results is to be said, whether these are JSON, and whether help lists
settings, too."""
_WITH_TORCH = ("calibrate", "validate")


class SectionedCommand(TyperCommand):
    """A command whose plain help lists the options section by section.

    Names are never cut: one that is too long for its column has a line of its own. Settings are
    listed by `--help-all` alone. A command of one trace takes it as `--trace X` and as X.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = {each.name: each for each in self.params}
        trace = named.get("trace") or named.get("file")
        if isinstance(trace, TyperArgument):
            return super().parse_args(ctx, _unnamed(args))
        if trace is None or any(isinstance(each, TyperArgument) for each in self.params):
            return super().parse_args(ctx, args)
        # No parameter of Typer's is both an option and an argument: what is left over is the trace.
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if len(rest) == 1 and ctx.params["trace"] is None:
            ctx.params["trace"], ctx.args = rest.pop(), []
        if rest:
            ctx.fail(f"Got unexpected extra argument(s) ({' '.join(rest)})")
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        left_out: dict[str, int] = {}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None:
                section = each.rich_help_panel if isinstance(each, TyperOption) else "Arguments"
                if isinstance(each, TyperOption) and section and not asked["help-all"]:
                    left_out[section] = left_out.get(section, 0) + 1
                    continue
                name, text = record
                # Help breaks lines at hyphens, too, and a name in two pieces cannot be copied.
                unbroken = _NAME.sub(lambda match: match[0].replace("-", _NO_BREAK), text)
                sections.setdefault(section or "Options", []).append((name, unbroken))
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if left_out:
            listed = ", ".join(f"{section} ({number})" for section, number in left_out.items())
            formatter.write_text("")
            formatter.write_text(
                f"{SHOW_ALL} also lists settings: {listed}.".replace("-", _NO_BREAK)
            )
        formatter.buffer = [text.replace(_NO_BREAK, "-") for text in formatter.buffer]


def _unnamed(args: list[str]) -> list[str]:
    """Arguments in which `--trace X` is an X behind all others."""
    for place, each in enumerate(args):
        if each.startswith("--trace="):
            return [*args[:place], *args[place + 1 :], each.partition("=")[2]]
        if each == "--trace":
            return [*args[:place], *args[place + 2 :], *args[place + 1 : place + 2]]
    return args


class DeferredGroup(TyperGroup):
    """A group that knows only the name and the help line of each of its `COMMANDS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, about in COMMANDS.items():
            self.add_command(TyperCommand(name, short_help=about))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; if nobody reads its output any more, the exit code is 141."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # What is still buffered goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        return result


def load(name: str) -> Any:
    """Import a command of `COMMANDS`."""
    if name not in _WITH_TORCH:
        # kvsim multiplies no matrices: the threads that numpy's BLAS starts would only spin.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    module = import_module(f"kvsim.cli.{_MODULES.get(name, name)}")
    if name in _GROUPS:
        group = get_group(module.app)
        group.name = name
        return group
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=SectionedCommand)(getattr(module, name))
    return get_command(app)


class _Group(typer.Typer):
    def command(self, name: str | None = None, **settings: Any) -> Any:
        """A subcommand, with help as that of any command."""
        return super().command(name, **{"cls": SectionedCommand, **settings})


def group_of(name: str) -> typer.Typer:
    """What takes the subcommands of a group of `COMMANDS`."""
    return _Group(help=COMMANDS[name], no_args_is_help=True, rich_markup_mode=None)


T = TypeVar("T")

PATIENCE_S = 1.0
"""A run that ends before has no progress bar: it could not be read."""


def note(*texts: str) -> None:
    """Print these notes to standard error, one a line."""
    for text in () if asked["quiet"] else texts:
        print(f"note: {text}", file=sys.stderr)


def command_line() -> str:
    """The command that runs now, as one would type it."""
    return shlex.join(["kvsim", *sys.argv[1:]])


def tell_written(out: str | Path, page: str) -> None:
    """Say which folder was written, and which of its pages to open."""
    if not (asked["quiet"] or asked["json"]):
        make_console().print(f"\nwritten to {out}: open {Path(out) / page}")


def watched() -> bool:
    """Whether somebody reads what is said besides results."""
    return sys.stderr.isatty() and not asked["quiet"]


@contextmanager
def progress_bar(
    label: str, total: int | None = None, patience_s: float = 0
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of requests, or runs, that just ended.

    A bar to `total`, or without one a count of runs; it is not shown before `patience_s`.
    """
    if not watched():
        yield lambda number: None
        return
    from rich import progress
    from rich.console import Console

    counted = (
        (progress.TextColumn("{task.completed} runs"), progress.TimeElapsedColumn())
        if total is None
        else (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
    )
    columns = progress.SpinnerColumn(), progress.TextColumn("{task.description}"), *counted
    shown = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    task, begin_s = shown.add_task(label, total=total), monotonic()

    def advance(number: int) -> None:
        if monotonic() - begin_s >= patience_s:
            shown.start()
        shown.advance(task, number)

    advance(0)
    try:
        yield advance
    finally:
        shown.stop()


def simulate_shown(
    simulate: Callable[..., T], trace: Trace, config: RunConfig, label: str, **more: Any
) -> T:
    """What `simulate` returns for a trace, with a progress bar if that takes a while.

    `more`: further arguments of `simulate`.
    """
    total = min(len(trace.rows), config.num_prompts or len(trace.rows))
    with progress_bar(label, total, PATIENCE_S) as progress:
        return simulate(trace, config, progress=progress, command=command_line(), **more)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module` in a process of its own, because start-up settings
    decide its times; exits with its exit code if that is not 0.

    The process finds the modules of this one, and `kvsim_kernels` also in a checkout.
    """
    beside = Path(__file__).resolve().parents[2] / "kernels"
    paths = [str(beside), *(str(Path(path).resolve()) for path in sys.path)]
    quiet = {"KVSIM_QUIET": "1"} if asked["quiet"] else {}
    environment = {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *arguments]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise typer.Exit(code if code > 0 else 1)
