"""Commands that are imported when they are called, so that the others start quickly."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command, get_group

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
    **dict.fromkeys(("diff", "why", "timeline", "report"), "folders"),
    **dict.fromkeys(("sweep", "size", "advise"), "search"),
    **dict.fromkeys(("check", "validate", "conform"), "against"),
    **dict.fromkeys(("calibrate", "crossover"), "profile"),
}
_GROUPS = ("trace", "cache", "profile")
"""Commands that are groups of commands."""

_NAME, _NO_BREAK = re.compile(r"--[\w-]+"), "\u2011"
"""An option in a text, and a hyphen at which no line ends."""

SHOW_ALL = "--help-all"
asked = {"all": False}
"""Whether help lists settings, too."""
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
            for place, each in enumerate(args):
                if each == "--trace" or each.startswith("--trace="):
                    given = each.partition("=")[2:] if "=" in each else args[place + 1 : place + 2]
                    args = [*args[:place], *args[place + 1 + ("=" not in each) :], *given]
                    break
            return super().parse_args(ctx, args)
        if trace is None or any(isinstance(each, TyperArgument) for each in self.params):
            return super().parse_args(ctx, args)
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
                if isinstance(each, TyperOption) and section and not asked["all"]:
                    left_out[section] = left_out.get(section, 0) + 1
                    continue
                name, text = record
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
